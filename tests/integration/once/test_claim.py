"""A block and its lease: renewed while it runs, cancelled when it is lost, settled whatever happens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

import pytest

from postroom.claims import Ended, Key, State
from postroom.errors import Unavailable
from postroom.once import Done, Held, KeyHeld, LeaseLost, Registry, Result, Run, Scope
from postroom.once.model import state_of
from postroom.once.sqlite import SqliteStore

SCOPE = Scope("acme", "orders", "k-1")
NAMES = ("acme", "orders", "k-1")


class Hourglass:
    """Time that only the test moves: whoever sleeps is woken when its time has come."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []
        self._slept = asyncio.Event()

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self.now + seconds, woken))
        self._slept.set()
        await woken.wait()

    async def until_somebody_sleeps(self) -> None:
        self._slept.clear()
        while not self._sleepers:
            await self._slept.wait()

    async def turn(self, seconds: float) -> None:
        """Let `seconds` pass, and what they wake go on until it sleeps again."""
        await self.until_somebody_sleeps()
        self.now += seconds
        due = [woken for until, woken in self._sleepers if until <= self.now]
        self._sleepers = [(until, woken) for until, woken in self._sleepers if until > self.now]
        for woken in due:
            woken.set()
        for _ in range(20):
            await asyncio.sleep(0)


class Fickle(SqliteStore):
    """A store that can't be reached for some steps, before or after it took them."""

    refusals = 0
    lost_answers = 0

    async def settle(self, ended: Sequence[Ended]) -> list[bool]:
        self._away()
        settled = await super().settle(ended)
        if self.lost_answers:
            self.lost_answers -= 1
            raise _away()
        return settled

    async def renew(self, held: Sequence[tuple[Key, str]], lease: float) -> list[datetime | None]:
        self._away()
        return await super().renew(held, lease)

    def _away(self) -> None:
        if self.refusals:
            self.refusals -= 1
            raise _away()


def _away() -> Unavailable:
    return Unavailable.of("registry_unavailable", "away", retryable=True)


@pytest.fixture
def time() -> Hourglass:
    return Hourglass()


@pytest.fixture
async def store(time: Hourglass) -> AsyncIterator[Fickle]:
    store = await Fickle.open(None, time)
    yield store
    await store.close()


@pytest.fixture
def registry(store: Fickle, time: Hourglass) -> Registry:
    return Registry(store, lease=30, wait=60, clock=time, sleep=time.sleep)


async def state(store: Fickle) -> str | None:
    row = (await store.look_up([SCOPE.columns])).get(SCOPE.columns)
    return row and state_of(row)


async def test_a_claim_is_entered_once(registry: Registry) -> None:
    once = registry.once(*NAMES)
    async with once:
        pass
    with pytest.raises(RuntimeError, match="was entered before: call `once` again for each block"):
        async with once:
            pass


async def test_a_lease_is_renewed_while_the_block_runs(registry: Registry, store: Fickle, time: Hourglass) -> None:
    async with registry.once(*NAMES):
        for _ in range(10):
            await time.turn(10)
    assert await state(store) == "COMMITTED"


async def test_a_block_whose_lease_is_lost_is_cancelled(registry: Registry, store: Fickle, time: Hourglass) -> None:
    async def block() -> None:
        async with registry.once(*NAMES):
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await time.until_somebody_sleeps()
    time.now += 31  # as if the process had been stopped
    assert isinstance(await registry.begin(SCOPE), Run)
    await time.turn(0)
    with pytest.raises(LeaseLost):
        await task
    assert not task.cancelled()
    assert await state(store) == "PENDING"


async def test_a_block_that_ends_after_its_lease_cannot_commit(
    registry: Registry, store: Fickle, time: Hourglass
) -> None:
    async def block() -> None:
        async with registry.once(*NAMES) as claim:
            claim.result = "late"
            time.now += 31

    with pytest.raises(LeaseLost):
        await block()
    assert await state(store) == "PENDING"


async def test_a_block_that_turns_its_cancellation_into_another_error_still_lost_its_lease(
    registry: Registry, time: Hourglass
) -> None:
    async def block() -> None:
        async with registry.once(*NAMES):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise RuntimeError("interrupted") from error

    task = asyncio.create_task(block())
    await time.turn(31)
    with pytest.raises(LeaseLost):
        await task


async def test_a_cancelled_block_frees_its_key_and_stays_cancelled(registry: Registry, store: Fickle) -> None:
    entered = asyncio.Event()

    async def block() -> None:
        async with registry.once(*NAMES):
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state(store) == "FAILED"


