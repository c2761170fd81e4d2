"""What operators see and change: each noun's routes, from its table (`postroom._wire.nouns`), and the operator log.

NATS is asked over a connection per request, since accepting needs none. Without NATS a request is answered with what
Postgres knows, and the answer says what is missing.

The log has one writer (docs/contract/operate.md#operate-37). A line is written in the transaction of its change: what
cannot be logged is not done.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aiohttp import web
from nats.js import JetStreamContext

from broker.authentication import PRINCIPAL, any_mesh
from broker.database import QUERIES, Database, unavailable_as_503
from broker.limiter import Breaker
from postroom._wire.administration import MeshQuery
from postroom._wire.nouns import AnyNoun, Change, Failure, LogLine, LogPage, LogQuery
from postroom.chassis.clock import now
from postroom.chassis.exits import Fatal
from postroom.chassis.postgres import Connection
from postroom.chassis.routes import Route, decode_query, json_response
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.errors import InvalidMessage, NotFound, PostroomError, Problem, TryAgain, Unavailable

READ: Final = (400, 401, 403, 404, 503)  # problems of a request that reads
WRITE: Final = (400, 401, 403, 404, 408, 409, 413, 415, 503)  # and of one that changes something
OF_MESH: Final = ("mesh", "member", "topic", "queue", "webhook", "job", "dead letter")  # their keys begin with the mesh
NATS_UNREACHABLE: Final = "nats_unreachable"
PATIENCE: Final = 5.0  # seconds that a change waits for NATS
BRIEFLY: Final = 1.0  # seconds that an overview does, and whatever is asked soon after it did not answer
_TO_AN_OVERVIEW: Final = 2.0  # seconds that JetStream may take to answer: with a connection, less than `status` waits
_TO_A_CHANGE: Final = 5.0
_SILENT: Final = 10.0  # seconds that is soon: the pages of a long list come one after the other

S = TypeVar("S")
T = TypeVar("T")


class Nats:
    """Lends connections to NATS."""

    def __init__(self, settings: NatsSettings | None) -> None:
        self._settings = settings
        self._breaker = Breaker(failures=1, rest_seconds=_SILENT)

    @asynccontextmanager
    async def opened(self, patience: float) -> AsyncIterator[tuple[JetStreamContext | None, Problem | None]]:
        """Lend a connection, or else the problem why none could be opened within `patience` seconds, or briefly."""
        if self._settings is None:
            sentence = "the broker has no NATS configured, so what is in streams alone is missing: set its nats.url"
            yield None, Unavailable.of("nats_not_configured", sentence).problem
            return
        brief = patience <= BRIEFLY
        patient = not brief and self._breaker.may_try()
        patience = patience if patient else min(patience, BRIEFLY)
        try:
            nats = await connect(self._settings, name="postroom-broker", patience=patience, logged=False)
        except (PostroomError, Fatal) as error:  # `Fatal`: a file that the settings name cannot be read
            if patient:
                self._breaker.failed()
            retryable = isinstance(error, PostroomError) and error.retryable
            yield None, Unavailable.of(NATS_UNREACHABLE, str(error), retryable=retryable).problem
            return
        self._breaker.succeeded()
        try:
            yield nats.jetstream(timeout=_TO_AN_OVERVIEW if brief else _TO_A_CHANGE), None
        finally:
            await nats.close()


@dataclass(frozen=True, eq=False)
class Handlers:
    """The handlers of routes whose things are in Postgres; others say what else they ask."""

    _database: Database

    def reading(self, request: web.Request) -> AbstractAsyncContextManager[Connection]:
        """Lend a connection in the caller's share, as `Database.read` does."""
        return self._database.read(request[PRINCIPAL].whose)

    @asynccontextmanager
    async def changing(
        self, request: web.Request, verb: str, noun: str, *key: str | None, outcome: str = "done"
    ) -> AsyncIterator[Connection]:
        """Lend one in a transaction that changes something, and is logged."""
        async with self.reading(request) as connection, connection.transaction():
            yield connection
            await keep_log(connection, request[PRINCIPAL].actor, verb, noun, *key, outcome=outcome)


