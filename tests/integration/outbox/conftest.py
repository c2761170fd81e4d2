"""An outbox on a real file, with a clock and ids that the test owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.outboxes import Clock

from outbox import Outbox, OutboxSettings

OpenOutbox = Callable[..., Awaitable[Outbox]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def database(state: Path) -> Path:
    return state / "outbox.db"


@pytest.fixture
def open_outbox(state: Path, clock: Clock) -> OpenOutbox:
    numbers = count(1)

    async def open_it(*, accept_lost_ids: bool = False, look_up: Any = None, **settings: Any) -> Outbox:
        return await Outbox.open(
            state,
            OutboxSettings(**settings),
            accept_lost_ids=accept_lost_ids,
            clock=clock,
            new_ids=lambda count: [f"ROW{next(numbers):023d}" for _ in range(count)],
            look_up=look_up,
        )

    return open_it


@pytest.fixture
async def outbox(open_outbox: OpenOutbox) -> AsyncIterator[Outbox]:
    outbox = await open_outbox()
    yield outbox
    await outbox.close()