async def test_a_block_that_is_cancelled_while_its_key_is_taken_frees_it(
    registry: Registry, store: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, taken = store.claim, asyncio.Event()

    async def claim_with_a_slow_answer(*wanted: Any) -> list[State]:
        states = await claim(*wanted)
        taken.set()
        await asyncio.sleep(0)
        return states

    async def block() -> None:
        async with registry.once(*NAMES):
            raise AssertionError

    monkeypatch.setattr(store, "claim", claim_with_a_slow_answer)
    task = asyncio.create_task(block())
    await taken.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await state(store) == "FAILED"


async def test_a_store_that_comes_back_within_the_lease_gets_the_commit(
    registry: Registry, store: Fickle, time: Hourglass
) -> None:
    async def block() -> None:
        async with registry.once(*NAMES):
            store.refusals = 3

    task = asyncio.create_task(block())
    while not task.done():
        await time.turn(1)
    await task
    assert await state(store) == "COMMITTED"


async def test_a_store_that_stays_away_costs_the_lease(registry: Registry, store: Fickle, time: Hourglass) -> None:
    async def block() -> None:
        async with registry.once(*NAMES):
            store.refusals = 1000
            await asyncio.Event().wait()

    task = asyncio.create_task(block())
    for _ in range(40):
        if not task.done():
            await time.turn(1)
    with pytest.raises(LeaseLost):
        await task


async def test_a_commit_whose_answer_was_lost_is_taken_for_done(
    registry: Registry, store: Fickle, time: Hourglass
) -> None:
    async def block() -> None:
        async with registry.once(*NAMES) as claim:
            claim.result = "paid"
            store.lost_answers = 1

    task = asyncio.create_task(block())
    while not task.done():
        await time.turn(1)
    await task
    assert await registry.begin(SCOPE) == Done(Result.of("paid"))


async def test_an_error_that_cannot_be_recorded_is_raised_all_the_same(registry: Registry, store: Fickle) -> None:
    async def block() -> None:
        async with registry.once(*NAMES):
            store.refusals = 1
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        await block()
    assert ["stays held" in note for note in caught.value.__notes__] == [True]


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AssertionError(), "AssertionError"),
        (Mute(), "Mute: (its text is not available: RuntimeError)"),
        (ExceptionGroup("both", [OSError("ink")]), "ExceptionGroup: both (1 sub-exception): OSError: ink"),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_whatever_a_block_raises_is_told_to_the_next_one(registry: Registry, error: Exception, told: str) -> None:
    with pytest.raises(type(error)):
        async with registry.once(*NAMES):
            raise error
    async with registry.once(*NAMES) as claim:
        assert (claim.first, claim.last_error) == (True, told)


async def test_whoever_waits_is_given_the_result(registry: Registry, time: Hourglass) -> None:
    run = await registry.begin(SCOPE)
    assert isinstance(run, Run)

    async def wait() -> object:
        async with registry.once(*NAMES) as claim:
            return claim.first, claim.result

    task = asyncio.create_task(wait())
    await time.turn(1)
    await time.turn(1)
    assert not task.done()
    await registry.commit(SCOPE, run.owner, Result.of("paid"))
    await time.turn(1)
    assert await task == (False, "paid")


async def test_whoever_waits_takes_over_what_a_crashed_worker_left(registry: Registry, time: Hourglass) -> None:
    assert isinstance(await registry.begin(SCOPE), Run)

    async def wait() -> object:
        async with registry.once(*NAMES) as claim:
            return claim.first, claim.attempt, claim.last_error

    task = asyncio.create_task(wait())
    while not task.done():
        await time.turn(1)
    assert await task == (True, 2, "lease_expired")


async def test_whoever_waits_too_long_is_told_when_to_try_again(
    registry: Registry, store: Fickle, time: Hourglass
) -> None:
    assert isinstance(await registry.begin(SCOPE), Run)

    async def wait() -> None:
        async with Registry(store, wait=10, clock=time, sleep=time.sleep).once(*NAMES):
            pytest.fail("the key is held")

    task = asyncio.create_task(wait())
    while not task.done():
        await time.turn(1)
    with pytest.raises(KeyHeld, match="try again") as caught:
        await task
    problem = caught.value.problem
    assert (problem.status, problem.code, problem.retryable) == (409, "key_held", True)
    assert problem.retry_after is not None
    assert 15 < problem.retry_after <= 20
    assert isinstance(await registry.begin(SCOPE), Held)


@pytest.mark.parametrize(("lease", "wait"), [(0, 0), (-1, 0), (1, -1)])
def test_a_lease_without_length_is_refused(store: Fickle, lease: float, wait: float) -> None:
    with pytest.raises(ValueError, match="lease"):
        Registry(store, lease=lease, wait=wait)
