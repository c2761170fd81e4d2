"""`emit` and `inbox` in the transaction of the caller, with every driver, on a role that may do nothing else."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager
from datetime import UTC, datetime, timedelta
from typing import Any, get_overloads, get_type_hints
from uuid import UUID, uuid4

import asyncpg
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from support.applications import application_database, as_role, fetch, owner_of, role_of
from support.drivers import WAYS, Way, execute
from support.waiting import until_so

from embedded import EmbeddedPostgres
from postroom.errors import Conflict, InvalidMessage, NotPermitted, PostroomError
from postroom.handler import HandlerRequest
from postroom.once import Claim, KeyHeld, open_registry
from postroom.transaction import emit, emit_command, inbox

ORDERS = "SELECT count(*) FROM orders"
EVENTS = "SELECT count(*) FROM postroom.outbox_events"


@pytest.fixture
async def shop(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    async with application_database(postgres_server, "demo") as url:
        yield url


@pytest.fixture(params=WAYS, ids=repr)
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    return found


async def done(answer: Any) -> Any:
    return await answer if inspect.isawaitable(answer) else answer


async def place(connection: Any, order: int, *, mesh: str = "demo", **event: Any) -> UUID:
    """Place an order, as an application does."""
    await execute(connection, "INSERT INTO orders VALUES (17)")
    found = emit(
        connection, mesh, "order_placed", {"order": order, "café": "ü"}, aggregate_type="order",
        **{"aggregate_id": order, **event},
    )  # fmt: skip
    id_: UUID = await done(found)
    return id_


async def counts(url: str) -> tuple[int, int]:
    return await fetch(owner_of(url), ORDERS), await fetch(owner_of(url), EVENTS)


async def test_an_event_commits_with_what_it_is_of(shop: str, way: Way) -> None:
    cause, at = uuid4(), datetime(2026, 1, 31, 12, tzinfo=UTC)
    async with way.transaction(shop) as connection:
        id_ = await place(
            connection, 17, event_version=2, causation_id=cause, correlation_id=str(cause), occurred_at=at
        )
        assert await counts(shop) == (0, 0)
    row = json.loads(await fetch(owner_of(shop), "SELECT to_json(event) FROM postroom.outbox_events AS event"))
    assert (row["id"], row["subject"], row["payload"]) == (
        str(id_), "demo.event.order_placed.v2", {"order": 17, "café": "ü"},
    )  # fmt: skip
    assert (row["aggregate_type"], row["aggregate_id"]) == ("order", "17")
    assert (row["causation_id"], row["correlation_id"]) == (str(cause), str(cause))
    assert datetime.fromisoformat(row["occurred_at"]) == at
    assert await counts(shop) == (1, 1)


async def test_what_is_rolled_back_emits_nothing(shop: str, way: Way) -> None:
    async def place_and_fail() -> None:
        async with way.transaction(shop) as connection:
            await place(connection, 17)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await place_and_fail()
    assert await counts(shop) == (0, 0)


async def test_a_command_goes_to_one_worker(shop: str, way: Way) -> None:
    async with way.transaction(shop) as connection:
        id_ = await done(emit_command(connection, "demo", "mail.send", {"to": "alice"}))
    subject = "SELECT subject FROM postroom.outbox_events WHERE id = $1::uuid"
    assert await fetch(owner_of(shop), subject, str(id_)) == "cmd.demo.default.mail.send"


WRONG: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("unknown_mesh", {"mesh": "shop"}, "there is no mesh shop, so shop.event.order_placed.v1 would never be published"),
    ("invalid_outbox", {"event_version": 0}, "the version 0 is not a number from 1 to 999999999"),
    ("future_event", {"occurred_at": datetime.now(UTC) + timedelta(hours=1)}, "more than a minute ahead"),
    ("invalid_event", {"causation_id": "not one"}, "Postgres cannot read a value of the event"),
    (
        "invalid_outbox",
        {"aggregate_id": None},
        "the event has no aggregate: give its type and its id, which a new object of an ORM",
    ),
)


@pytest.mark.parametrize(
    ("code", "event", "sentence"), WRONG, ids=[f"{code} {next(iter(event))}" for code, event, _ in WRONG]
)
async def test_an_event_that_cannot_be_published_is_refused_and_takes_its_transaction_along(
    shop: str, way: Way, code: str, event: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidMessage, match=sentence) as refused:
        async with way.transaction(shop) as connection:
            await place(connection, 17, **event)
    assert refused.value.code == code
    assert len(str(refused.value).splitlines()) == 1
    assert not any(inner in str(refused.value) for inner in ("SELECT", "exception", "PL/pgSQL", "{"))
    assert await counts(shop) == (0, 0)


@pytest.mark.parametrize("put", [emit, emit_command])
async def test_an_id_that_was_emitted_before_is_refused(shop: str, way: Way, put: Any) -> None:
    async with way.transaction(shop) as connection:
        id_ = await place(connection, 17)
    with pytest.raises(Conflict, match="the outbox has this id already") as refused:
        async with way.transaction(shop) as connection:
            await done(put(connection, "demo", "refund", {}, aggregate_type="order", aggregate_id=17, id=id_))
    assert refused.value.code == "id_taken"
    assert await counts(shop) == (1, 1)


async def test_an_event_outside_of_a_transaction_is_refused(shop: str, way: Way) -> None:
    async with way.bare(shop) as connection:
        with pytest.raises(PostroomError, match="the connection is not in one") as refused:
            await place(connection, 17)
    assert (refused.value.code, (await counts(shop))[1]) == ("no_transaction", 0)


async def test_over_a_connection_that_was_closed_the_error_is_the_driver_s_own(shop: str) -> None:
    connection = await asyncpg.connect(shop)
    await connection.close()
    with pytest.raises(asyncpg.InterfaceError, match="connection is closed"):
        await emit(connection, "demo", "order_placed", {}, aggregate_type="order", aggregate_id=17)
    with pytest.raises(asyncpg.InterfaceError, match="connection is closed"):
        async with inbox(connection, request()):
            pass


async def test_a_database_without_an_outbox_says_what_to_do(database_url: str, way: Way) -> None:
    await fetch(database_url, "CREATE TABLE orders (id integer)")
    with pytest.raises(PostroomError, match="run `postroom outbox install --database URL`") as refused:
        async with way.transaction(database_url) as connection:
            await place(connection, 17)
    assert refused.value.code == "outbox_absent"


async def test_a_role_that_may_not_emit_is_told_so(shop: str, postgres_server: EmbeddedPostgres, way: Way) -> None:
    async with application_database(postgres_server) as other:
        stranger = as_role(owner_of(shop), role_of(other))
        with pytest.raises(NotPermitted, match="postroom outbox install --role ROLE") as refused:
            async with way.transaction(stranger) as connection:
                await done(emit(connection, "demo", "a", {}, aggregate_type="a", aggregate_id=1))
    assert refused.value.code == "not_granted"


async def test_a_driver_that_is_unreachable_says_it_in_its_own_words(shop: str) -> None:
    connection = await psycopg.AsyncConnection.connect(shop)
    await connection.execute("INSERT INTO orders VALUES (16)")
    await fetch(owner_of(shop), "SELECT pg_terminate_backend($1::integer)", connection.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        await place(connection, 17)
    await connection.close()
    assert await counts(shop) == (0, 0)


class DecoratedSession(AsyncSession):
    """A session whose `execute` is a plain function that returns what is awaited, as SQLModel's is."""

    @functools.wraps(AsyncSession.execute)
    def execute(self, *given: Any, **named: Any) -> Any:
        return super().execute(*given, **named)