def routes_of(noun: AnyNoun, handlers: Any) -> list[Route]:
    """Return the routes by which operators see and change a noun.

    The handlers have a method for each route of its table: `list`, `log`, `counts` and `inspect` answer one, and
    `change` makes the handler of a verb.
    """
    path, things = noun.path, noun.things
    asked = (
        ("list", path, noun.reads, f"List {things}", noun.query, noun.page),
        ("log", f"{path}/log", noun.reads, f"What operators did to {things}", MeshQuery, noun.log),
        ("counts", f"{path}/counts", "broker_look", f"Count {things}, of all meshes", None, noun.counts),
        ("inspect", f"{path}/{noun.place}", noun.reads, f"Show a whole {noun.name}", noun.at, noun.whole),
    )
    found = [
        Route("GET", place, getattr(handlers, name), access, summary, query=query, answers={200: answer}, problems=READ)
        for name, place, access, summary, query, answer in asked
        if answer is not None
    ]  # fmt: skip
    return found + [
        Route("POST", f"{path}/{name}", handlers.change(name), noun.changes, verb.effect,
              body=noun.change, answers={200: noun.result}, problems=(*WRITE, 502))
        for name, verb in noun.verbs.items()
    ]  # fmt: skip


async def each(
    things: Iterable[S], effect: Callable[[S], Awaitable[T]], name: Callable[[S], str]
) -> tuple[list[T], list[Failure]]:
    """Apply an effect to each thing in turn; return the results, and the failures with their reasons.

    What may be tried again, such as a Postgres that fails, is the reason for the rest: a caller would repeat a 503, and
    be refused what was done by then.
    """
    done: list[T] = []
    failed: list[Failure] = []
    rest = iter(things)
    for thing in rest:
        try:
            async with unavailable_as_503():
                done.append(await effect(thing))
        except TryAgain as error:
            failed += [Failure(id=name(one), problem=error.problem) for one in (thing, *rest)]
        except PostroomError as error:
            failed.append(Failure(id=name(thing), problem=error.problem))
    return done, failed


async def check_mesh(connection: Connection, mesh: str | None) -> None:
    """Raise `NotFound` where there is no such mesh: an empty list of its things would read as good news."""
    if mesh is not None and await connection.fetchval(QUERIES["find_mesh"], mesh) is None:
        raise missing("mesh", mesh)


def refuse_mesh(asked: Change[Any]) -> None:
    """Raise `InvalidMessage` where a mesh is named that would narrow nothing: things of every mesh would be changed."""
    if asked.mesh is not None:
        sentence = "this is about every mesh, whichever is named: omit `mesh`, and narrow the filter"
        raise InvalidMessage.of("invalid_request", sentence, field="mesh")


def missing(noun: str, name: str) -> NotFound:
    """Return the error for a missing thing of the broker, such as a topic."""
    revoked = ", or it was revoked, which is permanent" if noun in {"member", "operator"} else ""
    detail = f"there is no {noun} {name[:64]!r}{revoked}: `postroom {noun} list` shows them"
    return NotFound.of(f"{noun}_not_found", detail)


async def keep_log(
    connection: Connection,
    actor: str,
    verb: str,
    noun: str,
    *key: str | None,
    outcome: str = "done",
    reason: str | None = None,
) -> None:
    """Record, in the transaction of a change, who did what to which thing, why, and with which outcome.

    A key consists of names and ids: never of an address, which may hold a secret.
    """
    keys = [" ".join(filter(None, key))]
    await connection.execute(QUERIES["log_operations"], actor, verb, noun, keys, outcome, reason)


async def keep_verb(
    connection: Connection, actor: str, noun: AnyNoun, verb: str, keys: Sequence[str], *, reason: str
) -> None:
    """Record a verb of a noun's table in the same way, done to the things with these keys, a line each."""
    words = actor, verb, noun.name, keys, noun.verbs[verb].done, reason
    await connection.execute(QUERIES["log_operations"], *words)


class OperatorLog(Handlers):
    """The handler of the log's route."""

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/operator_log`: an operator of one mesh sees the lines of that alone."""
        query = decode_query(request, LogQuery)
        mesh = any_mesh(request[PRINCIPAL], query.mesh)
        async with self.reading(request) as connection:
            since = query.earliest(await now(connection))
            wanted = query.noun, query.verb, query.actor, query.key, since, query.cursor, query.limit + 1
            rows = await connection.fetch(QUERIES["list_operations"], *wanted, mesh, OF_MESH)
            if not rows:
                await check_mesh(connection, mesh)
        lines = [LogLine(**dict(list(row.items())[1:])) for row in rows[: query.limit]]
        return json_response(LogPage(lines=lines, next_cursor=rows[-2]["id"] if len(rows) > query.limit else None))
