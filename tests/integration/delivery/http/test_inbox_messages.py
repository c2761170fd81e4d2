"""The table behind the inbox: its states, its leases, and what it refuses (docs/contract/delivery.md#delivery-31)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest
from support.handlers import CountingHandler
from support.http_consumers import Inbox
from support.jetstream import QUICK, Context, Script

from postroom.chassis.postgres import REFUSED, migrate
from postroom.claims import DONE, Claim, Dead, Done, Held, Later, Outcome
from postroom.delivery import ROOM
from postroom.delivery.consumer import Attempts
from postroom.delivery.durables import list_durables
from postroom.delivery.http.client import HandlerClient
from postroom.delivery.http.handler import HttpHandler
from postroom.delivery.http.inbox_messages import (
    QUERIES,
    Begun,
    InboxMessages,
    find_begun,
    get_inbox_backlog,
    open_inbox_pool,
)
from postroom.delivery.http.requests import Incoming, read
from postroom.delivery.message import Delivery
from postroom.delivery.settings import HandlerSettings

POISON = Dead("poison", "http_422: no", 1)
BUSY = Later("http_503: busy", 1)
RAN_OUT = "UPDATE postroom.inbox_messages SET leased_until = now() - interval '1 second' WHERE source_context = $1"
MANY_DEAD = """
INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject, dead_at, dead_reason)
SELECT 'mine', 'demo', 'dead-' || number, 'demo.event.t1.v1', now(), 'poison' FROM generate_series(1, 1000) AS number
"""


@pytest.fixture
async def pool(inbox_database: str) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    pool = await open_inbox_pool(inbox_database, name="test", connections=2)
    yield pool
    await pool.close()


@pytest.fixture
def mine(pool: asyncpg.Pool[asyncpg.Record]) -> InboxMessages:
    return InboxMessages(pool, "mine", lease_seconds=30)


@pytest.fixture
def theirs(pool: asyncpg.Pool[asyncpg.Record]) -> InboxMessages:
    """The same consumer in another process."""
    return InboxMessages(pool, "mine", lease_seconds=30)


@pytest.fixture
def message(context: Context) -> Incoming:
    return incoming(context, "m-1")


def incoming(context: Context, message_id: str) -> Incoming:
    now = datetime.now(UTC)
    return read(Delivery(context.subject, b"{}", {}, message_id, context.events, 1, 1, published_at=now))


async def claimed(inbox: InboxMessages, message: Incoming) -> Claim:
    state = await inbox.claim(message)
    assert isinstance(state, Claim)
    return state


async def test_a_message_is_claimed_by_one_and_held_for_the_other(
    mine: InboxMessages, theirs: InboxMessages, message: Incoming
) -> None:
    claim = await claimed(mine, message)
    held = await theirs.claim(message)

    assert (claim.attempt, claim.last_error) == (1, None)
    assert isinstance(held, Held)
    assert 0 < held.seconds <= 30


async def test_a_lease_that_ran_out_settles_nothing_and_the_next_attempt_does(
    mine: InboxMessages, theirs: InboxMessages, message: Incoming, inbox: Inbox, context: Context
) -> None:
    stale = await claimed(mine, message)
    await inbox.execute(RAN_OUT, context.name)
    assert await mine.settle(stale, DONE) is False

    stolen = await claimed(theirs, message)
    assert (stolen.attempt, stolen.last_error) == (2, "ack_timeout")
    assert await mine.settle(stale, POISON) is False
    assert await mine.renew([stale]) == []
    assert await theirs.settle(stolen, DONE) is True
    assert await mine.claim(message) == DONE


async def test_a_lease_that_is_renewed_goes_on(mine: InboxMessages, message: Incoming, inbox: Inbox) -> None:
    claim = await claimed(mine, message)
    before = (await inbox.row("m-1"))["leased_until"]

    assert await mine.renew([claim]) == [claim]
    assert (await inbox.row("m-1"))["leased_until"] > before


async def test_attempts_and_the_last_error_survive_the_process(
    mine: InboxMessages, theirs: InboxMessages, message: Incoming
) -> None:
    first = await claimed(mine, message)
    await mine.settle(first, BUSY)
    second = await claimed(theirs, message)

    assert (second.attempt, second.last_error) == (2, "http_503: busy")


async def test_what_is_dead_stays_dead(mine: InboxMessages, message: Incoming) -> None:
    await mine.settle(await claimed(mine, message), POISON)

    assert await mine.claim(message) == POISON


async def test_an_attempt_too_many_is_not_counted(mine: InboxMessages, message: Incoming) -> None:
    await mine.settle(await claimed(mine, message), BUSY)
    await mine.settle(await claimed(mine, message), Dead("max_deliver", BUSY.error, 1), counts=False)

    assert await mine.claim(message) == Dead("max_deliver", BUSY.error, attempts=1)


async def test_many_are_claimed_by_few_statements_each_with_its_own_state(
    mine: InboxMessages, context: Context
) -> None:
    done = incoming(context, "done")
    await mine.settle(await claimed(mine, done), DONE)
    statement = await mine._claim([incoming(context, "b"), done, incoming(context, "a"), incoming(context, "b")])

    assert [type(state) for state in statement] == [Claim, Done, Claim, Held]


async def test_the_backlog_counts_what_is_neither_processed_nor_dead(
    mine: InboxMessages, pool: asyncpg.Pool[asyncpg.Record], context: Context
) -> None:
    name, subjects = mine.consumer, [context.subject]
    assert await get_inbox_backlog(pool, name, subjects) == (0, None)
    for number, state in enumerate([DONE, POISON, BUSY]):
        await mine.settle(await claimed(mine, incoming(context, f"m-{number}")), state)
    await claimed(mine, incoming(context, "leased"))

    backlog = await get_inbox_backlog(pool, name, subjects)
    assert backlog.messages == 2
    assert backlog.oldest_at is not None
    for pattern in (f"{context.name}.>", f"{context.name}.event.*.v1"):
        assert await get_inbox_backlog(pool, name, ["other.event.>", pattern]) == backlog
    for pattern in (f"{context.name}.event.*", "other.event.>", context.subject.replace(".", "*")):
        assert await get_inbox_backlog(pool, name, [pattern]) == (0, None)
    assert await get_inbox_backlog(pool, "another", subjects) == (0, None)


UNREACHABLE = Later("handler_unreachable: no connection to http://127.0.0.1:8000", 1)


@pytest.mark.parametrize("by", ["filters", "streams"])
async def test_what_is_known_of_a_consumer_is_not_said_of_one_of_the_same_name_in_another_mesh(
    pool: asyncpg.Pool[asyncpg.Record], context: Context, by: str
) -> None:
    name, other = f"same_{by}", Context(context.connection)
    await other.declare()
    for each in (context, other):
        await each.consumer(Script(), durable=name, filter_subjects=[each.subject] if by == "filters" else []).declare()
    inbox = InboxMessages(pool, name, lease_seconds=30)
    await inbox.settle(await claimed(inbox, incoming(context, "m-1")), UNREACHABLE, counts=False)
    await claimed(inbox, incoming(other, "m-1"))
    await claimed(inbox, incoming(other, "m-2"))

    found = await list_durables(context.js, [context.name, other.name], await find_begun(pool))
    await other.remove()
    assert {one.stream: (one.begun, one.paused) for one in found} == {
        context.events: (1, UNREACHABLE.error),
        other.events: (2, None),
    }


async def test_a_handler_is_not_unreachable_because_of_messages_that_nobody_tries_any_more(
    mine: InboxMessages, pool: asyncpg.Pool[asyncpg.Record], message: Incoming
) -> None:
    """Their consumer was deleted and begins later in the stream, or the stream has lost them for their age."""
    await mine.settle(await claimed(mine, message), UNREACHABLE, counts=False)
    assert (await found(pool, message)).error == UNREACHABLE.error
    long_ago = "UPDATE postroom.inbox_messages SET begun_at = now() - interval '11 minutes' WHERE source_context = $1"
    await pool.execute(long_ago, message.source_context)
    assert (await found(pool, message)) == Begun("mine", message.delivery.subject, 1, None)


async def found(pool: asyncpg.Pool[asyncpg.Record], message: Incoming) -> Begun:
    (one,) = [each for each in await find_begun(pool) if each.subject == message.delivery.subject]
    return one


INSERT = (
    "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject{}) VALUES ('c', $1, 'm', 's'{})"
)


@pytest.mark.parametrize(
    ("columns", "values", "rule"),
    [
        (", processed_at", ", now() - interval '1 second'", "processed_after_it_was_received"),
        (", dead_at", ", now()", "a_dead_message_has_a_reason"),
        (", owner", ", gen_random_uuid()", "a_lease_has_an_owner_and_an_end"),
        (", processed_at, dead_at, dead_reason", ", now(), now(), 'x'", "a_message_is_in_one_state"),
        (", processed_at, owner, leased_until", ", now(), gen_random_uuid(), now()", "a_message_is_in_one_state"),
        (", attempts", ", -1", "inbox_messages_attempts_check"),
    ],
)
async def test_a_row_in_no_state_is_refused(
    inbox: Inbox, context: Context, columns: str, values: str, rule: str
) -> None:
    with pytest.raises(asyncpg.CheckViolationError) as refused:
        await inbox.execute(INSERT.format(columns, values), context.name)
    assert refused.value.constraint_name == rule


async def test_a_second_row_of_one_message_is_refused(inbox: Inbox, context: Context) -> None:
    await inbox.execute(INSERT.format("", ""), context.name)
    with pytest.raises(asyncpg.UniqueViolationError):
        await inbox.execute(INSERT.format("", ""), context.name)


async def test_what_is_processed_cannot_be_changed(mine: InboxMessages, message: Incoming, inbox: Inbox) -> None:
    await mine.settle(await claimed(mine, message), DONE)
    with pytest.raises(asyncpg.IntegrityConstraintViolationError, match="m-1 is processed or dead"):
        await inbox.execute("UPDATE postroom.inbox_messages SET attempts = 9 WHERE message_id = 'm-1'")


@pytest.mark.parametrize("bad", ["a\0b", "x" * 256, "no spaces", "é", "\ud800"])
async def test_what_postgres_refuses_is_not_asked_for_ever_and_takes_no_other_along(
    mine: InboxMessages, context: Context, bad: str
) -> None:
    good = incoming(context, "good")
    refused = good._replace(message_id=bad)
    state, error = await asyncio.gather(mine.claim(good), mine.claim(refused), return_exceptions=True)
    assert isinstance(state, Claim)
    assert isinstance(error, REFUSED)
    assert mine.waiting_for_postgres is False


async def test_a_message_whose_values_postgres_refuses_is_buried(
    mine: InboxMessages, context: Context, handler: CountingHandler
) -> None:
    client = HandlerClient(HandlerSettings(url=handler.url))
    settled: list[Outcome] = []

    async def settle(_: Delivery, outcome: Outcome) -> None:
        settled.append(outcome)

    class Careless(InboxMessages):
        """Hands on a subject that nobody checked."""

        async def claim(self, incoming: Incoming) -> Any:
            return await super().claim(incoming._replace(source_context="Not\0One"))

    careless = Careless(mine._pool, "mine", lease_seconds=30)
    await HttpHandler(careless, client, attempts=Attempts(3, QUICK.schedule), calls_at_once=1).handle(
        [incoming(context, "m-1").delivery], settle
    )
    await client.close()
    (outcome,) = settled
    assert isinstance(outcome, Dead)
    assert (outcome.reason, handler.calls) == ("refused_by_postgres", [])


async def test_a_claim_waits_for_no_disk_and_the_end_of_an_attempt_does(database_url: str, context: Context) -> None:
    await migrate(database_url, ROOM)
    url = f"{database_url}{'&' if '?' in database_url else '?'}synchronous_commit=on"
    pool = await open_inbox_pool(url, name="test", connections=1)
    await pool.execute(
        "CREATE TABLE seen (operation text, waits text);"
        "CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        "  INSERT INTO seen VALUES (TG_OP, current_setting('synchronous_commit')); RETURN NULL; END $$;"
        "CREATE TRIGGER see AFTER INSERT OR UPDATE ON postroom.inbox_messages FOR EACH ROW EXECUTE FUNCTION see()"
    )
    inbox = InboxMessages(pool, "mine", lease_seconds=30)
    claims = [await claimed(inbox, incoming(context, f"m-{number}")) for number in range(2)]
    for claim in claims:
        assert await inbox.settle(claim, DONE)
    seen = await pool.fetch("SELECT * FROM seen")
    await pool.close()
    assert [tuple(row) for row in seen] == [("INSERT", "off")] * 2 + [("UPDATE", "on")] * 2


@pytest.mark.parametrize("query", ["begun", "backlog"])
async def test_what_waits_is_found_without_a_look_at_what_is_dead(
    pool: asyncpg.Pool[asyncpg.Record], query: str
) -> None:
    values = ([], timedelta(hours=1)) if query == "begun" else ("mine", ["."])
    async with pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(MANY_DEAD)
        await connection.execute("SET LOCAL enable_seqscan = off")
        (plan,) = json.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {QUERIES[query]}", *values))
        await transaction.rollback()

    def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(each for child in node.get("Plans", []) for each in nodes(child))]

    assert max(node.get("Rows Removed by Filter", 0) for node in nodes(plan["Plan"])) < 1000
