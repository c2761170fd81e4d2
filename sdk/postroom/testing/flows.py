"""`FlowCase`: a flow on a real Postgres, with a crash at every commit.

    async def test_each_part_is_loaded_once(database_url):
        answers = {"extract": lambda request: {"parts": [1, 2]}}
        async with FlowCase(flow, database_url, tables=TABLES, answers=answers) as case:
            await case.crash_at_every_commit({"day": 1}, effects=LOADED)

TABLES creates the tables of the application, and LOADED is the query that shows what the job has left there.

The steps run as in a worker, on the real ledger; what they send stays in memory, and the function that `answers` has
for an activity answers its requests. Each run has a database of its own, a copy of one with the ledger's tables and the
application's, so the role of the URL must be allowed to create databases.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, NamedTuple, Self, TypeVar
from urllib.parse import urlsplit
from uuid import UUID, uuid4

import asyncpg
import msgspec

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import Connection, Pool, close_pool, connected, migrate, open_pool
from postroom.claims import Dead, Later, Outcome
from postroom.delivery.message import CAUSATION_ID, MESSAGE_ID, Delivery
from postroom.delivery.nats import USUAL_PAYLOAD
from postroom.delivery.publication import Outgoing, Place
from postroom.delivery.publication.postgres import EVENTS, PostgresSource
from postroom.delivery.settings import PublisherSettings, RecordSettings
from postroom.delivery.subjects import EventSubject, event_subject, known_subject
from postroom.flow import Flow, check_flow
from postroom.ledger import ROOMS, primitives
from postroom.ledger.engine import Engine
from postroom.ledger.legs import encode
from postroom.ledger.primitives import Start, start_job
from postroom.worker.jobs import JobHandler

Effects = str | Callable[[Connection], Awaitable[Any]]

_T = TypeVar("_T")

QUERIES: Final = load_queries("postroom.testing", "flows.sql")
_LEASE: Final = timedelta(minutes=5)
_ANSWERED: Final = "answered"  # the event of an answer that may have any name
_PRIMITIVES: Final = {
    primitives.QUERIES[name]: name for name in ("enter_leg1", "complete_leg1", "enter_leg2", "spawn", "finish_job")
}
_COMMIT: Final = "COMMIT;"  # as asyncpg sends it


class FlowRun(NamedTuple):
    """A job that ended: its state, what its completion returned, what it left, and which steps it committed."""

    state: str
    error: str | None  # of a failed job
    result: Any
    effects: Any
    commits: list[str]


class FlowCase:
    """One flow under test; a context manager."""

    def __init__(
        self,
        flow: Flow,
        database_url: str,
        *,
        tables: str = "",
        answers: Mapping[str, Callable[[Any], Any]] | None = None,
        mesh: str = "demo",
    ) -> None:
        """`tables` is the SQL of the application's own tables; raises `InvalidFlow`."""
        check_flow(flow)
        self._flow = flow
        self._url = database_url
        self._tables = tables
        self._answers = answers or {}
        self._mesh = mesh
        self._name = f"postroom_case_{uuid4().hex[:12]}"
        self._numbers = count(1)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._database("create_template", self._name))
            url = self._url_of(self._name)
            await migrate(url, *ROOMS)
            if self._tables:
                async with connected(url) as connection:
                    await connection.execute(self._tables)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, request: Any = None, *, effects: Effects = "") -> FlowRun:
        """Run a job that begins with `request` (JSON) to its end.

        `effects` is a query, or a function of a connection, that returns what it has left behind.
        """
        return await self._run(request, effects, None)

    async def crash_at_every_commit(self, request: Any = None, *, effects: Effects) -> FlowRun:
        """Run the job once without a crash, then twice for each of its commits: with a crash before it, and after it.

        Raises `AssertionError` where a job does not complete, or where a crash changes what it leaves behind. Returns
        the run without a crash.
        """
        expected = await self._run(request, effects, None)
        if expected.state != "completed":
            raise AssertionError(f"the job is {expected.state} without any crash: {expected.error}")
        for number, step in enumerate(expected.commits):
            for after in (False, True):
                run = await self._run(request, effects, Crash(number, after))
                where = f"a crash right {'after' if after else 'before'} commit {number + 1} ({step})"
                if run.state != "completed":
                    raise AssertionError(f"after {where} the job is {run.state}: {run.error}")
                if run.effects != expected.effects:
                    sentence = f"after {where} the effects are {run.effects!r}, and without it {expected.effects!r}"
                    raise AssertionError(f"{sentence}: write them on `await ctx.connection()`")
        return expected

    async def _run(self, request: Any, effects: Effects, crash: Crash | None) -> FlowRun:
        name = f"{self._name}_{next(self._numbers)}"
        async with self._database("copy_template", name):
            url = self._url_of(name)
            async with asyncpg.create_pool(url, min_size=1, max_size=2) as pool:
                job = _Job(self._flow, pool, url, self._mesh, self._answers)
                await job.run(encode(request, "the request of the job"), crash)
                (ended,) = await pool.fetch(QUERIES["find_job"], job.id)
                if isinstance(effects, str):
                    left = [tuple(row) for row in await pool.fetch(effects)] if effects else []
                else:
                    async with pool.acquire() as connection:
                        left = await effects(connection)
        return FlowRun(ended["state"], ended["error"], job.result, left, job.commits)

    @asynccontextmanager
    async def _database(self, query: str, name: str) -> AsyncIterator[None]:
        """Create a database, and drop it at the end of the block."""
        server = await asyncpg.connect(self._url)
        try:
            await server.execute(QUERIES[query].format(name=name, template=self._name))
            try:
                yield
            finally:
                await server.execute(QUERIES["drop"].format(name=name))
        finally:
            await server.close()

    def _url_of(self, name: str) -> str:
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()


