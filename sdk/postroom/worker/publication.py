"""What a worker does for a database: publishers, upkeep, webhooks and jobs, on pools of their own.

NATS may be unreachable at any time, even at the start: what cannot be published waits in Postgres.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Collection, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, Final

import structlog
from prometheus_client.core import Metric

from postroom._wire.unpublished import SourceBacklog
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import (
    POSTGRES_ERRORS,
    Connection,
    Pool,
    check_version,
    close_pool,
    fatal_errors,
    open_pool,
    open_rooms,
)
from postroom.delivery import ROOM, applications
from postroom.delivery.consumer import ConsumerCounters
from postroom.delivery.http.addresses import Guard
from postroom.delivery.http.inbox_messages import open_inbox_pool
from postroom.delivery.http.webhooks import Webhooks
from postroom.delivery.programs import latency_totals
from postroom.delivery.publication.postgres import DELIVERIES, EVENTS, LETTERS, PostgresSource, sources_of
from postroom.delivery.publication.publisher import Bell, Publisher
from postroom.delivery.publication.record import Record
from postroom.delivery.settings import networks_of
from postroom.ledger import ROOMS
from postroom.ledger.engine import load_flow
from postroom.ledger.operations import JobRetention
from postroom.worker.config import SourceSection, WorkerConfig, check_distinct
from postroom.worker.jobs import Jobs
from postroom.worker.metrics import of_publication
from postroom.worker.orphans import OrphanCheck
from postroom.worker.upkeep import Upkeep

_log = structlog.get_logger(__name__)

_CONNECTIONS: Final = 9  # one for each publisher, the bell, two for the upkeep, one for retention, some for the page
_SOURCE_CONNECTIONS: Final = 7  # the same, with two publishers
_WEBHOOK_CONNECTIONS: Final = 3
_DELIVERIES_APART: Final = 0.025  # seconds: a small batch costs nearly as much as a large one
_LEASE_CONNECTIONS: Final = 4  # in addition to one for each step that runs


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A database that is published from, with its webhooks and jobs."""

    pool: Pool
    sources: Sequence[PostgresSource]
    record: Record
    upkeep: Upkeep
    publishers: Sequence[Publisher]
    bell: Bell
    webhooks: Webhooks | None = None  # None: this database has no meshes
    jobs: Jobs | None = None  # None: it has no flows
    job_retention: JobRetention | None = None  # None: it has no jobs
    orphan_check: OrphanCheck | None = None  # None: it has no meshes, or the check is disabled
    name: str = "publishing"
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def has_broker(self) -> bool:
        """Whether it is a broker's database."""
        return any(source.table is DELIVERIES for source in self.sources)

    @property
    def flows(self) -> Collection[str]:
        """The flows that it runs."""
        return () if self.jobs is None else self.jobs.engines.keys()

    def totals(self) -> dict[str, int]:
        """Return what it has done since it started."""
        posted = ConsumerCounters() if self.webhooks is None else self.webhooks.counters
        steps = 0 if self.jobs is None else sum(engine.counters.done for engine in self.jobs.engines.values())
        return {
            "published": sum(publisher.counters.published for publisher in self.publishers),
            "handled": posted.done + steps,
            "dead_lettered": posted.dead_lettered,
            **({} if self.webhooks is None else latency_totals(self.webhooks.took)),
        }

    def reasons(self) -> list[str]:
        """Return what keeps it from publishing now."""
        troubles = ((publisher.source.name, publisher.counters.trouble) for publisher in self.publishers)
        waiting = [f"{source} wait: {trouble}" for source, trouble in troubles if trouble is not None]
        reading = {"webhooks": self.webhooks, "jobs": self.jobs}
        held = {name: one.trouble for name, one in reading.items() if one is not None and one.trouble is not None}
        return [*waiting, *(f"{name} do not run: {trouble}" for name, trouble in held.items())]

    def concerns(self) -> list[str]:
        """Return what an operator should look at although it works."""
        return [] if self.orphan_check is None else self.orphan_check.reasons()

    async def backlogs(self) -> dict[str, SourceBacklog]:
        """Return the backlog of every source; none where Postgres cannot be asked."""
        try:
            return {source.name: await source.backlog() for source in self.sources}
        except POSTGRES_ERRORS:
            return {}

    async def metrics(self) -> list[Metric]:
        """Return its metrics."""
        return of_publication(
            self.publishers,
            self.record,
            await self.backlogs(),
            await self.upkeep.durables(),
            webhooks=self.webhooks,
            jobs=self.jobs,
            orphan_check=self.orphan_check,
        )

    async def status(self) -> str:
        """Return what waits."""
        waiting = [f"{source} {backlog.count:,}" for source, backlog in (await self.backlogs()).items()]
        return f"waiting: {', '.join(waiting)}" if waiting else "Postgres does not answer"

    def announce(self, page: str | None) -> None:
        """Log that it begins."""
        sources = [publisher.source.name for publisher in self.publishers]
        _log.info("publishing", **self.labels, sources=sources, page=page)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs until the stop, by name."""
        tasks = {f"publisher of {publisher.source.name}": publisher.run() for publisher in self.publishers}
        tasks["bell"] = self.bell.run()
        tasks["upkeep"] = self.upkeep.run()
        tasks["lag"] = self.upkeep.note_lag()
        if self.job_retention is not None:
            tasks["job retention"] = self.job_retention.run()
        if self.orphan_check is not None:
            tasks["orphan check"] = self.orphan_check.run()
        if self.webhooks is not None:
            tasks["webhooks"] = self.webhooks.run()
        if self.jobs is not None:
            tasks["jobs"] = self.jobs.run()
        return tasks

    async def finish(self) -> None:
        """Take no more work, and wait for what is in hand."""
        handling = [service.stop() for service in (self.webhooks, self.jobs) if service is not None]
        await asyncio.gather(self.upkeep.stop(), *handling, *(publisher.stop() for publisher in self.publishers))


@asynccontextmanager
async def open_publication(config: WorkerConfig) -> AsyncIterator[Publication]:
    """Build everything, and close it; raises `Fatal`."""
    async with AsyncExitStack() as stack:
        pool = await open_rooms(config.database, ROOM, name="postroom-worker", connections=_CONNECTIONS)
        stack.push_async_callback(close_pool, pool)
        sources = await sources_of(pool, config.record)
        publication = _publication(pool, sources, config, "postroom-worker")
        webhooks = jobs = orphan_check = None
        if publication.has_broker:
            connections = _WEBHOOK_CONNECTIONS
            posting = await open_inbox_pool(config.database, name="postroom-worker webhooks", connections=connections)
            stack.push_async_callback(close_pool, posting)
            webhooks = Webhooks(posting, config.nats, config.webhooks, Guard(networks_of(config.webhooks)))
        if publication.has_broker and config.orphan_check.enabled:
            events_kept = timedelta(days=config.record.keep_days)
            orphan_check = OrphanCheck(pool, config.database, config.orphan_check, events_kept=events_kept)
        if config.flows:
            flows = list(dict.fromkeys(map(load_flow, config.flows)))
            check_distinct([flow.name for flow in flows], "flows: two have the same name; rename one")
            connections = config.jobs.steps_at_once + _LEASE_CONNECTIONS
            working = await open_rooms(config.database, *ROOMS, name="postroom-worker jobs", connections=connections)
            stack.push_async_callback(close_pool, working)
            jobs = Jobs(working, config.nats, flows, config.jobs, emitted=partial(publication.bell.ring, EVENTS.name))
        yield replace(
            publication,
            webhooks=webhooks,
            jobs=jobs,
            job_retention=JobRetention(pool, config.jobs.keep_days),
            orphan_check=orphan_check,
        )


@asynccontextmanager
async def open_source(
    section: SourceSection, config: WorkerConfig, publication: Publication | None
) -> AsyncIterator[Publication]:
    """Build what publishes from an application's database, and close it.

    A database that cannot be reached is waited for, while the others are published. Its meshes are those of the broker,
    where `publication` has the broker's database. Raises `Fatal`: 78 where the login is refused or no outbox is
    installed.
    """

    async def check(connection: Connection) -> None:
        await check_version(connection, *applications.ROOMS, migrate_with=applications.INSTALL)

    name, url = f"postroom-worker {section.name}", section.database_url
    try:
        pool = await open_pool(url, name=name, connections=_SOURCE_CONNECTIONS, kept=0, on_connect=check)
    except Fatal as fatal:
        raise Fatal(fatal.exit_code, f"source {section.name}: {fatal}") from fatal
    try:
        try:
            with fatal_errors():
                async with pool.acquire():
                    pass
        except Fatal as fatal:
            if fatal.exit_code is not Exit.UNAVAILABLE:
                raise Fatal(fatal.exit_code, f"source {section.name}: {fatal}") from fatal
            _log.warning("source_unreachable", database=section.name, error=str(fatal))
        sources = [PostgresSource(pool, table, config.record) for table in (EVENTS, LETTERS)]
        broker = publication.pool if publication is not None and publication.has_broker else None
        own = _publication(pool, sources, config, name, broker=broker)
        yield replace(own, name=f"source {section.name}", labels={"database": section.name})
    finally:
        await close_pool(pool)


def _publication(
    pool: Pool, sources: Sequence[PostgresSource], config: WorkerConfig, name: str, *, broker: Pool | None = None
) -> Publication:
    """Return what publishes from one database, which NATS knows by `name`."""
    record = Record(sources, config.record)
    upkeep = Upkeep(pool, sources, record, config, broker=broker)
    publishers = [
        Publisher(
            source,
            config.deliveries if source.table is DELIVERIES else config.events,
            config.nats,
            name=f"{name} {source.name}",
            opened=upkeep.prepare,
            rng=random.Random(),  # noqa: S311 - it spreads retries, no secret depends on it
            apart=_DELIVERIES_APART if source.table is DELIVERIES else 0.0,
        )
        for source in sources
    ]
    bell = Bell(pool, publishers)
    return Publication(pool=pool, sources=sources, record=record, upkeep=upkeep, publishers=publishers, bell=bell)
