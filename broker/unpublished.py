"""Publishing, for operators: what waits, is refused or has to be published again, and which consumers pause.

The rules are docs/contract/delivery.md#delivery-24, #delivery-27 and #delivery-87. A worker does the publishing.
"""

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from aiohttp import web
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo

from broker.authentication import PRINCIPAL
from broker.operator import BRIEFLY, PATIENCE, Handlers, Nats, check_mesh, each, keep_log, keep_verb, refuse_mesh
from broker.requests import decode_body
from postroom._wire import unpublished
from postroom._wire.administration import MeshQuery
from postroom._wire.nouns import Result, invalid_cursor
from postroom.chassis.clock import now
from postroom.chassis.postgres import Connection
from postroom.chassis.routes import Handler, decode_query, json_response
from postroom.delivery.durables import EFFECTS, OperatorPause, each_durable, list_durables, pause_of, with_past
from postroom.delivery.errors import NATS_ERRORS, consumer_not_found, from_nats, mapped, still_runs
from postroom.delivery.http.inbox_messages import find_begun
from postroom.delivery.programs import list_programs
from postroom.delivery.publication import postgres
from postroom.errors import PostroomError


@dataclass(frozen=True, eq=False)
class Unpublished(Handlers):
    """The handlers of the routes of what one source has that is refused."""

    _source: postgres.Table

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/unpublished/<source>`."""
        mesh = decode_query(request, MeshQuery).mesh
        async with self.reading(request) as connection:
            await _check_context(connection, mesh)
            return json_response(await postgres.list_failing(connection, self._source, mesh))

    async def log(self, request: web.Request) -> web.Response:
        """`GET /v1/unpublished/<source>/log`."""
        mesh = decode_query(request, MeshQuery).mesh
        async with self.reading(request) as connection:
            await _check_context(connection, mesh)
            dropped = await postgres.list_dropped(connection, self._source, mesh)
        return json_response(unpublished.DroppedLog(dropped=dropped))

    def change(self, verb: str) -> Handler:
        """Make the handler of `POST /v1/unpublished/<source>/<verb>`: for all that match and are refused still."""
        noun = unpublished.UNPUBLISHED[self._source.name]

        async def handle(request: web.Request) -> web.Response:
            asked = await decode_body(request, noun.change)
            actor = request[PRINCIPAL].actor
            async with self.reading(request) as connection, connection.transaction():
                await _check_context(connection, asked.mesh)
                meant = asked.filter, asked.mesh, asked.cursor
                ids, next_cursor = await postgres.find_failing(connection, self._source, *meant)
                if not asked.dry_run:
                    ids = await postgres.EFFECTS[verb](connection, self._source, ids, actor=actor, reason=asked.reason)
                    await keep_verb(connection, actor, noun, verb, ids, reason=asked.reason)
                failed = await postgres.not_done(connection, self._source, asked.filter, ids)
            return json_response(Result[str](dry_run=asked.dry_run, done=ids, failed=failed, next_cursor=next_cursor))

        return handle


async def _check_context(connection: Connection, context: str | None) -> None:
    """Raise `NotFound` where there is no such mesh, and no worker declares a stream that does without one."""
    if context is not None and not await postgres.is_declared(connection, context):
        await check_mesh(connection, context)


@dataclass(frozen=True, eq=False)
class Consumers(Handlers):
    """The handlers of the routes of consumers."""

    _nats: Nats

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/consumers`: what NATS, and its record in Postgres, know of each."""
        query = decode_query(request, unpublished.ConsumersQuery)
        meshes = None if query.mesh is None else [query.mesh]
        async with self.reading(request) as connection:
            begun = await find_begun(connection)
        pausing = {one.consumer: one.error for one in begun if one.error}
        page = unpublished.ConsumerPage(
            pausing=[unpublished.Pause(consumer=name, error=error) for name, error in pausing.items()]
        )
        async with self._nats.opened(BRIEFLY) as (js, unread):
            page.unread = unread
            try:
                page.consumers = [] if js is None else await list_durables(js, meshes, begun, oldest=True)
            except NATS_ERRORS as error:
                page.unread = from_nats(error, "listing the consumers").problem
        async with self.reading(request) as connection:
            if not page.consumers:
                await check_mesh(connection, query.mesh)
            if query.last:
                page.consumers = await with_past(connection, page.consumers, query.last)
        return json_response(page)

    def change(self, verb: str) -> Handler:
        """Make the handler of `POST /v1/consumers/<verb>`: each consumer after its line of the log."""
        table = unpublished.CONSUMERS.verbs[verb]

        async def handle(request: web.Request) -> web.Response:
            asked, actor = await decode_body(request, unpublished.CONSUMERS.change), request[PRINCIPAL].actor
            async with self._nats.opened(PATIENCE) as (js, unread):
                if js is None:
                    assert unread is not None  # noqa: S101 - the reason
                    raise PostroomError(unread)
                with mapped("looking for the consumers"):
                    meshes = None if asked.mesh is None else [asked.mesh]
                    durables = [one async for _, one in each_durable(js, meshes)]
                    running = await self._running(js, meshes, request) if verb == "delete" else set()
                found: dict[str, ConsumerInfo | None] = {}
                for name in asked.filter.ids:
                    meant = [one for one in durables if name in {one.name, _id(one)}]
                    found |= {_id(one): one for one in meant} if meant else {name: None}

                async def effect(id_: str) -> str:
                    info = found[id_]
                    if info is None:
                        raise consumer_not_found(id_)
                    table.check(verb, f"the consumer {info.name}", "active" if pause_of(info) is None else "paused")
                    if id_ in running:
                        raise still_runs(info.name)
                    if asked.dry_run:
                        return id_
                    async with self.reading(request) as connection, connection.transaction():
                        await keep_verb(connection, actor, unpublished.CONSUMERS, verb, [id_], reason=asked.reason)
                        await EFFECTS[verb](js, info, OperatorPause(actor, asked.reason))
                    return id_

                done, failed = await each(found, effect, str)
            return json_response(Result[str](dry_run=asked.dry_run, done=done, failed=failed))

        return handle

    async def _running(self, js: JetStreamContext, meshes: Collection[str] | None, request: web.Request) -> set[str]:
        """Return the ids of the consumers that a program runs: it asks for messages, or has as many as it may."""
        async with self.reading(request) as connection:
            begun, programs = await find_begun(connection), await list_programs(connection, None)
        parts = {part.name for program in programs if not program.away for part in program.parts}
        return {
            one.id
            for one in await list_durables(js, meshes, begun)
            if one.asks or ((one.in_hand or one.paused) and f"consumer {one.consumer}" in parts)
        }


def _id(info: ConsumerInfo) -> str:
    return f"{info.stream_name}/{info.name}"


class Sources(Handlers):
    """The handlers of the routes of the sources: events, deliveries, letters and replays."""

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/sources`: the backlog of each, of one mesh or of all."""
        mesh = decode_query(request, MeshQuery).mesh
        async with self.reading(request) as connection:
            await _check_context(connection, mesh)
            return json_response(unpublished.SourcePage(sources=await postgres.list_backlogs(connection, mesh)))

    def change(self, verb: str) -> Handler:
        """Make the handler of `POST /v1/sources/redrive`: one part per request, up to the time of the first request.

        A cursor is that time, and the one after which the next part begins.
        """

        async def handle(request: web.Request) -> web.Response:
            asked = await decode_body(request, unpublished.SOURCES.change)
            refuse_mesh(asked)
            wanted = asked.filter
            try:
                times = [] if asked.cursor is None else asked.cursor.split()
                until, after = [datetime.fromisoformat(time).astimezone(UTC) for time in times] or (None, None)
            except (OverflowError, ValueError):
                raise invalid_cursor() from None
            async with self.reading(request) as connection, connection.transaction():
                until, dry_run = until or await now(connection), asked.dry_run
                found, after = await postgres.redrive(connection, wanted, until=until, after=after, dry_run=dry_run)
                if not asked.dry_run:
                    await keep_log(
                        connection,
                        request[PRINCIPAL].actor,
                        verb,
                        unpublished.SOURCES.name,
                        wanted.key(until),
                        outcome=unpublished.redriven(found),
                        reason=asked.reason,
                    )
            cursor = None if after is None else f"{until.isoformat()} {after.isoformat()}"
            return json_response(
                Result[unpublished.Redriven](dry_run=asked.dry_run, done=found, failed=[], next_cursor=cursor)
            )

        return handle
