"""In the caller's own transaction: events out (`emit`), and each message in once (`inbox`).

For a service with its own Postgres, in which `postroom outbox install` has been run. An event is published if, and only
if, the caller's transaction commits; a handler's effect and the mark of it commit together:

    async with pool.acquire() as connection, connection.transaction():
        await connection.execute("UPDATE …")
        await emit(connection, "shop", "order_paid", {"order": 17}, aggregate_type="order", aggregate_id=17)

`connection` is one of asyncpg, psycopg 3 (`AsyncConnection`, `Connection`), SQLAlchemy (`AsyncSession`,
`AsyncConnection`, `Session`, `Connection`) or Django (`django.db.connection` within `transaction.atomic`). With an
asynchronous one, `emit` is awaited and `inbox` takes `async with`; with any other, `emit` returns the id and `inbox`
takes `with`. None of these libraries is imported unless the caller has imported it.

Errors of the database are raised as the driver raises them, except those that only concern the outbox: `InvalidMessage`
for an event that cannot be published (`unknown_mesh`, `invalid_outbox`, `future_event`, `invalid_event`), `Conflict`
(`id_taken`) for an `id` that the outbox has already, `NotPermitted` (`not_granted`) where the role may not use it,
`PostroomError` where none is installed (`outbox_absent`) or the connection is not in a transaction
(`no_transaction`). After what the database refused the transaction can only be rolled back, as after any error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Coroutine, Sequence
from datetime import datetime
from typing import Any, Final, Protocol, Required, TypedDict, Unpack, overload
from uuid import UUID, uuid4

from postroom._wire.arguments import event_json
from postroom._wire.drivers import Driver, Values, driver_of
from postroom._wire.sockets import run_to_end
from postroom._wire.sql import load_queries
from postroom._wire.words import CANNOT_STORE, NOT_STORABLE
from postroom.errors import Conflict, InvalidMessage, NotPermitted, PostroomError
from postroom.handler import HandlerRequest
from postroom.once import Claim, Done, KeyHeld, Result, Run, Scope

__all__ = ["AsyncConnection", "Handling", "emit", "emit_command", "inbox"]

_QUERIES: Final = load_queries("postroom", "transaction.sql")
_REFUSED: Final = re.compile(r"\b(UNKNOWN_MESH|INVALID_OUTBOX|FUTURE_EVENT): (.*)")
_ABSENT: Final = ("3F000", "42883", "42P01")  # SQLSTATE of a missing schema, function, table
_NOT_GRANTED: Final = "42501"
_ID_TAKEN: Final = "23505"  # of no other key: that of `inbox` has no conflict
_WRONG_VALUE: Final = "22"  # the class of values that Postgres cannot read
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")  # as JSON has it
_REPLAY: Final = re.compile(r"~[A-Za-z0-9_-]+\.[0-9]+$")


class AsyncConnection(Protocol):
    """A connection, or a session, whose statements are awaited."""

    def execute(self, *args: Any, **kwargs: Any) -> Awaitable[Any]:
        """Run a statement."""


class _Options(TypedDict, total=False):
    correlation_id: UUID | str | None
    causation_id: UUID | str | None
    traceparent: str | None
    id: UUID | None


class _OfEvent(_Options, total=False):
    aggregate_type: Required[str]
    aggregate_id: Required[object]
    event_version: int
    occurred_at: datetime | None


class _OfCommand(_Options, total=False):
    aggregate_type: str | None
    aggregate_id: object


@overload
def emit(
    connection: AsyncConnection, mesh: str, event_type: str, payload: Any, **options: Unpack[_OfEvent]
) -> Coroutine[Any, Any, UUID]: ...


@overload
def emit(connection: Any, mesh: str, event_type: str, payload: Any, **options: Unpack[_OfEvent]) -> UUID: ...


def emit(
    connection: Any,
    mesh: str,
    event_type: str,
    payload: Any,
    *,
    aggregate_type: str,
    aggregate_id: object,
    event_version: int = 1,
    correlation_id: UUID | str | None = None,
    causation_id: UUID | str | None = None,
    traceparent: str | None = None,
    occurred_at: datetime | None = None,
    id: UUID | None = None,  # noqa: A002 - its name everywhere
) -> Any:
    """Put an event into the outbox, in the transaction of `connection`; return its id, which is its message id.

    It goes to `<mesh>.event.<event_type>.v<event_version>`; `payload` is anything that JSON can express. Events of one
    aggregate, such as `order` 17, keep their order. `occurred_at` is now unless it is given, with its offset.
    """
    values = {
        "mesh": mesh,
        "event_type": event_type,
        "payload": _json(payload),
        "aggregate_type": aggregate_type,
        "aggregate_id": _text(aggregate_id),
        "event_version": str(event_version),
        "correlation_id": _text(correlation_id),
        "causation_id": _text(causation_id),
        "traceparent": traceparent,
        "occurred_at": None if occurred_at is None else _moment(occurred_at),
        "id": str(id or uuid4()),
    }
    return _put(connection, "emit", values)


@overload
def emit_command(
    connection: AsyncConnection, mesh: str, queue: str, payload: Any, **options: Unpack[_OfCommand]
) -> Coroutine[Any, Any, UUID]: ...


@overload
def emit_command(connection: Any, mesh: str, queue: str, payload: Any, **options: Unpack[_OfCommand]) -> UUID: ...


def emit_command(
    connection: Any,
    mesh: str,
    queue: str,
    payload: Any,
    *,
    aggregate_type: str | None = None,
    aggregate_id: object = None,
    correlation_id: UUID | str | None = None,
    causation_id: UUID | str | None = None,
    traceparent: str | None = None,
    id: UUID | None = None,  # noqa: A002 - as in `emit`
) -> Any:
    """Put a command for one worker of `queue` into the outbox, as a send to `queue:<queue>` does; return its id.

    `payload` is the body that the worker gets. Commands of one queue keep their order, unless they are given an
    aggregate of their own.
    """
    values = {
        "mesh": mesh,
        "queue": queue,
        "payload": _json(payload),
        "aggregate_type": aggregate_type,
        "aggregate_id": _text(aggregate_id),
        "correlation_id": _text(correlation_id),
        "causation_id": _text(causation_id),
        "traceparent": traceparent,
        "id": str(id or uuid4()),
    }
    return _put(connection, "emit_command", values)


def inbox(connection: Any, request: HandlerRequest, *, consumer: str | None = None) -> Handling:
    """Handle a message once, in the transaction of `connection`: the block runs with a claim, as in `postroom.once`.

        async with connection.transaction(), inbox(connection, request) as claim:
            if claim.first:
                await connection.execute("UPDATE …")
                claim.result = {"paid": 17}
        return claim.result

    What the block does and the mark that the message was handled commit together, or neither does. A repeated delivery
    has `claim.first` False and the same result; two at once wait for one another. A replay of a dead letter is the
    same message. `consumer` is the one that the request names, unless it is given: two consumers of one database both
    handle a message.

    The key is one of `postroom.once` (tenant: the mesh, topic: the event type, group: the consumer), where operators
    see it. Raises `InvalidMessage` for a request that names no consumer (`no_consumer`) or no message (`invalid_key`).
    Entering raises `KeyHeld` where another worker holds the key by a lease, and `PostroomError` (`already_in_hand`)
    where this transaction has the message in hand: in a block around this one, or in one that failed. Leaving raises
    `PostroomError` (`transaction_ended`) where the transaction has ended within the block.
    """
    given: Any = request
    if not isinstance(given, HandlerRequest):
        way = "msgspec.json.decode(body, type=HandlerRequest)"
        raise TypeError(f"inbox takes a HandlerRequest, not {type(given).__name__}: use {way}")
    name = consumer or request.consumer
    if name is None:
        detail = "the request does not say which consumer made it: pass inbox(…, consumer='billing')"
        raise InvalidMessage.of("no_consumer", detail)
    key = _REPLAY.sub("", request.message_id)
    if not key:
        detail = "the request has no message_id, by which a repeated delivery is known: answer 422"
        raise InvalidMessage.of("invalid_key", detail, field="message_id")
    return Handling(driver_of(connection), Scope(request.mesh, request.event_type, key, name))


class Handling:
    """One message in hand in the caller's transaction: what `inbox` returns, for `async with` or for `with`."""

    def __init__(self, driver: Driver, scope: Scope) -> None:
        self._driver = driver
        self._claim: Claim
        self._values = dict(zip(("tenant", "topic", "consumer", "key"), scope.columns, strict=True))
        self._scope = scope

    async def __aenter__(self) -> Claim:
        if not self._driver.asynchronous:
            raise TypeError("this connection is not asynchronous: write `with inbox(…)`")
        return await self._begin()

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            await self._end()

    def __enter__(self) -> Claim:
        if self._driver.asynchronous:
            raise TypeError("this connection is asynchronous: write `async with inbox(…)`")
        return run_to_end(self._begin())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            run_to_end(self._end())

    async def _begin(self) -> Claim:
        await _check_transaction(self._driver)
        state, attempts, last_error, encoding, result = await _ask(self._driver, "begin_handling", self._values)
        if state == "held":
            detail = f"{self._scope} is held by another worker: try again"
            raise KeyHeld.of("key_held", detail, retryable=True)
        if state == "nested":
            sentence = "is in hand in this transaction already: do not put a block of `inbox` in another of its message"
            rest = "and after one that failed roll back, at least to a savepoint, before the next"
            raise PostroomError.of("already_in_hand", f"{self._scope} {sentence}, {rest}")
        if state == "done":
            self._claim = Claim(Done(Result(encoding, bytes.fromhex(result))))
        else:
            self._claim = Claim(Run(self._scope.columns, "", attempts, last_error, None, math.inf))
        return self._claim

    async def _end(self) -> None:
        if not self._claim.first:
            return
        encoding, data = self._claim.kept
        values = {**self._values, "encoding": encoding, "result": data.hex()}
        (ended,) = await _ask(self._driver, "end_handling", values)
        if not ended:
            detail = "the transaction has ended within the block of `inbox`: commit after the block"
            raise PostroomError.of("transaction_ended", detail)


