"""What every table of claims promises: one suite, run on all that there are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest
from support.databases import migrated_database

from embedded import EmbeddedPostgres
from postroom.chassis.postgres import migrate
from postroom.claims import DONE, Claim, Claims, Dead, Done, Ended, Held, Key, Later, Result
from postroom.delivery import ROOM
from postroom.delivery.http.inbox_messages import InboxMessages, open_inbox_pool
from postroom.once.postgres import PostgresStore
from postroom.once.sqlite import SqliteStore

LEASE = 30.0
BUSY = Later("http_503: busy")
POISON = Dead("poison", "http_422: no", 1)
ONE, TWO, THREE = "m-1", "m-2", "m-3"


@dataclass
class Table:
    """A table under test; rows are wanted and found by a short name."""

    claims: Claims
    expire: Callable[[], Awaitable[None]]  # lets every lease run out
    set_back: Callable[[], Awaitable[None]]  # by ten years, the clock by which leases have begun
    row: Callable[[str], tuple[Any, ...]]
    expired: str  # the last error of an attempt that ended without a word
    keeps_results: bool = False
    buries: bool = False
    given: int = 1  # values of a row behind its key

    def key(self, name: str) -> Key:
        return self.row(name)[: len(self.row(name)) - self.given]

    async def claim(self, *names: str, owner: str | None = None) -> list[object]:
        return list(await self.claims.claim([self.row(name) for name in names], owner or str(uuid4()), LEASE))

    async def claimed(self, name: str = ONE) -> Claim:
        (state,) = await self.claim(name)
        assert isinstance(state, Claim)
        return state

    async def settle(self, claim: Claim, outcome: Done | Later | Dead, *, counts: bool = True) -> bool:
        (settled,) = await self.claims.settle([Ended(claim.key, claim.owner, outcome, counts)])
        return settled

    async def renew(self, claim: Claim) -> object:
        (until,) = await self.claims.renew([(claim.key, claim.owner)], LEASE)
        return until


def of_registry(name: str) -> tuple[str, ...]:
    return "acme", "orders", "billing", name, "PENDING"


@asynccontextmanager
async def inbox_messages(url: str) -> AsyncIterator[Table]:
    pool = await open_inbox_pool(url, name="test", connections=2)
    context = f"c{uuid4().hex}"

    async def expire() -> None:
        query = (
            "UPDATE postroom.inbox_messages SET leased_until = now() WHERE source_context = $1 AND owner IS NOT NULL"
        )
        await pool.execute(query, context)

    async def set_back() -> None:
        query = (
            "UPDATE postroom.inbox_messages SET begun_at = begun_at + interval '10 years', "
            "leased_until = leased_until + interval '10 years' WHERE source_context = $1 AND owner IS NOT NULL"
        )
        await pool.execute(query, context)

    inbox = InboxMessages(pool, "mine", lease_seconds=LEASE)
    try:
        said = "sea.event.x.v1", None
        yield Table(
            inbox._claims,
            expire,
            set_back,
            lambda name: (context, name, "mine", *said),
            "ack_timeout",
            buries=True,
            given=2,
        )
    finally:
        await pool.close()


@asynccontextmanager
async def idempotency_keys(url: str) -> AsyncIterator[Table]:
    store = await PostgresStore.open(url)
    connection = await asyncpg.connect(url)

    async def expire() -> None:
        query = "UPDATE postroom_once.idempotency_keys SET lease_until = now() WHERE state = 'PENDING'"
        await connection.execute(query)

    async def set_back() -> None:
        query = (
            "UPDATE postroom_once.idempotency_keys SET begun_at = begun_at + interval '10 years', "
            "lease_until = lease_until + interval '10 years' WHERE state = 'PENDING'"
        )
        await connection.execute(query)

    try:
        await connection.execute("TRUNCATE postroom_once.idempotency_keys")
        yield Table(store, expire, set_back, of_registry, "lease_expired", keeps_results=True)
    finally:
        await connection.close()
        await store.close()


@asynccontextmanager
async def in_sqlite(file: Path | None) -> AsyncIterator[Table]:
    now = [1_700_000_000.0]

    async def expire() -> None:
        now[0] += LEASE + 1

    async def set_back() -> None:
        now[0] -= 10 * 365.25 * 86_400

    store = await SqliteStore.open(file, lambda: now[0])
    try:
        yield Table(store, expire, set_back, of_registry, "lease_expired", keeps_results=True)
    finally:
        await store.close()


@pytest.fixture(scope="session")
def claims_database(postgres_server: EmbeddedPostgres) -> str:
    return migrated_database(postgres_server, "claims", lambda url: migrate(url, ROOM))


@pytest.fixture(params=["inbox_messages", "idempotency_keys", "sqlite", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AbstractAsyncContextManager[Table]:
    match request.param:
        case "inbox_messages":
            return inbox_messages(request.getfixturevalue("claims_database"))
        case "idempotency_keys":
            return idempotency_keys(request.getfixturevalue("claims_database"))
        case place:
            return in_sqlite(tmp_path / "once.db" if place == "sqlite" else None)


@pytest.fixture
async def table(opened: AbstractAsyncContextManager[Table]) -> AsyncIterator[Table]:
    async with opened as table:
        yield table


async def test_the_first_attempt_is_number_one_and_has_no_error(table: Table) -> None:
    claim = await table.claimed()
    assert (claim.key, claim.attempt, claim.last_error) == (table.key(ONE), 1, None)


async def test_of_many_who_ask_at_once_one_gets_the_claim(table: Table) -> None:
    found = await asyncio.gather(*(table.claim(ONE) for _ in range(10)))
    assert sorted(type(state).__name__ for (state,) in found) == ["Claim"] + ["Held"] * 9


async def test_of_several_in_one_question_that_are_the_same_the_first_gets_it(table: Table) -> None:
    assert [type(state) for state in await table.claim(TWO, ONE, TWO, ONE)] == [Claim, Claim, Held, Held]


async def test_whoever_comes_second_learns_until_when_it_is_held(table: Table) -> None:
    claim = await table.claimed()
    (held,) = await table.claim(ONE)
    assert isinstance(held, Held)
    assert held.until == claim.lease_until
    assert 0 < held.seconds <= LEASE


async def test_a_claim_that_is_repeated_by_its_owner_counts_once(table: Table) -> None:
    claim = await table.claimed()
    (again,) = await table.claim(ONE, owner=claim.owner)
    assert isinstance(again, Claim)
    assert (again.owner, again.attempt) == (claim.owner, 1)


async def test_what_waits_is_free_for_the_next_attempt_which_learns_why_the_last_failed(table: Table) -> None:
    assert await table.settle(await table.claimed(), BUSY)
    again = await table.claimed()
    assert (again.attempt, again.last_error) == (2, "http_503: busy")


async def test_an_attempt_that_does_not_count_is_given_back(table: Table) -> None:
    assert await table.settle(await table.claimed(), BUSY)
    assert await table.settle(await table.claimed(), Later("nobody was there"), counts=False)
    again = await table.claimed()
    assert (again.attempt, again.last_error) == (2, "nobody was there")


async def test_what_is_done_is_never_claimed_again(table: Table) -> None:
    assert await table.settle(await table.claimed(), Done(Result.of("paid") if table.keeps_results else None))
    for _ in range(2):
        (state,) = await table.claim(ONE)
        assert state == (Done(Result.of("paid")) if table.keeps_results else DONE)


async def test_what_is_dead_is_never_claimed_again_where_the_table_has_room_for_the_dead(table: Table) -> None:
    assert await table.settle(await table.claimed(), POISON)
    (state,) = await table.claim(ONE)
    if table.buries:
        assert state == POISON
    else:
        assert isinstance(state, Claim)
        assert (state.attempt, state.last_error) == (2, POISON.error)


async def test_a_lease_that_ran_out_is_taken_over_and_settles_and_renews_nothing(table: Table) -> None:
    lost = await table.claimed()
    await table.expire()
    assert await table.renew(lost) is None
    assert not await table.settle(lost, BUSY)
    taken = await table.claimed()
    assert (taken.attempt, taken.last_error) == (2, table.expired)
    for outcome in (BUSY, POISON, DONE):
        assert not await table.settle(lost, outcome)
    assert await table.renew(lost) is None
    assert await table.settle(taken, Done(Result.of(1)) if table.keeps_results else DONE)


async def test_a_lease_that_ran_out_and_that_nobody_took_settles_nothing_either(table: Table) -> None:
    lost = await table.claimed()
    await table.expire()
    assert not await table.settle(lost, BUSY)
    (row,) = (await table.claims.look_up([lost.key])).values()
    assert (row.done, row.owner, row.attempts, row.state.__class__) == (False, lost.owner, 1, Held)


async def test_a_lease_that_is_renewed_runs_on(table: Table) -> None:
    claim = await table.claimed()
    await asyncio.sleep(0.002)  # the shortest time that every table tells apart
    until = await table.renew(claim)
    (held,) = await table.claim(ONE)
    assert isinstance(held, Held)
    assert held.until == until
    assert claim.lease_until is not None
    assert held.until >= claim.lease_until


@pytest.mark.parametrize("renewed", [False, True])
async def test_a_lease_that_began_under_a_clock_ahead_ends_a_lease_after_that_is_set_back(
    table: Table, *, renewed: bool
) -> None:
    assert await table.settle(await table.claimed(), BUSY)
    claim = await table.claimed()
    await table.set_back()
    if renewed:
        assert await table.renew(claim) is not None
    (held,), (again,) = await table.claim(ONE), await table.claim(ONE)
    assert isinstance(held, Held)
    assert isinstance(again, Held)
    assert 0 < held.seconds <= LEASE
    assert again.until == held.until  # looking does not prolong it
    assert await table.renew(claim) is not None
    await table.expire()
    taken = await table.claimed()
    assert (taken.attempt, taken.last_error) == (3, table.expired)


async def test_another_owner_settles_and_renews_nothing(table: Table) -> None:
    claim = await table.claimed()
    other = Claim(claim.key, str(uuid4()), 1, None, None, claim.until)
    assert await table.renew(other) is None
    assert not await table.settle(other, BUSY)
    assert await table.settle(claim, BUSY)


async def test_a_second_settlement_changes_nothing(table: Table) -> None:
    claim = await table.claimed()
    assert await table.settle(claim, BUSY)
    assert not await table.settle(claim, POISON)
    assert (await table.claimed()).last_error == "http_503: busy"


async def test_each_of_many_is_answered_in_its_place(table: Table) -> None:
    stale = await table.claimed(TWO)
    await table.expire()
    first, third = await table.claimed(ONE), await table.claimed(THREE)
    claims = [first, stale, third]
    renewed = await table.claims.renew([(claim.key, claim.owner) for claim in claims], LEASE)
    assert [until is not None for until in renewed] == [True, False, True]
    settled = await table.claims.settle([Ended(claim.key, claim.owner, BUSY) for claim in claims])
    assert settled == [True, False, True]
    again = await table.claim(THREE, TWO, ONE)
    assert [isinstance(state, Claim) and state.last_error for state in again] == [BUSY.error, table.expired, BUSY.error]


async def test_what_nobody_has_claimed_is_not_there(table: Table) -> None:
    assert await table.claims.look_up([table.key(ONE)]) == {}
    absent = Claim(table.key(ONE), str(uuid4()), 1, None, None, 0.0)
    assert await table.renew(absent) is None
    assert not await table.settle(absent, BUSY)
