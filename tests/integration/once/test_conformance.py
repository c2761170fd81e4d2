"""What every store promises: one suite, run on SQLite and on Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from postroom._wire.once import KeysQuery
from postroom.claims import MAX_RESULT
from postroom.errors import Conflict, InvalidMessage
from postroom.once import Done, Held, LeaseLost, Registry, Result, Run, Scope, open_registry
from postroom.once.model import MAX_ERROR

SCOPE = Scope("acme", "orders", "k-1", "billing")
PAID = Result.of({"charge": 7})

# (state, asked by) and operation → what is answered, and the state after. `None`: there is no key.
MINE, OTHER = "mine", "other"
TABLE: dict[tuple[str | None, str], dict[str, tuple[object, str | None]]] = {
    (None, MINE): {
        "begin": (Run, "PENDING"), "renew": (LeaseLost, None), "commit": (LeaseLost, None), "fail": (LeaseLost, None),
    },
    ("PENDING", MINE): {
        "begin": (Held, "PENDING"), "renew": (None, "PENDING"), "commit": (None, "COMMITTED"), "fail": (None, "FAILED"),
    },
    ("PENDING", OTHER): {
        "begin": (Held, "PENDING"), "renew": (LeaseLost, "PENDING"), "commit": (LeaseLost, "PENDING"),
        "fail": (LeaseLost, "PENDING"),
    },
    ("EXPIRED", MINE): {
        "begin": (Run, "PENDING"), "renew": (LeaseLost, "PENDING"), "commit": (LeaseLost, "PENDING"),
        "fail": (LeaseLost, "PENDING"),
    },
    ("EXPIRED", OTHER): {
        "begin": (Run, "PENDING"), "renew": (LeaseLost, "PENDING"), "commit": (LeaseLost, "PENDING"),
        "fail": (LeaseLost, "PENDING"),
    },
    ("COMMITTED", MINE): {
        "begin": (Done, "COMMITTED"), "renew": (LeaseLost, "COMMITTED"), "commit": (None, "COMMITTED"),
        "fail": (LeaseLost, "COMMITTED"),
    },
    ("COMMITTED", OTHER): {
        "begin": (Done, "COMMITTED"), "renew": (LeaseLost, "COMMITTED"), "commit": (LeaseLost, "COMMITTED"),
        "fail": (LeaseLost, "COMMITTED"),
    },
    ("FAILED", MINE): {
        "begin": (Run, "PENDING"), "renew": (LeaseLost, "FAILED"), "commit": (LeaseLost, "FAILED"),
        "fail": (None, "FAILED"),
    },
    ("FAILED", OTHER): {
        "begin": (Run, "PENDING"), "renew": (LeaseLost, "FAILED"), "commit": (LeaseLost, "FAILED"),
        "fail": (LeaseLost, "FAILED"),
    },
}  # fmt: skip
CELLS = [(state, who, operation) for (state, who), row in TABLE.items() for operation in row]


async def started(registry: Registry, scope: Scope = SCOPE) -> Run:
    begun = await registry.begin(scope)
    assert isinstance(begun, Run)
    return begun


async def brought_to(bench: Any, registry: Registry, state: str | None) -> str:
    """Bring the key to `state` and return who did."""
    if state is None:
        return "nobody/1/0"
    run = await started(registry)
    match state:
        case "EXPIRED":
            await bench.pass_time(31)
        case "COMMITTED":
            await registry.commit(SCOPE, run.owner, PAID)
        case "FAILED":
            await registry.fail(SCOPE, run.owner, "declined")
    return run.owner


async def outcome(step: Awaitable[object]) -> object:
    try:
        answer = await step
    except LeaseLost:
        return LeaseLost
    return type(answer) if isinstance(answer, (Run, Done, Held)) else None


def operations(registry: Registry, owner: str) -> dict[str, Callable[[], Awaitable[object]]]:
    return {
        "begin": lambda: registry.begin(SCOPE),
        "renew": lambda: registry.renew(SCOPE, owner),
        "commit": lambda: registry.commit(SCOPE, owner, PAID),
        "fail": lambda: registry.fail(SCOPE, owner, "declined"),
    }


@pytest.mark.parametrize(("state", "who", "operation"), CELLS)
async def test_every_cell_of_the_table(bench: Any, state: str | None, who: str, operation: str) -> None:
    registry = bench.registry()
    owner = await brought_to(bench, registry, state)
    asked = operations(registry, owner if who == MINE else "another/1/0")[operation]
    expected, after = TABLE[state, who][operation]
    assert await outcome(asked()) is expected
    assert await bench.state(SCOPE) == after


def test_the_table_has_every_cell() -> None:
    states = {state for state, _ in TABLE}
    assert states == {None, "PENDING", "EXPIRED", "COMMITTED", "FAILED"}
    assert all(set(row) == {"begin", "renew", "commit", "fail"} for row in TABLE.values())


async def test_the_first_runs_and_the_next_gets_its_result(bench: Any) -> None:
    registry = bench.registry()
    run = await started(registry)
    assert (run.attempt, run.last_error) == (1, None)
    await registry.commit(SCOPE, run.owner, PAID)
    assert await registry.begin(SCOPE) == Done(PAID)


async def test_a_held_key_says_until_when(bench: Any) -> None:
    registry = bench.registry()
    run = await started(registry)
    held = await registry.begin(SCOPE)
    assert isinstance(held, Held)
    assert held.until == run.lease_until
    assert 0 < held.seconds <= 30


async def test_a_failed_key_is_free_and_hands_its_error_on(bench: Any) -> None:
    registry = bench.registry()
    await registry.fail(SCOPE, (await started(registry)).owner, "card declined")
    again = await started(registry)
    assert (again.attempt, again.last_error) == (2, "card declined")


async def test_a_lease_that_ran_out_is_taken_over_and_its_owner_is_fenced(bench: Any) -> None:
    registry = bench.registry()
    lost = await started(registry)
    await bench.pass_time(31)
    taken = await started(registry)
    assert (taken.attempt, taken.last_error) == (2, "lease_expired")
    for step in (registry.commit(SCOPE, lost.owner, Result.of("late")), registry.fail(SCOPE, lost.owner, "late")):
        with pytest.raises(LeaseLost, match="has expired"):
            await step
    await registry.commit(SCOPE, taken.owner, PAID)
    with pytest.raises(LeaseLost):
        await registry.commit(SCOPE, lost.owner, Result.of("late"))
    assert await registry.begin(SCOPE) == Done(PAID)


async def test_a_renewed_lease_outlives_its_first_end(bench: Any) -> None:
    registry = bench.registry()
    run = await started(registry)
    await bench.pass_time(20)
    until = await registry.renew(SCOPE, run.owner)
    assert run.lease_until is not None
    assert until is not None
    await bench.pass_time(20)
    assert isinstance(await registry.begin(SCOPE), Held)
    await registry.commit(SCOPE, run.owner, PAID)


async def test_of_many_at_once_one_runs(bench: Any) -> None:
    registry = bench.registry()
    begun = await asyncio.gather(*(registry.begin(SCOPE) for _ in range(20)))
    assert sorted(type(each).__name__ for each in begun) == ["Claim"] + ["Held"] * 19


@pytest.mark.parametrize(
    "other",
    [
        Scope("acme", "orders", "k-1"),
        Scope("acme", "orders", "k-1", "shipping"),
        Scope("", "orders", "k-1", "billing"),
        Scope("acme", "refunds", "k-1", "billing"),
        Scope("acme", "orders", "K-1", "billing"),
        Scope("acme", "orders", "k-1 ", "billing"),
        Scope("acmeo", "rders", "k-1", "billing"),
    ],
)
async def test_a_commit_says_nothing_about_another_scope(bench: Any, other: Scope) -> None:
    registry = bench.registry()
    await registry.commit(SCOPE, (await started(registry)).owner, PAID)
    assert isinstance(await registry.begin(other), Run)


@pytest.mark.parametrize("value", [None, 0, "text", {"a": [1, 2.5, None]}, b"", b"\x00\xff", "ß\N{SNOWMAN}"])
async def test_a_result_comes_back_as_it_was(bench: Any, value: object) -> None:
    registry = bench.registry()
    await registry.commit(SCOPE, (await started(registry)).owner, Result.of(value))
    done = await registry.begin(SCOPE)
    assert isinstance(done, Done)
    assert done.result.value == value
    assert type(done.result.value) is type(value)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_bytes_of_each_kind_come_back_as_bytes(kind: Callable[[bytes], object]) -> None:
    assert Result.of(kind(b"\x00\xff")).value == b"\x00\xff"


async def test_the_largest_result_is_kept(bench: Any) -> None:
    registry = bench.registry()
    largest = Result.of(bytes(MAX_RESULT))
    await registry.commit(SCOPE, (await started(registry)).owner, largest)
    assert await registry.begin(SCOPE) == Done(largest)


async def test_an_error_is_kept_whatever_it_says(bench: Any) -> None:
    registry = bench.registry()
    await registry.fail(SCOPE, (await started(registry)).owner, "\0\ud800" + "x" * 5000)
    again = await started(registry)
    assert again.last_error is not None
    assert len(again.last_error) == MAX_ERROR
    assert again.last_error.endswith("xxx")


async def test_an_empty_key_records_nothing(bench: Any) -> None:
    registry = bench.registry()
    empty = Scope("acme", "orders", "", "billing")
    for _ in range(2):
        run = await started(registry, empty)
        assert run.lease_until is None
        await registry.renew(empty, run.owner)
        await registry.commit(empty, run.owner, PAID)
        await registry.fail(empty, run.owner, "")
    assert await bench.state(empty) is None
    assert await registry.purge(0) == 0


async def test_purging_forgets_what_ended_long_ago_and_nothing_else(bench: Any) -> None:
    registry = bench.registry()
    scopes = {name: Scope("acme", "orders", name, "billing") for name in ("done", "failed", "left", "held", "fresh")}
    runs = {name: await started(registry, scopes[name]) for name in ("done", "failed", "left")}
    await registry.commit(scopes["done"], runs["done"].owner, PAID)
    await registry.fail(scopes["failed"], runs["failed"].owner, "declined")
    await bench.pass_time(1000)
    await started(registry, scopes["held"])
    fresh = await started(registry, scopes["fresh"])
    await registry.commit(scopes["fresh"], fresh.owner, PAID)

    assert await registry.purge(timedelta(hours=1).total_seconds()) == 0
    assert await registry.purge(900, limit=2) == 2
    assert await registry.purge(900, limit=2) == 1
    left = {name for name, scope in scopes.items() if await bench.state(scope)}
    assert left == {"held", "fresh"}
    with pytest.raises(LeaseLost):
        await registry.commit(scopes["left"], runs["left"].owner, PAID)


@pytest.mark.parametrize(
    ("names", "field"),
    [
        (("t\0", "o", "k", "g"), "tenant"),
        (("t", "o" * 256, "k", "g"), "topic"),
        (("t", "o", "\ud800", "g"), "key"),
        (("t", "o", "k" * 513, "g"), "key"),
        (("t", "o", UUID(int=1), "g"), "key"),
        (("t", "o", b"k", "g"), "key"),
        ((None, "o", "k", "g"), "tenant"),
        (("t", "o", "k", ""), "group"),
    ],
)
def test_a_name_that_cannot_be_kept_is_refused(names: tuple[Any, Any, Any, Any], field: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        Scope(*names)
    assert (caught.value.problem.field, caught.value.code) == (field, f"invalid_{field}")


async def test_the_longest_names_are_kept(bench: Any) -> None:
    longest = Scope("ß" * 255, "ß" * 255, "\N{SNOWMAN}" * 512, "ß" * 255)
    assert (await started(bench.registry(), longest)).attempt == 1


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (object(), "result_not_json"),
        ({"a": {1j}}, "result_not_json"),
        ({"share": float("nan")}, "result_not_json"),
        (bytes(MAX_RESULT + 1), "result_too_large"),
    ],
)
def test_a_result_that_cannot_be_kept_is_refused(value: object, code: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        Result.of(value)
    assert caught.value.code == code


async def test_a_block_runs_once_and_every_later_one_is_given_its_result(bench: Any) -> None:
    registry = bench.registry(group="billing")
    charged = []
    for _ in range(3):
        async with registry.once("acme", "orders", "k-1") as claim:
            if claim.first:
                charged.append(claim.attempt)
                claim.result = {"charge": 7}
        assert claim.result == {"charge": 7}
    assert charged == [1]
    with pytest.raises(Conflict, match="already"):
        claim.result = "another"


async def test_a_block_that_raises_frees_its_key_for_the_next(bench: Any) -> None:
    registry = bench.registry(group="billing")
    with pytest.raises(ZeroDivisionError):
        async with registry.once("acme", "orders", "k-1"):
            raise ZeroDivisionError("card declined")
    async with registry.once("acme", "orders", "k-1") as claim:
        assert (claim.first, claim.attempt, claim.last_error) == (True, 2, "ZeroDivisionError: card declined")


async def test_a_producer_and_two_groups_work_for_themselves(bench: Any) -> None:
    for group in (None, "billing", "shipping"):
        async with bench.registry(group=group).once("acme", "orders", "k-1") as claim:
            assert claim.first


async def test_an_operator_finds_keys_by_what_they_are_of_and_how_they_are(bench: Any) -> None:
    store = bench.store
    for number, (group, state) in enumerate([("billing", "COMMITTED"), (None, "FAILED"), ("billing", "PENDING")]):
        scope = Scope("acme", "orders", f"k-{number}", group)
        run = await started(bench.registry(), scope)
        if state == "COMMITTED":
            await bench.registry().commit(scope, run.owner, PAID)
        if state == "FAILED":
            await bench.registry().fail(scope, run.owner, "declined")
        await bench.pass_time(1)

    async def found(limit: int = 10, **wanted: Any) -> list[str]:
        return [kept.key for kept in await store.find(KeysQuery(**wanted, limit=limit))]

    assert sorted(await found()) == ["k-0", "k-1", "k-2"]
    assert (await found())[0] == "k-2"  # its lease ends last
    assert len(await found(limit=2)) == 2
    assert await found(tenant="other") == []
    assert sorted(await found(tenant="acme", topic="orders", group="billing")) == ["k-0", "k-2"]
    assert await found(group="") == ["k-1"]
    (failed,) = await store.find(KeysQuery(state="FAILED", limit=10))
    assert (failed.tenant, failed.topic, failed.group, failed.key) == ("acme", "orders", None, "k-1")
    assert (failed.attempts, failed.last_error) == (1, "declined")
    assert (failed.lease_until, failed.settled_at is None) == (None, False)


@pytest.mark.parametrize("state", ["COMMITTED", "FAILED", "EXPIRED"])
async def test_a_key_that_an_operator_has_forgotten_runs_again_and_leaves_who_and_why(
    bench: Any, place: str, state: str
) -> None:
    registry, store = bench.registry(), bench.store
    run = await started(registry)
    if state == "EXPIRED":
        await bench.pass_time(31)
    else:
        await (
            registry.commit(SCOPE, run.owner, PAID) if state == "COMMITTED" else registry.fail(SCOPE, run.owner, "no")
        )

    assert await store.forget(SCOPE, "alice", "it was never charged")
    assert (await started(registry)).attempt == 1
    (act,) = await store.forgotten(SCOPE)
    was = "PENDING" if state == "EXPIRED" else state
    who = "alice as postroom" if place.startswith("postgres") else "alice"  # with the role that Postgres let in
    assert (act.actor, act.reason, act.state, act.attempts) == (who, "it was never charged", was, 1)


async def test_a_key_that_somebody_works_on_is_not_forgotten_nor_one_that_is_not_there(bench: Any) -> None:
    registry = bench.registry()
    run = await started(registry)
    assert not await bench.store.forget(SCOPE, "alice", "why not")
    assert not await bench.store.forget(Scope("acme", "orders", "another"), "alice", "why not")
    await registry.commit(SCOPE, run.owner, PAID)
    assert await bench.store.forgotten(SCOPE) == []


async def test_the_key_of_a_worker_that_died_under_a_clock_ahead_is_forgotten_once_that_is_set_back(bench: Any) -> None:
    await started(bench.registry())
    await bench.pass_time(-86_400)
    assert not await bench.store.forget(SCOPE, "alice", "it may live")
    await bench.pass_time(31)
    assert await bench.store.forget(SCOPE, "alice", "it was killed")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_a_database_of_another_isolation_level_lets_one_run_and_the_others_wait(
    database_url: str, level: str
) -> None:
    connection = await asyncpg.connect(database_url)
    name = await connection.fetchval("SELECT current_database()")
    await connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{level}'")
    await connection.close()
    ran = []

    async with open_registry(database_url, lease=60, wait=60) as registry:

        async def run(key: int) -> Any:
            async with registry.once("acme", "orders", f"k-{key}") as claim:
                if claim.first:
                    ran.append(key)
                    claim.result = key
            return claim.result

        results = await asyncio.gather(*(run(number % 5) for number in range(60)))
    assert sorted(ran) == [0, 1, 2, 3, 4]
    assert results == [number % 5 for number in range(60)]
