"""Databases of applications for tests: with an outbox, and a role that may do what an application may and no more."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

import asyncpg

from embedded import EmbeddedPostgres
from postroom.delivery.applications import install
from support.databases import create, drop

_numbers = count(1)
_templates: dict[tuple[str, ...], tuple[str, str]] = {}
_ROLE = "&options=-c%20role%3D"


@asynccontextmanager
async def application_database(server: EmbeddedPostgres, *meshes: str) -> AsyncIterator[str]:
    """Make a database with an outbox; yields its address for the role that may only emit and handle.

    Those for the same meshes are copies of one, in which the outbox was installed, and have one role.
    """
    template, role = await _template(server, meshes)
    database = f"application_{next(_numbers)}"
    await create(server, database, template)
    try:
        yield as_role(server.url_of(database), role)
    finally:
        await drop(server, database)


async def _template(server: EmbeddedPostgres, meshes: tuple[str, ...]) -> tuple[str, str]:
    """Return the name of the database that others are copies of, and of its role."""
    if (server.url, *meshes) not in _templates:
        number = next(_numbers)
        database, role = f"installed_{number}", f"shop_{number}"
        await _as_superuser(server.url, f"CREATE ROLE {role}")
        await _as_superuser(server.url, f"GRANT {role} TO postroom")  # which can log in, and become it
        await create(server, database)
        owner = server.url_of(database)
        await install(owner, roles=[role], meshes=meshes)
        await _execute(
            owner,
            "CREATE TABLE public.orders (id integer PRIMARY KEY)",  # the owner has a schema of its name now
            f"GRANT USAGE ON SCHEMA public TO {role}",
            f"GRANT SELECT, INSERT, UPDATE, DELETE ON public.orders TO {role}",
        )
        _templates[server.url, *meshes] = database, role
    return _templates[server.url, *meshes]


def as_role(url: str, role: str) -> str:
    """Return the address of a database for who has the rights of `role` and no other."""
    return f"{url}{_ROLE}{role}"


def role_of(url: str) -> str:
    """Return the role of such an address."""
    return url.partition(_ROLE)[2]


def owner_of(url: str) -> str:
    """Return the address of the same database for its owner, who installed the outbox."""
    return url.partition(_ROLE)[0]


async def fetch(url: str, query: str, *values: Any) -> Any:
    """Return what a query of the database says first."""
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query, *values)
    finally:
        await connection.close()


async def _as_superuser(url: str, statement: str) -> None:
    await _execute(url.replace("postroom@", "postgres@"), statement)


async def _execute(url: str, *statements: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()