async def test_a_session_whose_methods_are_decorated_is_awaited_all_the_same(shop: str) -> None:
    engine = create_async_engine("postgresql+asyncpg://", async_creator=lambda: asyncpg.connect(shop))
    async with DecoratedSession(engine) as session, session.begin():
        await done(emit(session, "demo", "order_placed", {}, aggregate_type="order", aggregate_id=17))
        async with inbox(session, request()) as claim:
            assert claim.first
    await engine.dispose()
    assert await counts(shop) == (0, 1)


async def test_codecs_and_row_factories_of_the_caller_change_nothing(shop: str) -> None:
    connection = await asyncpg.connect(shop)
    await connection.set_type_codec("jsonb", encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    async with connection.transaction():
        await place(connection, 1)
        await connection.execute("DELETE FROM orders")
    await connection.close()
    for own in ({"row_factory": psycopg.rows.dict_row}, {"cursor_factory": psycopg.AsyncRawCursor}):
        async with await psycopg.AsyncConnection.connect(shop, **own) as other:
            await place(other, 2)
            await other.execute("DELETE FROM orders")
    kinds = "SELECT array_agg(jsonb_typeof(payload)) FROM postroom.outbox_events"
    assert await fetch(owner_of(shop), kinds) == ["object"] * 3


async def test_what_is_no_connection_is_refused_with_what_is(shop: str) -> None:
    async with asyncpg.create_pool(shop, min_size=1, max_size=1) as pool:
        with pytest.raises(
            TypeError, match=r"asyncpg\.pool\.Pool is not a connection of .*; of a pool, take one first"
        ):
            emit(pool, "demo", "a", {}, aggregate_type="a", aggregate_id=1)


@pytest.mark.parametrize("wrong", [{"aggregate_id": "17\0"}, {"mesh": "\ud800"}], ids=["NUL", "surrogate"])
async def test_a_character_that_no_database_can_store_is_refused_whatever_the_driver(
    shop: str, wrong: dict[str, Any]
) -> None:
    sentence = f"{next(iter(wrong))} contains a NUL or a lone surrogate, which no database can store"
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        with pytest.raises(InvalidMessage, match=sentence) as refused:
            await place(connection, 17, **wrong)
    assert (refused.value.code, await counts(shop)) == ("invalid_event", (1, 0))


async def test_a_nul_in_a_payload_is_refused_but_not_the_text_of_its_escape(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        for payload in ("a\0b", {"\\\0": 1}):
            with pytest.raises(InvalidMessage, match="payload contains a NUL") as refused:
                await emit(connection, "demo", "a", payload, aggregate_type="a", aggregate_id=1)
            assert refused.value.code == "invalid_event"
        await emit(connection, "demo", "a", "\\u0000", aggregate_type="a", aggregate_id=1)
    assert await fetch(owner_of(shop), "SELECT payload #>> '{}' FROM postroom.outbox_events") == "\\u0000"


def test_a_database_that_is_not_a_postgres_is_refused_as_such() -> None:
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.connect() as connection, pytest.raises(TypeError, match="is sqlite: the outbox is in Postgres"):
        emit(connection, "demo", "a", {}, aggregate_type="a", aggregate_id=1)
    engine.dispose()


@pytest.mark.parametrize("put", [emit, emit_command])
def test_a_type_checker_finds_an_event_that_is_not_awaited(put: Any) -> None:
    asynchronous, blocking = get_overloads(put)
    assert get_type_hints(asynchronous)["return"] == Coroutine[Any, Any, UUID]  # it passes over any other Awaitable
    assert get_type_hints(blocking)["return"] is UUID


def test_no_driver_is_imported_that_the_program_does_not_have() -> None:
    script = "import sys, postroom.transaction; print({*sys.modules} & {'asyncpg', 'psycopg', 'sqlalchemy', 'django'})"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "set()\n"


def request(message_id: str = "m-1", **members: Any) -> HandlerRequest:
    given: dict[str, Any] = {"consumer": "billing", "subject": "demo.event.order_paid.v1", **members}
    return HandlerRequest(
        message_id=message_id,
        event_type="order_paid",
        event_version=1,
        occurred_at=datetime.now(UTC),
        payload={},
        **given,
    )


class _Sync:
    """`with` as `async with`, for tests that go through both kinds of driver."""

    def __init__(self, handling: Any) -> None:
        self._handling = handling

    async def __aenter__(self) -> Claim:
        claim: Claim = self._handling.__enter__()
        return claim

    async def __aexit__(self, *error: object) -> None:
        self._handling.__exit__(*error)


def handling(way: Way, connection: Any, *given: Any, **named: Any) -> AbstractAsyncContextManager[Claim]:
    found = inbox(connection, *given, **named)
    return found if way.asynchronous else _Sync(found)


async def handle(way: Way, url: str, message: HandlerRequest, **named: Any) -> Any:
    """Handle a message as an application does, and answer."""
    async with way.transaction(url) as connection:
        async with handling(way, connection, message, **named) as claim:
            if claim.first:
                await execute(connection, "INSERT INTO orders SELECT count(*) FROM orders")
                claim.result = {"order": await fetch(owner_of(url), ORDERS), "bytes": "ü"}
        return claim.result


async def test_a_message_that_is_delivered_again_does_nothing_and_is_answered_the_same(shop: str, way: Way) -> None:
    answers = [await handle(way, shop, request()) for _ in range(3)]
    assert answers == [{"order": 0, "bytes": "ü"}] * 3
    assert await handle(way, shop, request("m-2")) == {"order": 1, "bytes": "ü"}
    assert (await counts(shop))[0] == 2


async def fail(way: Way, url: str, *, within: bool) -> None:
    """Handle a message, and fail within the block or behind it."""
    async with way.transaction(url) as connection:
        async with handling(way, connection, request()) as claim:
            assert claim.first
            await execute(connection, "INSERT INTO orders VALUES (1)")
            if within:
                raise ZeroDivisionError
        raise ZeroDivisionError


async def test_an_effect_that_is_rolled_back_is_not_marked(shop: str, way: Way) -> None:
    for within in (True, False, True):
        with pytest.raises(ZeroDivisionError):
            await fail(way, shop, within=within)
    assert (await counts(shop))[0] == 0
    assert await handle(way, shop, request()) == {"order": 0, "bytes": "ü"}


async def test_two_consumers_handle_a_message_each(shop: str, way: Way) -> None:
    for _ in range(2):
        await handle(way, shop, request())
        await handle(way, shop, request(), consumer="shipping")
        await handle(way, shop, request(consumer="mail"))
    assert (await counts(shop))[0] == 3


async def test_a_replay_of_a_dead_letter_is_the_same_message(shop: str, way: Way) -> None:
    await handle(way, shop, request())
    await handle(way, shop, request("m-1~billing.1"))
    assert (await counts(shop))[0] == 1


async def test_two_deliveries_at_once_wait_for_one_another(shop: str) -> None:
    (way,) = (each for each in WAYS if each.name == "asyncpg")
    entered, go = asyncio.Event(), asyncio.Event()

    async def first() -> None:
        async with way.transaction(shop) as connection, inbox(connection, request()) as claim:
            assert claim.first
            await connection.execute("INSERT INTO orders VALUES (1)")
            claim.result = "mine"
            entered.set()
            await go.wait()

    async def second() -> Any:
        async with way.transaction(shop) as connection, inbox(connection, request()) as claim:
            return claim.first, claim.result

    holding = asyncio.create_task(first())
    await entered.wait()
    waiting = asyncio.create_task(second())
    locks = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    await until_so(lambda: fetch(owner_of(shop), locks))
    go.set()
    await holding
    assert await waiting == (False, "mine")


async def test_whoever_waited_for_one_that_was_rolled_back_does_it(shop: str) -> None:
    (way,) = (each for each in WAYS if each.name == "asyncpg")
    entered, go = asyncio.Event(), asyncio.Event()

    async def fail_later() -> None:
        async with way.transaction(shop) as connection, inbox(connection, request()):
            entered.set()
            await go.wait()
            raise ZeroDivisionError

    failing = asyncio.create_task(fail_later())
    await entered.wait()
    waiting = asyncio.create_task(handle(way, shop, request()))
    go.set()
    with pytest.raises(ZeroDivisionError):
        await failing
    assert await waiting == {"order": 0, "bytes": "ü"}


async def test_a_commit_within_the_block_is_refused(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        with pytest.raises(PostroomError, match="commit after the block") as refused:
            async with inbox(connection, request()):
                await connection.commit()
    assert refused.value.code == "transaction_ended"
    (way,) = (each for each in WAYS if each.name == "asyncpg")
    assert (await handle(way, shop, request()))["order"] == 0


async def test_a_block_within_a_block_of_the_same_message_is_refused_before_it_does_anything(
    shop: str, way: Way
) -> None:
    async def nest() -> None:
        async with (
            way.transaction(shop) as connection,
            handling(way, connection, request()),
            handling(way, connection, request()),
        ):
            raise AssertionError

    with pytest.raises(PostroomError, match="do not put a block of `inbox` in another of its message") as refused:
        await nest()
    assert refused.value.code == "already_in_hand"
    assert await handle(way, shop, request()) == {"order": 0, "bytes": "ü"}


async def test_a_block_that_failed_runs_again_in_its_transaction_once_it_is_rolled_back(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        with pytest.raises(ZeroDivisionError):
            async with connection.transaction(), inbox(connection, request()):
                raise ZeroDivisionError
        async with inbox(connection, request()) as claim:
            assert claim.first
        with pytest.raises(ZeroDivisionError):
            async with inbox(connection, request("m-2")):
                raise ZeroDivisionError
        with pytest.raises(PostroomError, match="roll back, at least to a savepoint"):
            async with inbox(connection, request("m-2")):
                raise AssertionError


async def test_a_key_that_was_taken_under_a_clock_ahead_is_free_once_that_is_right(shop: str) -> None:
    (way,) = (each for each in WAYS if each.name == "asyncpg")
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        with pytest.raises(PostroomError):
            async with inbox(connection, request()):
                await connection.commit()
    owner = await asyncpg.connect(owner_of(shop))
    await owner.execute(
        "UPDATE postroom_once.idempotency_keys SET begun_at = begun_at + interval '10 years', "
        "lease_until = lease_until + interval '10 years'"
    )
    await owner.close()
    assert (await handle(way, shop, request()))["order"] == 0


async def test_a_key_that_a_registry_holds_is_left_to_it_and_its_result_is_the_same(shop: str) -> None:
    (way,) = (each for each in WAYS if each.name == "asyncpg")
    async with open_registry(owner_of(shop), group="billing") as registry:
        async with registry.once("demo", "order_paid", "m-1") as claim:
            with pytest.raises(KeyHeld, match="is held by another worker: try again"):
                await handle(way, shop, request())
            claim.result = b"theirs"
        assert await handle(way, shop, request()) == b"theirs"
        await handle(way, shop, request("m-2"))
        async with registry.once("demo", "order_paid", "m-2") as claim:
            assert (claim.first, claim.result["order"]) == (False, 0)


async def test_a_wrong_kind_of_block_says_which_is_right(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        with pytest.raises(TypeError, match="write `async with inbox"), inbox(connection, request()):
            pass
    with psycopg.connect(shop) as blocking, pytest.raises(TypeError, match="write `with inbox"):
        async with inbox(blocking, request()):
            pass


async def test_a_request_of_no_consumer_needs_a_name(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        with pytest.raises(InvalidMessage, match="consumer='billing'") as refused:
            inbox(connection, request(consumer=None))
    assert refused.value.code == "no_consumer"


async def test_a_request_of_no_message_is_refused(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        for message_id in ("", "~billing.1"):
            with pytest.raises(InvalidMessage, match="the request has no message_id") as refused:
                inbox(connection, request(message_id))
            assert refused.value.code == "invalid_key"


async def test_what_is_no_request_is_refused_with_what_makes_one(shop: str) -> None:
    async with await psycopg.AsyncConnection.connect(shop) as connection:
        body: Any = {"message_id": "m-1"}
        with pytest.raises(TypeError, match=r"not dict: use msgspec\.json\.decode\(body, type=HandlerRequest\)"):
            inbox(connection, body)


async def test_a_message_outside_of_a_transaction_is_refused(shop: str, way: Way) -> None:
    async with way.bare(shop) as connection:
        with pytest.raises(PostroomError, match="the connection is not in one") as refused:
            async with handling(way, connection, request()):
                pass
    assert refused.value.code == "no_transaction"
