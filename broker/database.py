"""Postgres: the three pools of a broker, and the one place where its errors become answers.

Accepting has a pool of its own, so that readers can't starve it, and without nested loops: the planner cannot know how
long the arrays of a batch are, and would join a thousand messages by them. Readers look rows up by key and need them.
Tokens have a pool of their own, so that guessing at them delays nobody else (docs/contract/accept.md#accept-45).
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Self

import asyncpg
import structlog

from broker.shares import Shares
from postroom._wire.sql import NO_TLS, load_queries, why_failed
from postroom.chassis import postgres
from postroom.chassis.postgres import CONNECT_SECONDS, POSTGRES_ERRORS, UNREACHABLE, Connection, Pool, close_pool
from postroom.errors import InvalidMessage, TryAgain

_log = structlog.get_logger(__name__)

QUERIES: Final = load_queries("broker")

_NAME: Final = "postroom-broker"  # as Postgres knows the connections
_READING_CONNECTIONS: Final = 8
_RING_SECONDS: Final = 0.005  # between two rings: publishers that have just been woken check again by themselves

# What Postgres answers while it cannot do what is asked, through no fault of the request: it starts, stops or is full,
# a statement ran out of time or met a lock, it is a standby, or our role or database is changed, or lacks a right.
_NOT_NOW: Final = (
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.PostgresSystemError,
    asyncpg.LockNotAvailableError,
    asyncpg.TransactionRollbackError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.InvalidAuthorizationSpecificationError,
    asyncpg.InvalidCatalogNameError,
    asyncpg.InsufficientPrivilegeError,
)
# the tables of deliveries come first: an accept and the steps of jobs write to their outbox
ROOMS: Final = ("postroom.delivery", "broker", "postroom.ledger")


class Database:
    """The pools: `accepting` for the accept transaction and its look-ups, `tokens`, `reading` for everything else."""

    def __init__(self, accepting: Pool, reading: Pool, tokens: Pool) -> None:
        self.accepting = accepting
        self.reading = reading
        self.tokens = tokens
        self.lack: str | None = None  # why Postgres did not store the last batch, by its own words
        self._shares = Shares(_READING_CONNECTIONS)
        self._unrung: set[str] = set()
        self._ringing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str, *, connections: int) -> Self:
        """Connect and check the schema's version.

        Raises `Fatal` as `postroom.chassis.postgres.fatal_errors` says, and 78 where its schema is not this program's.
        """
        async with AsyncExitStack() as undo:
            # and one to sweep on
            reading = await postgres.open_pool(url, name=_NAME, connections=_READING_CONNECTIONS + 1)
            undo.push_async_callback(close_pool, reading)
            with postgres.fatal_errors():
                async with reading.acquire() as connection:
                    await check_version(connection)
            accepting = await postgres.open_pool(
                url,
                name=_NAME,
                connections=connections,
                settings={"enable_nestloop": "off"},
                # A failover or a restore breaks every connection: the first that leads to another database than before
                # begins a new incarnation, and nothing is accepted over it earlier.
                on_connect=lambda connection: connection.fetchval(QUERIES["current_incarnation"]),
            )
            undo.push_async_callback(close_pool, accepting)
            tokens = await postgres.open_pool(url, name=_NAME, connections=1, kept=0)
            undo.pop_all()
        return cls(accepting, reading, tokens)

    async def close(self) -> None:
        """Close every pool, as `close_pool` does."""
        if self._ringing is not None:
            await self._ringing
        await asyncio.gather(*map(close_pool, (self.accepting, self.reading, self.tokens)))

    def ring(self, sources: Iterable[str]) -> None:
        """Wake the publishers of `sources`, whose rows were committed (docs/contract/delivery.md#delivery-86).

        It runs in the background: the first at once; what is committed soon after it shares the next.
        """
        self._unrung.update(sources)

        async def ring() -> None:
            try:
                while self._unrung:
                    rung, self._unrung = self._unrung, set()
                    await self.accepting.execute(QUERIES["ring"], rung)
                    await asyncio.sleep(_RING_SECONDS)
            except POSTGRES_ERRORS as error:
                _log.info("publishers_not_woken", error=why_failed(error))  # they check by themselves, only later
            finally:
                self._ringing = None

        if self._unrung and self._ringing is None:
            self._ringing = asyncio.create_task(ring(), name="bell")

    async def trouble(self) -> str | None:
        """Return why nothing can be accepted now, as a sentence; None where Postgres answers and takes writes."""
        try:
            async with unavailable_as_503(), self.accepting.acquire(timeout=CONNECT_SECONDS) as connection:
                read_only = await connection.fetchval(QUERIES["is_read_only"])
        except TryAgain as error:
            match error.__cause__:
                case asyncpg.CannotConnectNowError() as cause:  # it says why: it starts, or is a standby
                    why = f"cannot be used now ({cause})"
                case asyncpg.InvalidAuthorizationSpecificationError() | asyncpg.InvalidCatalogNameError():
                    why = "refuses the login"
                case asyncpg.TooManyConnectionsError():
                    why = "takes no more connections"
                case OSError() as cause if isinstance(cause, ssl.SSLError) or NO_TLS in str(cause):
                    why = f"cannot be used: {why_failed(cause)}"
                case _:
                    why = "does not answer"
            return f"Postgres {why}: the broker cannot accept messages"
        return "Postgres is read-only, as a standby is: the broker cannot accept messages" if read_only else None

    @asynccontextmanager
    async def read(self, whose: tuple[str, str]) -> AsyncIterator[Connection]:
        """Lend a connection for reading or administration, once it is the turn of `whose` (mesh, member).

        An unreachable Postgres is a 503 that may be retried; a name that Postgres cannot represent is a 400.
        """
        try:
            async with (
                self._shares.hold(whose),
                unavailable_as_503(),
                self.reading.acquire(timeout=CONNECT_SECONDS) as connection,
            ):
                yield connection
        except asyncpg.CharacterNotInRepertoireError as error:
            detail = "a name in the request contains a NUL character: remove it"
            raise InvalidMessage.of("nul_character", detail) from error


@asynccontextmanager
async def unavailable_as_503() -> AsyncIterator[None]:
    """Turn errors of Postgres into a retryable 503; no detail of the failure leaves the broker, but its log has it."""
    try:
        yield
    except UNREACHABLE as error:
        raise _unavailable("the broker cannot reach its database: try again") from error
    except _NOT_NOW as error:  # what it says below its first line may quote a row
        _log.warning("postgres_refused", error=why_failed(error), sqlstate=error.sqlstate)
        raise _unavailable("the broker's database cannot do this now: try again") from error


def _unavailable(sentence: str) -> TryAgain:
    return TryAgain.of("database_unavailable", sentence, retryable=True, retry_after=1.0)


async def check_version(connection: Connection) -> None:
    """Raise `Fatal` (78) unless the schema is this program's, and say what to do."""
    await postgres.check_version(connection, *ROOMS, migrate_with="postroom broker migrate")


async def migrate(url: str) -> list[str]:
    """Bring the database to this program's version and return the names of what was applied, in order.

    Raises `Fatal` as `postroom.chassis.postgres.migrate` does.
    """
    return await postgres.migrate(url, *ROOMS)
