"""The connections that applications have to their Postgres: of each driver, behind one way to begin a transaction."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import asyncpg
import django
import django.conf
import django.db
import psycopg
import psycopg2
import psycopg2.extensions
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

os.environ["DJANGO_ALLOW_ASYNC_UNSAFE"] = "true"  # the loop of a test serves nobody else
django.conf.settings.configure(DATABASES={"default": {"ENGINE": "django.db.backends.postgresql"}}, USE_TZ=True)
django.setup()


class Way(NamedTuple):
    """How an application reaches its database: in a transaction that commits at its end, and without one."""

    name: str
    transaction: Callable[[str], AbstractAsyncContextManager[Any]]
    bare: Callable[[str], AbstractAsyncContextManager[Any]]
    asynchronous: bool = True

    def __repr__(self) -> str:
        return self.name


async def execute(connection: Any, statement: str) -> None:
    """Execute a statement as users of the connection's library do."""
    if hasattr(connection, "in_atomic_block"):
        with connection.cursor() as cursor:
            cursor.execute(statement)
        return
    is_sqlalchemy = type(connection).__module__.startswith("sqlalchemy.")
    done = connection.execute(sqlalchemy.text(statement) if is_sqlalchemy else statement)
    if inspect.isawaitable(done):
        await done


@asynccontextmanager
async def _asyncpg_bare(url: str) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(url)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def _asyncpg(url: str) -> AsyncIterator[Any]:
    async with _asyncpg_bare(url) as connection, connection.transaction():
        yield connection


@asynccontextmanager
async def _asyncpg_pool(url: str) -> AsyncIterator[Any]:
    async with (
        asyncpg.create_pool(url, min_size=1, max_size=1) as pool,
        pool.acquire() as connection,
        connection.transaction(),
    ):
        yield connection


@asynccontextmanager
async def _psycopg_async(url: str, *, autocommit: bool = False) -> AsyncIterator[Any]:
    async with await psycopg.AsyncConnection.connect(url, autocommit=autocommit) as connection:
        yield connection


@asynccontextmanager
async def _psycopg_block(url: str) -> AsyncIterator[Any]:
    async with _psycopg_async(url, autocommit=True) as connection, connection.transaction():
        yield connection


@asynccontextmanager
async def _psycopg(url: str, *, autocommit: bool = False) -> AsyncIterator[Any]:
    with psycopg.connect(url, autocommit=autocommit) as connection:
        yield connection


def _async_sqlalchemy(driver: str, *, session: bool, **options: Any) -> Callable[[str], Any]:
    @asynccontextmanager
    async def lend(url: str) -> AsyncIterator[Any]:
        connect = asyncpg.connect if driver == "asyncpg" else psycopg.AsyncConnection.connect
        engine = create_async_engine(f"postgresql+{driver}://", async_creator=lambda: connect(url), **options)
        try:
            if session:
                async with AsyncSession(engine) as lent, lent.begin():
                    yield lent
            else:
                async with engine.begin() as lent:
                    yield lent
        finally:
            await engine.dispose()

    return lend


class _Pg8000Error(psycopg2.DatabaseError):
    """An error of Postgres as pg8000 raises it: the fields of the answer as a dict, and no attribute."""


class _Pg8000Cursor(psycopg2.extensions.cursor):
    def execute(self, *given: Any) -> None:
        try:
            super().execute(*given)
        except psycopg2.Error as error:
            said = {"S": "ERROR", "C": error.pgcode, "M": error.diag.message_primary, "W": error.diag.context}
            raise _Pg8000Error(said) from None


def _sqlalchemy(
    kind: str, driver: Any = psycopg, connecting: dict[str, Any] | None = None, **options: Any
) -> Callable[[str], Any]:
    @contextlib.contextmanager
    def lent(engine: sqlalchemy.Engine) -> Iterator[Any]:
        if kind == "connection":
            with engine.begin() as connection:
                yield connection
        elif kind == "session":
            with Session(engine) as session, session.begin():
                yield session
        else:
            session = scoped_session(sessionmaker(engine))
            try:
                yield session
                session.commit()
            finally:
                session.remove()

    @asynccontextmanager
    async def lend(url: str) -> AsyncIterator[Any]:
        dialect = f"postgresql+{driver.__name__}://"
        engine = sqlalchemy.create_engine(dialect, creator=lambda: driver.connect(url, **(connecting or {})), **options)
        try:
            with lent(engine) as connection:
                yield connection
        finally:
            engine.dispose()

    return lend


@asynccontextmanager
async def _django_bare(url: str) -> AsyncIterator[Any]:
    parts = urlsplit(url)
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    connection = django.db.connection
    connection.settings_dict.update(NAME=parts.path[1:], USER=parts.username, HOST=options.pop("host"), OPTIONS=options)
    try:
        yield connection
    finally:
        connection.close()


@asynccontextmanager
async def _django(url: str) -> AsyncIterator[Any]:
    async with _django_bare(url) as connection:
        with django.db.transaction.atomic():
            yield connection


_AUTOCOMMIT = {"isolation_level": "AUTOCOMMIT"}
WAYS = (
    Way("asyncpg", _asyncpg, _asyncpg_bare),
    Way("asyncpg-pool", _asyncpg_pool, _asyncpg_bare),
    Way("psycopg-async", _psycopg_async, lambda url: _psycopg_async(url, autocommit=True)),
    Way("psycopg-block", _psycopg_block, lambda url: _psycopg_async(url, autocommit=True)),
    Way("psycopg", _psycopg, lambda url: _psycopg(url, autocommit=True), asynchronous=False),
    *(
        Way(
            f"sqlalchemy-async-{driver}-{'session' if session else 'connection'}",
            _async_sqlalchemy(driver, session=session),
            _async_sqlalchemy(driver, session=session, **_AUTOCOMMIT),
        )
        for driver in ("asyncpg", "psycopg")
        for session in (True, False)
    ),
    *(
        Way(f"sqlalchemy-{kind}", _sqlalchemy(kind), _sqlalchemy(kind, **_AUTOCOMMIT), asynchronous=False)
        for kind in ("session", "connection", "scoped")
    ),
    Way(
        "sqlalchemy-psycopg2",
        _sqlalchemy("session", psycopg2),
        _sqlalchemy("session", psycopg2, **_AUTOCOMMIT),
        asynchronous=False,
    ),
    Way(
        "sqlalchemy-errors-of-pg8000",
        _sqlalchemy("session", psycopg2, {"cursor_factory": _Pg8000Cursor}),
        _sqlalchemy("session", psycopg2, {"cursor_factory": _Pg8000Cursor}, **_AUTOCOMMIT),
        asynchronous=False,
    ),
    Way("django", _django, _django_bare, asynchronous=False),
)