def _put(connection: Any, query: str, values: Values) -> Any:
    driver = driver_of(connection)
    for name, value in values.items():
        if isinstance(value, str) and NOT_STORABLE.search(value):
            raise InvalidMessage.of("invalid_event", f"{name} {CANNOT_STORE}", field=name)

    async def put() -> UUID:
        await _check_transaction(driver)
        (id_,) = await _ask(driver, query, values)
        return UUID(id_)

    return put() if driver.asynchronous else run_to_end(put())


async def _check_transaction(driver: Driver) -> None:
    if not await driver.in_transaction():
        sentence = "this needs a transaction that the caller commits, and the connection is not in one: begin one"
        raise PostroomError.of("no_transaction", sentence)


async def _ask(driver: Driver, query: str, values: Values) -> Sequence[Any]:
    """Query the outbox; raises what `driver` raises, except for errors that only concern the outbox."""
    try:
        return await driver.row(_QUERIES[query], values)
    except Exception as error:
        if (refusal := _refusal(error)) is not None:
            raise refusal from error
        raise


def _refusal(error: Exception) -> PostroomError | None:
    """Return our error for one of Postgres, from any driver; None where the driver's own should be raised."""
    state, said = _of_postgres(error)
    if (refused := _REFUSED.search(said)) is not None:
        return InvalidMessage.of(refused[1].lower(), refused[2])
    if state in _ABSENT:
        sentence = "this database has no outbox of events: run `postroom outbox install --database URL`"
        return PostroomError.of("outbox_absent", sentence)
    if state == _NOT_GRANTED:
        sentence = "the role of this connection may not use the outbox: run `postroom outbox install --role ROLE`"
        return NotPermitted.of("not_granted", sentence)
    if state == _ID_TAKEN:
        sentence = "the outbox has this id already, of what was emitted before: roll back, or emit under another id"
        return Conflict.of("id_taken", sentence)
    if state.startswith(_WRONG_VALUE):
        return InvalidMessage.of("invalid_event", f"Postgres cannot read a value of the event: {said}")
    return None


