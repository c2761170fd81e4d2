"""Jobs as processes: the example's worker and agent, killed and stopped in the middle, do each step once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest
from support.hostile import byte_writer, odd_messages, quiet_logs
from support.jetstream import Context
from support.mailroom import worker
from support.waiting import until_so
from support.zygote import Piped

from embedded.processes import tethered
from postroom.chassis.postgres import migrate, open_rooms
from postroom.claims import DONE, Later, Outcome
from postroom.delivery.consumer import Consumer
from postroom.delivery.message import Delivery
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.flow import Context as FlowContext
from postroom.flow import Flow
from postroom.ledger import ROOMS
from postroom.ledger.engine import Engine
from postroom.ledger.primitives import Start, start_job
from postroom.worker.config import JobSettings
from postroom.worker.jobs import JobHandler, Jobs

EXAMPLES = Path(__file__).parents[3] / "examples"
MODULES = f"{EXAMPLES}:{Path(__file__).parents[2] / 'support'}"
QUICK = {
    "POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.2",
    "POSTROOM_WORKER_JOBS_CHECK_SECONDS": "0.05",
    "POSTROOM_WORKER_JOBS_LEASE_SECONDS": "2",
}
REPORTS = "SELECT payload::text FROM postroom.outbox_events WHERE event_type = 'job_completed'"


class Office:
    """A mesh of its own, whose workers and agents are processes."""

    def __init__(self, context: Context, connection: asyncpg.Connection[asyncpg.Record], url: str, nats: str) -> None:
        self.context = context
        self.connection = connection
        self.url = url
        self._nats = nats

    def worker(self, flow: str, **more: str) -> Any:
        """Run a worker with a flow for the length of a block."""
        return worker(
            POSTROOM_WORKER_DATABASE_URL=self.url,
            POSTROOM_WORKER_NATS_URL=self._nats,
            POSTROOM_WORKER_FLOWS=flow,
            PYTHONPATH=MODULES,
            **{**QUICK, **more},
        )

    @contextmanager
    def agent(self, state: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run the example's agent for the length of a block; it is killed at its end."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(EXAMPLES),
            "POSTROOM_NATS_URL": self._nats,
            "POSTROOM_MESH": self.context.name,
            "POSTROOM_AGENT_STATE_DIRECTORY": str(state),
            "POSTROOM_AGENT_ACK_WAIT_SECONDS": "2",
        }
        command = [sys.executable, "-m", "cli", "agent", "run", "nightly_export:Extract"]
        process = subprocess.Popen(tethered(command), env=environment, stderr=subprocess.DEVNULL)
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    async def start(self, flow: str, name: str, request: Any = None) -> UUID:
        """Begin a job."""
        job = uuid4()
        start = Start(job, self.context.name, flow, uuid4(), name, json.dumps(request))
        await start_job(self.connection, start)
        return job

    async def until_is(self, query: str, value: Any, *arguments: Any) -> None:
        """Wait until a query has a value."""

        async def done() -> bool:
            return bool(await self.connection.fetchval(query, *arguments) == value)

        await until_so(done)

    async def until_at_least(self, query: str, least: int) -> None:
        """Wait until a count is so high."""

        async def done() -> bool:
            return bool(await self.connection.fetchval(query) >= least)

        await until_so(done)


@pytest.fixture
async def office(nats_url: str, database_url: str) -> AsyncIterator[Office]:
    await migrate(database_url, *ROOMS)
    client = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    context = Context(client)
    await context.declare()
    connection = await asyncpg.connect(database_url)
    yield Office(context, connection, database_url, nats_url)
    await connection.close()
    await context.remove()
    await client.close()


async def test_the_example_fans_out_and_in_whoever_is_killed_on_the_way(office: Office, tmp_path: Path) -> None:
    jobs = [await office.start("nightly-export", "extract", {"day": str(day), "parts": 20}) for day in range(3)]
    with office.worker("nightly_export:flow"):
        await office.until_is("SELECT count(*) FROM ledger.request", 3)
    with office.agent(tmp_path), office.worker("nightly_export:flow") as (process, _):
        await office.until_at_least("SELECT count(*) FROM ledger.guid", 12)
        process.kill()
    with office.agent(tmp_path), office.worker("nightly_export:flow"):
        await office.until_is("SELECT count(*) FROM ledger.job WHERE state = 'completed'", 3)

    parts = await office.connection.fetch("SELECT job, part, rows FROM exported_part ORDER BY job, part")
    assert [tuple(row) for row in parts] == [(job, part, 100 + part) for job in sorted(jobs) for part in range(20)]
    reports = [json.loads(row[0])["result"] for row in await office.connection.fetch(REPORTS)]
    expected = [{"day": str(day), "parts": 20, "rows": sum(range(100, 120))} for day in range(3)]
    assert sorted(reports, key=lambda report: report["day"]) == expected


async def effects(office: Office, name: str) -> list[str]:
    query = "SELECT aggregate_id FROM postroom.outbox_events WHERE event_type = $1"
    return [row[0] for row in await office.connection.fetch(query, name)]


async def test_a_worker_that_was_stopped_past_its_lease_commits_nothing(office: Office, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    with office.worker("slow_flow:flow") as (stopped, _):
        await office.start("slow", "work", {"begun": str(begun), "go_on": str(go_on)})
        await until_so(_there(begun))
        stopped.send_signal(signal.SIGSTOP)
        begun.unlink()
        with office.worker("slow_flow:flow") as (other, _):
            await until_so(_there(begun))  # another worker has taken the step over
            go_on.touch()
            stopped.send_signal(signal.SIGCONT)
            await office.until_is("SELECT state FROM ledger.job", "completed")
            await _settled(office)
            assert await effects(office, "worked") == [str(other.pid)]
    assert len(await effects(office, "reported")) == 1


async def test_completion_runs_once_after_a_kill_right_behind_the_commit_that_closed_the_job(
    office: Office, tmp_path: Path
) -> None:
    go_on, killed = tmp_path / "go_on", tmp_path / "killed"
    go_on.touch()
    request = {"begun": str(tmp_path / "begun"), "go_on": str(go_on), "killed": str(killed)}
    job = await office.start("slow", "work", request)
    with office.worker("slow_flow:flow") as (process, _):
        await asyncio.to_thread(process.wait)
        assert process.returncode == -signal.SIGKILL
    assert await office.connection.fetchval("SELECT state FROM ledger.job") == "closed"

    with office.worker("slow_flow:flow"):
        await office.until_is("SELECT state FROM ledger.job", "completed")
        await _settled(office)
    assert await effects(office, "reported") == [str(job)]
    assert len(await effects(office, "worked")) == 1
    ledgers = await office.connection.fetch("SELECT lpad(ledger::text, 15, '0') FROM ledger.guid")
    assert [row[0] for row in ledgers] == ["000111100000001"]


async def test_a_step_that_kills_its_worker_each_time_fails_the_job_after_its_attempts(office: Office) -> None:
    await office.start("deadly", "work")
    for _ in range(2):
        with office.worker("deadly_flow:flow") as (process, _):
            await asyncio.to_thread(process.wait)
            assert process.returncode == -signal.SIGKILL
    with office.worker("deadly_flow:flow"):
        await office.until_is("SELECT state FROM ledger.job", "failed")
    error = await office.connection.fetchval("SELECT error FROM ledger.job")
    assert error == "attempt 2 of 2 of leg 2 ended without a result: its worker was killed, or lost its lease"


async def test_a_job_that_a_clock_ahead_has_dated_runs_by_a_worker_that_comes_later(
    office: Office, tmp_path: Path
) -> None:
    go_on = tmp_path / "go_on"
    go_on.touch()
    with office.worker("older_flow:older"):
        await office.start("slow", "work", {"begun": str(tmp_path / "begun"), "go_on": str(go_on)})
        await office.connection.execute("UPDATE ledger.job SET started_at = now() + interval '1 day'")
        await office.until_is("SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL", 0)
    with office.worker("slow_flow:flow"):
        await office.until_is("SELECT state FROM ledger.job", "completed")


async def test_jobs_of_a_newer_flow_get_past_a_worker_that_is_older(office: Office) -> None:
    with office.worker("older_flow:older"):
        jobs = [await office.start("deployed", "count") for _ in range(10)]
        await office.until_is("SELECT count(*) FROM ledger.set_aside", len(jobs))
        with office.worker("older_flow:newer"):
            await office.until_is("SELECT count(*) FROM ledger.job WHERE state = 'completed'", len(jobs))
    attempts = await office.connection.fetch("SELECT DISTINCT ledger / 1000000000000 FROM ledger.activity")
    assert [row[0] for row in attempts] == [1]
    assert await office.connection.fetchval("SELECT count(*) FROM ledger.set_aside") == 0


@pytest.mark.parametrize(
    ("flow", "sentence"),
    [
        ("nowhere:flow", "cannot import nowhere"),
        ("nightly_export:nothing", "there is no nothing in nightly_export"),
        ("older_flow:older,older_flow:newer", "flows: two have the same name"),
    ],
)
async def test_a_flow_that_cannot_run_ends_the_worker(office: Office, flow: str, sentence: str) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": MODULES,
        "POSTROOM_WORKER_DATABASE_URL": office.url,
        "POSTROOM_WORKER_NATS_URL": "nats://127.0.0.1:1",
        "POSTROOM_WORKER_FLOWS": flow,
    }
    worker = await Piped.start(["-m", "postroom.worker", "run"], environment)
    code, said = await worker.communicate()
    assert (code, sentence in said.decode()) == (78, True), said


def _there(file: Path) -> Callable[[], Awaitable[bool]]:
    async def there() -> bool:
        return file.exists()

    return there


async def _settled(office: Office) -> None:
    """Wait until nothing that was published waits for an ack."""
    await office.until_is("SELECT count(*) FROM postroom.outbox_events WHERE published_at IS NULL", 0)
    await office.context.settled("jobs__slow")


async def test_no_message_stops_a_flow_and_an_answer_that_postgres_refuses_is_buried(
    office: Office, nats_url: str
) -> None:
    flow = Flow("asking")

    @flow.activity(sends="queue:ask")
    async def ask(_ctx: FlowContext, request: Any) -> Any:
        return request

    @ask.answered
    async def _(_ctx: FlowContext, _answer: Any) -> None:
        pass

    pool = await open_rooms(office.url, *ROOMS, name="test", connections=6)
    jobs = Jobs(pool, NatsSettings(url=nats_url), [flow], JobSettings(check_seconds=0.05), emitted=lambda: None)
    running = asyncio.create_task(jobs.run())
    context = office.context
    context.record = office.url
    try:
        with quiet_logs():
            await office.start("asking", "ask", {})
            query = "SELECT id, payload::text FROM postroom.outbox_events WHERE event_type = 'activity_spawned'"
            (spawned,) = await office.connection.fetch(query)
            await context.publish([str(spawned[0])], spawned[1].encode(), f"{context.name}.event.activity_spawned.v1")
            await office.until_is("SELECT count(*) FROM ledger.request", 1)
            request = await office.connection.fetchval("SELECT id::text FROM ledger.request")
            answers = [b'{"a":"\\u0000"}', b'{"a":' + b"9" * 200_000 + b"}", b'"a"']
            ids = ["nul", "digits", "x" * 300]
            async with byte_writer(nats_url) as raw:
                await raw.publish(context.subject, odd_messages())
                for message_id, answer in zip(ids, answers, strict=True):
                    headers = {"Nats-Msg-Id": message_id, "X-Causation-Id": request}
                    await context.js.publish(context.subject, answer, headers=headers)
            await until_so(lambda: _buried(context, set(ids)))
            assert jobs.trouble is None
            headers = {"Nats-Msg-Id": "right", "X-Causation-Id": request}
            await context.js.publish(context.subject, b'"it"', headers=headers)
            await office.until_is("SELECT state FROM ledger.job", "completed")
    finally:
        await jobs.stop()
        await running
        await pool.close()


ASKED = "SELECT {} FROM ledger.request JOIN ledger.activity ON activity.id = activity_id WHERE job_id = $1"


class Asking:
    """The worker of a flow that asks and has an hour for each answer, whose looks a test makes itself."""

    def __init__(self, office: Office, pool: asyncpg.Pool[asyncpg.Record], nats_url: str) -> None:
        flow = Flow("asking")
        self.go_on = asyncio.Event()
        self._office = office
        self._context = office.context

        @flow.activity(sends="queue:ask", timeout=3600)
        async def ask(_ctx: FlowContext, request: Any) -> Any:
            return request

        @ask.answered
        async def _(_ctx: FlowContext, _answer: Any) -> None:
            await self.go_on.wait()

        settings = JobSettings(steps_at_once=1)
        self.jobs = Jobs(pool, NatsSettings(url=nats_url), [flow], settings, emitted=lambda: None)

    @property
    def consumer(self) -> Consumer:
        """The consumer of its flow."""
        return self.jobs.running["asking", self._context.name]

    async def look(self) -> None:
        """Begin what is missing, and ask again for what is overdue."""
        await self.jobs.look(self._context.js)

    async def ask(self) -> UUID:
        """Start a job and return its request."""
        job, context = await self._office.start("asking", "ask", {}), self._context
        query = "SELECT id, payload::text FROM postroom.outbox_events WHERE event_type = $2 AND correlation_id = $1"
        (spawned,) = await self._office.connection.fetch(query, job, "activity_spawned")
        await context.publish([str(spawned[0])], spawned[1].encode(), f"{context.name}.event.activity_spawned.v1")
        await self.look()
        await self._office.until_is(ASKED.format("count(*)"), 1, job)
        request: UUID = await self._office.connection.fetchval(ASKED.format("request.id"), job)
        return request

    async def answer(self, request: UUID) -> None:
        """Publish the answer to a request whose time is over a moment later."""
        headers = {"Nats-Msg-Id": str(uuid4()), "X-Causation-Id": str(request)}
        await self._context.js.publish(self._context.subject, b"{}", headers=headers)
        query = "UPDATE ledger.request SET due_at = now() WHERE id = $1"
        await self._office.connection.execute(query, request)

    async def close(self) -> None:
        """End its consumer."""
        await self.jobs.end(("asking", self._context.name))


@pytest.fixture
async def pool(office: Office) -> AsyncIterator[asyncpg.Pool[asyncpg.Record]]:
    async with await open_rooms(office.url, *ROOMS, name="test", connections=6) as pool:
        yield pool


STATES = "SELECT array_agg(state ORDER BY state) FROM ledger.job"


async def test_an_answer_that_came_while_no_worker_ran_keeps_its_request_in_time(
    office: Office, pool: asyncpg.Pool[asyncpg.Record], nats_url: str
) -> None:
    stopped = Asking(office, pool, nats_url)
    request = await stopped.ask()
    await stopped.close()
    await stopped.answer(request)
    await office.context.js.pause_consumer(office.context.events, "jobs__asking", "2099-01-01T00:00:00Z")

    started = Asking(office, pool, nats_url)
    started.go_on.set()
    for _ in range(2):
        await started.look()
        assert await office.connection.fetchval(STATES) == ["running"]
    await office.context.js.resume_consumer(office.context.events, "jobs__asking")
    await office.until_is(STATES, ["completed"])
    await started.close()


async def test_an_answer_that_waits_for_the_steps_of_others_keeps_its_request_in_time(
    office: Office, pool: asyncpg.Pool[asyncpg.Record], nats_url: str
) -> None:
    asking = Asking(office, pool, nats_url)
    for request in [await asking.ask(), await asking.ask()]:
        await asking.answer(request)
    await until_so(lambda: _are_in_hand(asking.consumer, 2))
    await asking.look()
    assert await office.connection.fetchval(STATES) == ["running", "running"]
    asking.go_on.set()
    await office.until_is(STATES, ["completed", "completed"])
    await asking.close()


async def test_an_event_of_another_mesh_answers_nothing(
    office: Office, pool: asyncpg.Pool[asyncpg.Record], nats_url: str
) -> None:
    asking = Asking(office, pool, nats_url)
    asking.go_on.set()
    request = await asking.ask()
    handler = JobHandler(asking.jobs.engines["asking"], asyncio.Semaphore(), lambda: None)
    settled = asyncio.Event()

    async def settle(_delivery: Delivery, outcome: Outcome) -> None:
        assert outcome == DONE
        settled.set()

    headers = {"X-Causation-Id": str(request)}
    foreign = Delivery("elsewhere.event.extracted.v1", b"{}", headers, "m-1", "S", 1, 1, datetime.now(UTC))
    await handler.handle([foreign], settle)
    assert settled.is_set()
    assert await office.connection.fetchval(STATES) == ["running"]
    await asking.answer(request)
    await office.until_is(STATES, ["completed"])
    await asking.close()


async def test_an_answer_before_its_request_is_committed_comes_again(
    office: Office, pool: asyncpg.Pool[asyncpg.Record]
) -> None:
    flow, asked, committed = Flow("hasty"), asyncio.Queue[str](), asyncio.Semaphore(0)

    @flow.activity(sends="queue:ask")
    async def ask(ctx: FlowContext, request: Any) -> Any:
        assert ctx.request_id is not None
        await asked.put(ctx.request_id)
        await committed.acquire()
        return request

    @ask.answered
    async def _(_ctx: FlowContext, cycles: Any) -> Any:
        return ask.again(None) if cycles else None

    engine = Engine(pool, flow, lease=timedelta(seconds=30))
    handler = JobHandler(engine, asyncio.Semaphore(2), lambda: None)

    async def answer(request: str, cycles: int) -> Outcome:
        outcomes = list[Outcome]()

        async def settle(_delivery: Delivery, outcome: Outcome) -> None:
            outcomes.append(outcome)

        headers = {"X-Causation-Id": request}
        said, number = str(cycles).encode(), cycles + 1
        await handler.handle(
            [Delivery(office.context.subject, said, headers, f"m-{number}", "S", number, 1, datetime.now(UTC))], settle
        )
        return outcomes[0]

    await office.start("hasty", "ask")
    root = await office.connection.fetchval("SELECT id FROM ledger.activity")
    leg = asyncio.create_task(engine.spawned(root, "ask", "spawned"))
    for cycles in (1, 0):
        request = await asked.get()
        early = await answer(request, cycles)
        assert isinstance(early, Later), f"of cycle {cycles}: {early}"
        committed.release()
        await leg
        leg = asyncio.create_task(_done(answer(request, cycles)))
    await leg
    assert await office.connection.fetchval(STATES) == ["completed"]
    stray = str(UUID(bytes=root.bytes[:8] + uuid4().bytes[8:]))
    assert await answer(stray, 5) == DONE


async def _done(handled: Awaitable[Outcome]) -> None:
    assert await handled == DONE


async def _are_in_hand(consumer: Consumer, messages: int) -> bool:
    return consumer.in_hand == messages


async def test_what_postgres_cannot_be_asked_about_comes_again_with_the_reason(office: Office) -> None:
    pool = await open_rooms(office.url, *ROOMS, name="test", connections=1)
    await pool.close()
    handler = JobHandler(Engine(pool, Flow("asking"), lease=timedelta(seconds=30)), asyncio.Semaphore(), lambda: None)
    context, outcomes = office.context, list[Outcome]()
    subjects = [context.subject, f"{context.name}.event.activity_spawned.v1"]
    batch = [
        Delivery(subject, b"{}", {"X-Causation-Id": str(uuid4())}, f"m-{number}", "S", number, 1, datetime.now(UTC))
        for number, subject in enumerate(subjects)
    ]

    async def settle(_delivery: Delivery, outcome: Outcome) -> None:
        outcomes.append(outcome)

    await handler.handle(batch, settle)
    assert [outcome.error for outcome in outcomes if isinstance(outcome, Later)] == [
        "InterfaceError: pool is closed"
    ] * 2


async def _buried(context: Context, ids: set[str]) -> bool:
    return ids <= {letter.message_id for letter in await context.letters()}