class _Job:
    """One job and its messages, which are delivered one after another until nothing is left to do."""

    def __init__(
        self, flow: Flow, pool: Pool, url: str, mesh: str, answers: Mapping[str, Callable[[Any], Any]]
    ) -> None:
        self.id = uuid4()
        self.result: Any = None
        self.commits: list[str] = []
        self._flow = flow
        self._pool = pool
        self._url = url
        self._mesh = mesh
        self._answers = answers
        self._source = PostgresSource(pool, EVENTS, RecordSettings())
        self._engine = Engine(pool, flow, lease=_LEASE)
        self._created_at = datetime.now(UTC)  # of the stream
        self._sequence = 0
        self._waiting: list[Delivery] = []

    async def run(self, request: str, crash: Crash | None) -> None:
        flow = self._flow
        start = Start(self.id, self._mesh, flow.name, uuid4(), flow.first.name, request, flow.threshold)
        async with self._pool.acquire() as connection:
            await start_job(connection, start)
        while await self._employ(MortalWorker(crash)):
            crash = None
            for query in ("end_leases_of_activities", "end_leases_of_messages"):
                await self._pool.execute(QUERIES[query])

    async def _employ(self, worker: MortalWorker) -> bool:
        """Deliver the messages to a worker; return whether it died."""
        async with worker.pool(self._url) as pool:
            engine = Engine(pool, self._flow, lease=_LEASE)
            engine.limit(USUAL_PAYLOAD)
            handler = JobHandler(engine, asyncio.Semaphore(1), lambda: None)
            while not worker.dead:
                await self._publish()
                if not self._waiting:
                    break
                await self._deliver(worker, handler, self._waiting.pop(0))
        self.commits += worker.commits
        return worker.dead

    async def _deliver(self, worker: MortalWorker, handler: JobHandler, delivery: Delivery) -> None:
        outcomes: list[Outcome] = []

        async def settle(delivery: Delivery, outcome: Outcome) -> None:
            del delivery
            outcomes.append(outcome)

        with suppress(Crashed):
            await handler.handle([delivery], settle)
        if worker.dead:  # what it settled after its death does not count
            self._waiting.insert(0, delivery)
            return
        match outcomes:
            case [Later()]:
                self._waiting.append(delivery._replace(attempt=delivery.attempt + 1))
            case [Dead(reason, error)]:
                detail = f"the message {delivery.message_id} on {delivery.subject} is dead: {reason}: {error}"
                raise AssertionError(detail)

    async def _publish(self) -> None:
        more = True
        while more:
            async with self._source.claim(PublisherSettings()) as claim:
                more = bool(claim.messages)
                places = []
                for message in claim.messages:
                    self._sequence += 1
                    places.append((message, Place("TEST", self._created_at, self._sequence, duplicate=False)))
                if places:
                    await claim.settle(places, (), ())
            for message in claim.messages:
                await self._take(message)

    async def _take(self, message: Outgoing) -> None:
        match known_subject(message.subject):
            case EventSubject(_, name, _):
                self._waiting.append(self._delivery(message.subject, message.body, message.headers))
                if name == "job_completed":
                    self.result = msgspec.json.decode(message.body).get("result")
            case _:
                await self._answer(UUID(message.headers[MESSAGE_ID]), message.body)

    async def _answer(self, request: UUID, body: bytes) -> None:
        asker = (await self._engine.find_askers([request])).get(request)
        if asker is None:
            return
        activity = self._flow.activities[asker.name]
        if asker.name not in self._answers:
            sentence = f"{asker.name!r} asks queue:{activity.queue}: give the case answers={{{asker.name!r}: …}}"
            raise AssertionError(sentence)
        answer = encode(self._answers[asker.name](msgspec.json.decode(body)), f"the answer for {asker.name!r}")
        subject = event_subject(self._mesh, activity.answer or _ANSWERED)
        headers = {MESSAGE_ID: f"answer-{request}", CAUSATION_ID: str(request)}
        self._waiting.append(self._delivery(subject, answer.encode(), headers))

    def _delivery(self, subject: str, data: bytes, headers: Mapping[str, str]) -> Delivery:
        self._sequence += 1
        return Delivery(subject, data, headers, headers[MESSAGE_ID], "TEST", self._sequence, 1, datetime.now(UTC))


