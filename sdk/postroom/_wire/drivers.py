"""Statements on a program's own connection to its Postgres: one interface to the common drivers.

A driver is recognised by the attributes of its connections, so that no driver has to be imported. A step is a
coroutine; with a connection that is not asynchronous it never waits for a loop (`sockets.run_to_end`).
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

Values = Mapping[str, str | None]

_PARAMETER: Final = re.compile(r"(?<![:\w]):([a-z_]+)\b")


class Asyncpg:
    """A connection of asyncpg, perhaps lent by a pool."""

    asynchronous = True

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    async def in_transaction(self) -> bool:
        """Return whether a transaction block is open; a closed connection says itself what is wrong."""
        return bool(self._connection.is_closed() or self._connection.is_in_transaction())

    async def row(self, query: str, values: Values) -> Sequence[Any]:
        """Write the parameters as numbers."""
        numbered, given = _in_numbers(query, values)
        return tuple(await self._connection.fetchrow(numbered, *given))


class Psycopg:
    """A `Connection` or an `AsyncConnection` of psycopg 3."""

    def __init__(self, connection: Any) -> None:
        self.asynchronous = inspect.iscoroutinefunction(connection.execute)
        self._connection = connection

    async def in_transaction(self) -> bool:
        """Return whether a transaction is open, or its next statement opens one."""
        return not self._connection.autocommit or self._connection.info.transaction_status.name != "IDLE"

    async def row(self, query: str, values: Values) -> Sequence[Any]:
        """Take a cursor whose rows are tuples, whatever those of the connection are."""
        cursor = self._connection.cursor(row_factory=lambda _: tuple)
        # the connection's own kind of cursor may be the one that takes numbers
        raw = any(kind.__name__.endswith("RawCursor") for kind in type(cursor).__mro__)
        await _done(cursor.execute(*(_in_numbers(query, values) if raw else (_in_percent(query), values))))
        row: Sequence[Any] = await _done(cursor.fetchone())
        await _done(cursor.close())
        return row


class SqlAlchemy:
    """A session or a connection of SQLAlchemy, asynchronous or not, over any of its drivers."""

    def __init__(self, connection: Any) -> None:
        self.asynchronous = hasattr(connection, "stream")  # of each of the asynchronous ones, and of no other
        self._connection = connection

    async def in_transaction(self) -> bool:
        """Return whether it has transactions: each begins by itself, except in autocommit."""
        lent = await self._lent()
        return not getattr(getattr(lent, "sync_connection", lent).connection.dbapi_connection, "autocommit", False)

    async def row(self, query: str, values: Values) -> Sequence[Any]:
        """Execute it as a text, in SQLAlchemy's own way of writing parameters."""
        from sqlalchemy import text  # noqa: PLC0415 - the program has it

        lent = await self._lent()
        row: Sequence[Any] = (await _done(lent.execute(text(query), values))).one()
        return row

    async def _lent(self) -> Any:
        """Return the connection of a session, which is in its transaction."""
        is_session = hasattr(self._connection, "get_bind")
        lent = await _done(self._connection.connection()) if is_session else self._connection
        _check_postgres("SQLAlchemy", lent.dialect.name)
        return lent


class Django:
    """Django's connection to one of its databases."""

    asynchronous = False

    def __init__(self, connection: Any) -> None:
        _check_postgres("Django", connection.vendor)
        self._connection = connection

    async def in_transaction(self) -> bool:
        """Return whether it is within `transaction.atomic`, or commits by hand."""
        return bool(self._connection.in_atomic_block or not self._connection.get_autocommit())

    async def row(self, query: str, values: Values) -> Sequence[Any]:
        """Take a cursor."""
        with self._connection.cursor() as cursor:
            cursor.execute(_in_percent(query), values)
            row: Sequence[Any] = cursor.fetchone()
        return row


# One is or is not `asynchronous`; `in_transaction` says whether what it writes waits for the program's commit; `row`
# returns the one row of a query with parameters written as `:name`, and raises what the library raises.
Driver: TypeAlias = Asyncpg | Psycopg | SqlAlchemy | Django

# What the connections of each offer, and no other's.
_DRIVERS: Final[Mapping[str, type[Driver]]] = {
    "is_in_transaction": Asyncpg,
    "in_atomic_block": Django,
    "in_nested_transaction": SqlAlchemy,
    "get_bind": SqlAlchemy,  # a scoped session, which is a proxy of a session
    "pgconn": Psycopg,
}


def driver_of(connection: Any) -> Driver:
    """Return the driver of `connection`; raises `TypeError` where it is not a connection of a known library."""
    for attribute, driver in _DRIVERS.items():
        if hasattr(connection, attribute):
            return driver(connection)
    kind = f"{type(connection).__module__}.{type(connection).__qualname__}"
    detail = f"{kind} is not a connection of asyncpg, psycopg 3, SQLAlchemy or Django; of a pool, take one first"
    raise TypeError(detail)


async def _done(answer: Any) -> Any:
    """Return what a call of either kind returns."""
    return await answer if inspect.isawaitable(answer) else answer


def _check_postgres(library: str, database: str) -> None:
    if database != "postgresql":
        raise TypeError(f"this {library} database is {database}: the outbox is in Postgres")


def _in_numbers(query: str, values: Values) -> tuple[str, list[str | None]]:
    names = list(dict.fromkeys(_PARAMETER.findall(query)))
    numbered = _PARAMETER.sub(lambda found: f"${names.index(found[1]) + 1}", query)
    return numbered, [values[name] for name in names]


def _in_percent(query: str) -> str:
    return _PARAMETER.sub(r"%(\1)s", query)
