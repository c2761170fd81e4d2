"""Unpublished events and deliveries: the administrator sees what JetStream refuses, and drops what never can be."""

from __future__ import annotations

from aiohttp import web

from broker.authentication import PRINCIPAL
from broker.database import Database
from broker.requests import changing, decode_body
from postroom._wire.administration import MeshQuery
from postroom._wire.nouns import Result
from postroom._wire.unpublished import UNPUBLISHED, DroppedLog, FailingPage
from postroom.chassis.routes import Handler, decode_query, json_response
from postroom.delivery.errors import not_failing
from postroom.delivery.publishing.operations import drop_failing, list_dropped, list_failing
from postroom.delivery.publishing.postgres import Table


class Unpublished:
    """The handlers of the routes of one source."""

    def __init__(self, database: Database, source: Table) -> None:
        self._database = database
        self._source = source

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/unpublished/<source>`."""
        mesh = decode_query(request, MeshQuery).mesh
        async with self._database.read(request[PRINCIPAL].whose) as connection:
            return json_response(FailingPage(failing=await list_failing(connection, self._source, mesh)))

    async def log(self, request: web.Request) -> web.Response:
        """`GET /v1/unpublished/<source>/log`."""
        async with self._database.read(request[PRINCIPAL].whose) as connection:
            return json_response(DroppedLog(dropped=await list_dropped(connection, self._source)))

    def change(self, _verb: str) -> Handler:
        """Make the handler of `POST /v1/unpublished/<source>/drop`; a dry run only says whether all of them fail."""

        async def handle(request: web.Request) -> web.Response:
            asked = await decode_body(request, UNPUBLISHED[self._source.name].change)
            ids, actor = asked.filter.ids, request[PRINCIPAL].actor
            if asked.dry_run:
                async with self._database.read(request[PRINCIPAL].whose) as connection:
                    failing = {one.id for one in await list_failing(connection, self._source, asked.mesh)}
                if unknown := sorted(set(ids) - failing):
                    raise not_failing(self._source.name, unknown[0])
            else:
                async with changing(self._database, request, *ids, reason=asked.reason) as connection:
                    await drop_failing(connection, self._source, ids, actor=actor, reason=asked.reason)
            return json_response(Result[str](dry_run=asked.dry_run, done=ids, failed=[]))

        return handle