class Crash(NamedTuple):
    """The worker dies at commit number `commit`, from 0, right before it or right after it."""

    commit: int
    after: bool


class Crashed(BaseException):
    """The worker has died: none of its code may handle this."""


class MortalWorker:
    """A worker of flows that may die at one of its commits: right before it, or right after it, before the answer.

    Its connections count the commits: the end of a transaction, and each primitive of the ledger that is one by itself.
    Where it dies, its connection breaks, as that of a killed process does, and it gets no other.
    """

    def __init__(self, crash: Crash | None = None) -> None:
        self.commits: list[str] = []  # the primitive that each one ended
        self.dead = False
        self._crash = crash

    @asynccontextmanager
    async def pool(self, url: str) -> AsyncIterator[Pool]:
        """Open its pool, with the settings of a worker's."""
        pool = await open_pool(
            url,
            name="postroom-worker jobs",
            connections=2,
            on_connect=self._employ,
            connection_class=_Mortal,
            setup=self._admit,
        )
        try:
            yield pool
        finally:
            await close_pool(pool)

    def at_a_commit(self, primitive: str) -> Crash | None:
        """Count a commit; return how the worker dies there, None where it does not."""
        self.commits.append(primitive)
        crash = self._crash
        return crash if crash is not None and crash.commit == len(self.commits) - 1 else None

    async def _employ(self, connection: Any) -> None:
        connection.worker = self

    async def _admit(self, _connection: Any) -> None:
        if self.dead:
            raise Crashed


class _Mortal(asyncpg.Connection):  # it takes no argument when it runs
    worker: MortalWorker
    primitive = ""  # the last one

    async def execute(self, query: str, *args: Any, **more: Any) -> str:
        ending = super().execute(query, *args, **more)
        return await (self._commit(ending) if query == _COMMIT else ending)

    async def fetchrow(self, query: str, *args: Any, **more: Any) -> Any:
        calling = super().fetchrow(query, *args, **more)
        if query not in _PRIMITIVES:
            return await calling
        self.primitive = _PRIMITIVES[query]
        return await (calling if self.is_in_transaction() else self._commit(calling))

    async def _commit(self, committing: Coroutine[Any, Any, _T]) -> _T:
        crash = self.worker.at_a_commit(self.primitive)
        if crash is not None and not crash.after:
            committing.close()
            self._die()
        done = await committing
        if crash is not None:
            self._die()
        return done

    def _die(self) -> None:
        self.worker.dead = True
        self.terminate()
        raise Crashed
