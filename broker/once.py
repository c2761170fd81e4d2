"""Keys of `postroom.once` that are in the broker's database: operators see and forget them.

A registry in a database or a file of a program's own has no server: `postroom once --registry` opens it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
from aiohttp import web

from broker.authentication import PRINCIPAL
from broker.database import QUERIES
from broker.operator import Handlers, each, keep_verb, refuse_mesh
from broker.requests import decode_body
from postroom._wire.nouns import Result
from postroom._wire.once import KEYS, KeptKey, KeyDetails, KeyName, KeyNote, KeyPage, KeysQuery, key_held, key_missing
from postroom._wire.sql import load_queries
from postroom.chassis.clock import now
from postroom.chassis.postgres import Connection
from postroom.chassis.routes import Handler, decode_query, json_response
from postroom.once import Scope
from postroom.once.model import absent
from postroom.once.postgres import is_ours

_ONCE: Final = load_queries("postroom.once", "sql/postgres.sql")


class Keys(Handlers):
    """The handlers of the routes of keys."""

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/once`: empty where no program keeps keys there yet."""
        query = decode_query(request, KeysQuery)
        async with self.reading(request) as connection:
            there = is_ours(await connection.fetchval(_ONCE["version"]))
            rows = await connection.fetch(_ONCE["find"], *msgspec.structs.astuple(query)) if there else []
        return json_response(KeyPage(keys=[KeptKey(**dict(row)) for row in rows]))

    async def inspect(self, request: web.Request) -> web.Response:
        """`GET /v1/once/key`."""
        name = decode_query(request, KeyName)
        scope = Scope(name.tenant, name.topic, name.key, name.group)
        async with self._opened(request) as connection:
            row = await connection.fetchrow(QUERIES["find_key"], *scope.columns)
            notes = await connection.fetch(_ONCE["forgotten"], *scope.columns)
        log = [KeyNote(**dict(note)) for note in notes]
        if row is None and not log:
            raise key_missing(str(scope))
        known = {} if row is None else dict(row)
        if row is not None and row["result"] is not None:
            readable = request[PRINCIPAL].reads_bodies
            known["result"] = row["result"].decode("utf-8", "backslashreplace") if readable else None
        shown = KeyDetails(tenant=name.tenant, topic=name.topic, group=name.group, key=name.key, **known, log=log)
        return json_response(shown)

    def change(self, verb: str) -> Handler:
        """Make the handler of `POST /v1/once/<verb>`, the query of its name: each key in a transaction of its own."""

        async def handle(request: web.Request) -> web.Response:
            asked = await decode_body(request, KEYS.change)
            refuse_mesh(asked)
            actor = request[PRINCIPAL].actor
            async with self._opened(request) as connection:

                async def effect(name: KeyName) -> KeyName:
                    scope = Scope(name.tenant, name.topic, name.key, name.group)
                    if not asked.dry_run:
                        async with connection.transaction(isolation="read_committed"):
                            if await connection.fetch(_ONCE[verb], *scope.columns, actor, asked.reason):
                                keys = [" ".join(filter(None, scope.columns))]
                                await keep_verb(connection, actor, KEYS, verb, keys, reason=asked.reason)
                                return name
                    row = await connection.fetchrow(QUERIES["find_key"], *scope.columns)
                    if row is None:
                        raise key_missing(str(scope))
                    until = row["lease_until"]
                    if asked.dry_run and (until is None or until <= await now(connection)):
                        return name
                    raise key_held(str(scope), row["owner"], until)

                done, failed = await each(asked.filter.keys, effect, lambda name: name.key)
            return json_response(Result[KeyName](dry_run=asked.dry_run, done=done, failed=failed))

        return handle

    @asynccontextmanager
    async def _opened(self, request: web.Request) -> AsyncIterator[Connection]:
        """Lend a connection to a database that has a registry of this program's version."""
        async with self.reading(request) as connection:
            if not is_ours(await connection.fetchval(_ONCE["version"])):
                raise absent("the broker's database")
            yield connection
