"""An inbox on a real file, with a clock and ids that the test owns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import count
from pathlib import Path

import pytest
from support.outboxes import Clock

from inbox import Inbox

OpenInbox = Callable[[], Awaitable[Inbox]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
def database(state: Path) -> Path:
    return state / "inbox.db"


@pytest.fixture
def open_inbox(state: Path, clock: Clock) -> OpenInbox:
    numbers = count(1)

    async def open_it() -> Inbox:
        return await Inbox.open(state, clock=clock, new_id=lambda: f"FILE{next(numbers)}")

    return open_it


@pytest.fixture
async def inbox(open_inbox: OpenInbox) -> AsyncIterator[Inbox]:
    inbox = await open_inbox()
    yield inbox
    await inbox.close()