def _of_postgres(error: Exception) -> tuple[str, str]:
    """Return the SQLSTATE of what Postgres refused and the line that it said, from any driver; else two empty texts."""
    wrapped = getattr(error, "orig", None)  # SQLAlchemy's; Django's is the cause, and so is asyncpg's of SQLAlchemy's
    for one in (getattr(wrapped, "__cause__", None), wrapped, error.__cause__, error):
        fields = next(iter(getattr(one, "args", ())), None)
        if isinstance(fields, dict) and "C" in fields:  # pg8000's, by the letters of Postgres's protocol
            return fields["C"], fields.get("M", "")
        state = getattr(one, "sqlstate", None) or getattr(one, "pgcode", None)  # the latter is psycopg2's
        if state is not None:
            return state, str(one).partition("\n")[0]
    return "", ""


def _json(payload: Any) -> str:
    text = event_json(payload).decode()
    if _NUL.search(text):
        raise InvalidMessage.of("invalid_event", f"payload {CANNOT_STORE}", field="payload")
    return text


def _moment(moment: datetime) -> str:
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        detail = f"occurred_at must be a time with its offset, as datetime.now(UTC), not {moment!r}"
        raise InvalidMessage.of("invalid_event", detail, field="occurred_at")
    return moment.isoformat()


def _text(value: object) -> str | None:
    return None if value is None else str(value)
