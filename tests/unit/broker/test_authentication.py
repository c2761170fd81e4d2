"""Who guesses at tokens is told so ever more slowly, and hung up on in the end."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from broker.authentication import _Refusals


async def test_after_a_hundred_refusals_the_next_wait_and_of_too_many_the_connection_ends() -> None:
    hung_up: list[int] = []
    refusals = _Refusals(lambda: 1000.0)
    request: Any = SimpleNamespace(transport=SimpleNamespace(abort=lambda: hung_up.append(1)))
    waits = [asyncio.create_task(refusals.wait(request)) for _ in range(600)]
    await asyncio.sleep(0)
    assert abs(sum(wait.done() for wait in waits) - 100) <= 1  # times are floats
    assert not hung_up
    for _ in range(2):
        await refusals.wait(request)
    assert hung_up
    for wait in waits:
        wait.cancel()
