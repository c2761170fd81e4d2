"""What a process holds: renewed while it works, and let go of in time, whatever the store does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from support.waiting import until

from postroom.claims import Claim
from postroom.claims.leases import LeaseLost, Leases

LEASE = 0.3


class Renewals:
    """A store that renews, or does what a test wants of it."""

    def __init__(self) -> None:
        self.asked: list[list[Claim]] = []
        self.failing: type[Exception] | None = None
        self.hanging = False
        self.lost: set[Claim] = set()

    async def __call__(self, claims: Sequence[Claim]) -> list[Claim]:
        self.asked.append(list(claims))
        if self.hanging:
            await asyncio.Event().wait()
        if self.failing is not None:
            raise self.failing("away")
        return [claim for claim in claims if claim not in self.lost]


def claim(name: str = "a") -> Claim:
    return Claim((name,), "me", 1, None, None, time.monotonic() + LEASE)


@pytest.fixture
def store() -> Renewals:
    return Renewals()


@pytest.fixture
def leases(store: Renewals) -> Leases:
    return Leases(store, LEASE)


async def test_a_lease_is_renewed_for_as_long_as_its_block_runs(leases: Leases, store: Renewals) -> None:
    held = claim()
    async with leases.holding(held):
        await until(lambda: len(store.asked) == 5)  # after five thirds of it
    assert held.until > time.monotonic()


async def test_what_is_held_at_once_is_renewed_in_one_step(leases: Leases, store: Renewals) -> None:
    first, second = claim("a"), claim("b")
    async with leases.holding(first), leases.holding(second):
        await until(lambda: bool(store.asked))
    assert store.asked[0] == [first, second]


@pytest.mark.parametrize("store_is", ["hanging", "failing"])
async def test_a_block_ends_with_its_lease_where_the_store_cannot_be_reached(
    leases: Leases, store: Renewals, store_is: str
) -> None:
    store.hanging, store.failing = store_is == "hanging", OSError if store_is == "failing" else None
    with pytest.raises(LeaseLost):
        async with leases.holding(claim()):
            await asyncio.Event().wait()
    assert store.asked


async def test_a_store_that_comes_back_in_time_costs_nothing(leases: Leases, store: Renewals) -> None:
    store.failing = OSError
    held = claim()
    end = held.until
    async with leases.holding(held):
        await until(lambda: bool(store.asked))
        store.failing = None
        await until(lambda: held.until > end)


async def test_of_two_the_one_that_is_lost_ends_and_the_other_goes_on(leases: Leases, store: Renewals) -> None:
    kept, lost = claim("kept"), claim("lost")
    store.lost.add(lost)

    async def hold(held: Claim) -> Any:
        async with leases.holding(held):
            await asyncio.sleep(LEASE * 2)
            return "ended"

    assert [type(each) for each in await asyncio.gather(hold(kept), hold(lost), return_exceptions=True)] == [
        str,
        LeaseLost,
    ]


async def test_a_block_that_raises_something_else_because_it_was_cancelled_has_lost_its_lease(
    leases: Leases, store: Renewals
) -> None:
    store.failing = OSError

    async def hold() -> None:
        async with leases.holding(claim()):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise RuntimeError("interrupted") from error

    with pytest.raises(LeaseLost):
        await hold()


async def test_an_error_of_the_block_is_raised_as_it_is(leases: Leases) -> None:
    for error in (ZeroDivisionError, TimeoutError):
        with pytest.raises(error):
            async with leases.holding(claim()):
                raise error


async def test_a_block_that_is_cancelled_by_others_stays_cancelled(leases: Leases) -> None:
    async def hold() -> None:
        async with leases.holding(claim()):
            await asyncio.Event().wait()

    task = asyncio.create_task(hold())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_runs_where_nothing_is_held(leases: Leases) -> None:
    async with leases.holding(claim()):
        assert "leases" in {task.get_name() for task in asyncio.all_tasks()}
    await asyncio.sleep(0)
    assert "leases" not in {task.get_name() for task in asyncio.all_tasks()}
