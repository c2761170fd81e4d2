"""The programs of an installation: the reports of daemons and of this broker, and the list of them all.

The rules are docs/contract/operate.md#operate-60 and #operate-71.
"""

import asyncio
from collections.abc import Coroutine
from importlib.metadata import version
from typing import Any, Final

from aiohttp import web

from broker.authentication import PRINCIPAL, any_mesh, member_of
from broker.database import Database
from broker.limiter import Limiter
from broker.metrics import Metrics
from broker.operator import Handlers, check_mesh
from broker.requests import decode, received
from postroom._wire.administration import BrokerHealth
from postroom._wire.programs import MinutePage, MinutesQuery, ProgramPage, ProgramsQuery, Report, ReportHead
from postroom.chassis.routes import decode_query, json_response
from postroom.chassis.runtime import Reporter, keep_reporting
from postroom.delivery.programs import PostgresReports, keep_report, list_minutes, list_programs
from postroom.errors import InvalidMessage

_DISTRIBUTION: Final = "postroom-server"
_READY_SECONDS: Final = 2.0


class Programs(Handlers):
    """The handlers of the routes of programs."""

    async def report(self, request: web.Request) -> web.Response:
        """`POST /v1/programs`: from a daemon, which has the name of the member that it acts as."""
        member = member_of(request)
        async with received(request) as body:
            data = bytes(body)
        report = head = decode(data, ReportHead)
        try:
            report = decode(data, Report)
        except InvalidMessage:  # of another release, with what this one does not know: its head says enough
            if head.version == version(_DISTRIBUTION):
                raise
        async with self.reading(request) as connection:
            await keep_report(connection, "daemon", member.mesh, member.name, report)
        return web.Response(status=204)

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/programs`: a member sees the daemons of its mesh."""
        mesh = any_mesh(request[PRINCIPAL], decode_query(request, ProgramsQuery).mesh)
        async with self.reading(request) as connection:
            programs = await list_programs(connection, mesh)
            if not programs:
                await check_mesh(connection, mesh)
        return json_response(ProgramPage(programs=programs))


class Minutes(Handlers):
    """The handler of the route of minutes."""

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/minutes`."""
        last = decode_query(request, MinutesQuery).last
        async with self.reading(request) as connection:
            return json_response(MinutePage(minutes=await list_minutes(connection, last)))


class Health:
    """The state of this broker, checked once for all requests that wait for it."""

    def __init__(self, database: Database, limiter: Limiter, metrics: Metrics, *, needs_redis: bool) -> None:
        self._database = database
        self._limiter = limiter
        self._metrics = metrics
        self._needs_redis = needs_redis
        self._looking: asyncio.Task[BrokerHealth] | None = None

    async def state(self) -> BrokerHealth:
        """Return whether it can accept now, and what is wrong."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look(), name="health")
        return await asyncio.shield(self._looking)

    def reporting(self, url: str) -> Coroutine[Any, Any, None]:
        """Return a task that reports the broker at `url` until it is cancelled, and then takes it off the list."""
        reporter = Reporter(_DISTRIBUTION, url)
        reports = PostgresReports(self._database.reading, "broker", "broker")

        async def look() -> Report:
            state, answered = await self.state(), self._metrics.messages.collect()
            accepted = sum(
                one.value
                for family in answered
                for one in family.samples
                if one.name.endswith("_total") and one.labels["status"] == "201"
            )
            return reporter.report(state.reasons, status=state.status, totals={"accepted": int(accepted)})

        async def run() -> None:
            try:
                await keep_reporting(look, reports.keep, lambda: self._limiter.degraded)
            finally:
                await asyncio.shield(reports.withdraw())

        return run()

    async def _look(self) -> BrokerHealth:
        try:
            async with asyncio.timeout(_READY_SECONDS):
                trouble = await self._database.trouble()
        except TimeoutError:
            trouble = "Postgres does not answer in time: the broker cannot accept messages"
        self._metrics.postgres_reachable.set(trouble is None)
        if trouble is not None:
            return BrokerHealth(status="unavailable", reasons=[trouble])
        await self._limiter.probe()
        limited, lack = self._limiter.degraded, self._database.lack
        reasons = [] if limited is None else [limited]
        if lack is not None:  # it stays ready: only the next batch shows whether that is over
            reasons.append(f"Postgres could not store the last batch: {lack}")
        if limited is not None and self._needs_redis:
            return BrokerHealth(status="unavailable", reasons=reasons)
        return BrokerHealth(status="degraded" if reasons else "ok", reasons=reasons)
