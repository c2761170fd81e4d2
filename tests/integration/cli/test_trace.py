"""`postroom trace` on real servers: of each fate the story is complete and right, as the databases have it.

And `postroom consumer list` and `show`, on the same servers.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from socket import create_server, gethostname
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import nats
import pytest
from aiohttp import web
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError
from support.databases import create
from support.handlers import Call, serving
from support.mailroom import MESH, LoneDaemon, Mailroom, Process, worker
from support.terminal import Terminal
from support.waiting import wait_until
from support.zygote import shared

from embedded import EmbeddedNats, EmbeddedPostgres, EmbeddedRedis
from embedded.processes import tethered
from postroom import Client, SendRequest
from postroom._wire.spark import SparkTask
from postroom.errors import Problem

EXAMPLES = Path(__file__).parents[3] / "examples"
FLOW = """
from postroom.flow import Flow, Spawn

flow = Flow("levels")

@flow.activity
async def first(ctx, request):
    return [second.spawn({"part": part}) for part in range(2)]

@flow.activity
async def second(ctx, request):
    return [third.spawn(request)]

@flow.activity
async def third(ctx, request):
    return None
"""
AGENTS = """
from postroom.agent import Agent, Command, Emit


class Runner(Agent[int]):
    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    def initial_state(self):
        return 0

    def apply(self, state, event):
        return state + 1


class Starter(Runner):
    async def receive(self, envelope):
        return Command(agent="finisher", verb="finish", payload={})


class Finisher(Runner):
    async def receive(self, envelope):
        return Emit("finished", {})
"""
Step = dict[str, Any]


class Office:
    """A broker with NATS, a daemon with an inbox, and an operator; a worker and the rest as tests need them."""

    def __init__(self, room: Mailroom, nats_url: str, database: str) -> None:
        self.room = room
        self.nats_url = nats_url
        self.database = database
        self.directory = room.directory
        self.user = self.at(room.socket)

    def at(self, socket: Path | None, **environment: str) -> Terminal:
        """An administrator at the daemon of a socket."""
        reach = {
            "POSTROOM_BROKER_URL": self.room.broker_urls[0],
            "POSTROOM_ADMIN_TOKEN_FILE": str(self.directory / "admin.token"),
            "POSTROOM_MESH": MESH,
        }
        return Terminal(socket, **{**reach, **environment})

    def send(self, name: str, to: str = "topic:orders", *, body: str = "{}", user: Terminal | None = None) -> None:
        sent = (user or self.user).run("send", to, body, "--id", name)
        assert sent.code == 0, sent.err

    def story(self, name: str, user: Terminal | None = None) -> dict[str, Any]:
        found = (user or self.user).run("trace", name, "--json")
        assert found.code == 0, found.err
        (story,) = found.json
        assert story.get("unread", []) == [], story
        return dict(story)

    def steps(self, name: str, what: str, user: Terminal | None = None) -> list[Step]:
        return [step for step in self.story(name, user)["steps"] if step["what"] == what]

    def until_told(self, name: str, what: str, outcome: str = "done", user: Terminal | None = None) -> Step:
        """Wait until a story has such a step; return the first."""
        found: list[Step] = []

        def told() -> bool:
            run = (user or self.user).run("trace", name, "--json")
            steps = run.json[0]["steps"] if run.code == 0 else []
            found[:] = [one for one in steps if (one["what"], one["outcome"]) == (what, outcome)]
            return bool(found)

        wait_until(told)
        return found[0]

    def fetch(self, query: str, *values: Any) -> list[Any]:
        """Ask the database."""

        async def run() -> list[Any]:
            connection = await asyncpg.connect(self.database)
            try:
                return list(await connection.fetch(query, *values))
            finally:
                await connection.close()

        return _run(run())


def _run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


def parents(story: dict[str, Any], step: Step) -> list[str]:
    """Return what a step follows from, the nearest first."""
    by_id = {one["id"]: one for one in story["steps"]}
    line = []
    while (step := by_id.get(step.get("parent", ""), {})) != {}:
        line.append(step["what"])
    return line


@pytest.fixture(scope="module")
def office(
    session_directory: Path, postgres_server: EmbeddedPostgres, redis_server: EmbeddedRedis, nats_server: EmbeddedNats
) -> Iterator[Office]:
    directory = session_directory / "trace"
    directory.mkdir(mode=0o711)
    _run(create(postgres_server, "trace"))
    database = postgres_server.url_of("trace")
    room = Mailroom(directory, database, redis_server.url, brokers=2, zygote=shared())
    room.brokers[0].settle({"POSTROOM_BROKER_NATS_URL": nats_server.url})
    room.brokers[1].settle({"POSTROOM_BROKER_LIMITER_PER_MEMBER": 1, "POSTROOM_BROKER_LIMITER_WINDOW_SECONDS": 3600})
    room.daemon.settle({"POSTROOM_DAEMON_NATS_URL": nats_server.url})
    _run(room.open())
    office = Office(room, nats_server.url, database)
    assert office.user.run("queue", "create", "extract").code == 0
    yield office
    room.close()
    _run(_forget(nats_server.url))


async def _forget(url: str) -> None:
    """Remove the mesh's streams: other tests have a mesh of that name."""
    connection = await nats.connect(url)
    for kind in ("EVENTS", "COMMANDS", "INBOX", "DLQ"):
        with suppress(NotFoundError):
            await connection.jetstream().delete_stream(f"{MESH.upper()}_{kind}")
    await connection.close()


@pytest.fixture(scope="module")
def working(office: Office) -> Iterator[Office]:
    """With a worker that publishes and runs two flows."""
    (office.directory / "levels.py").write_text(FLOW)
    settings = {
        "POSTROOM_WORKER_DATABASE_URL": office.database,
        "POSTROOM_WORKER_NATS_URL": office.nats_url,
        "POSTROOM_WORKER_FLOWS": "levels:flow,nightly_export:flow",
        "POSTROOM_WORKER_JOBS_CHECK_SECONDS": "0.05",
        "PYTHONPATH": f"{EXAMPLES}:{office.directory}",
    }
    with worker(**settings):
        yield office


@contextmanager
def consuming(office: Office, durable: str, url: str, event: str = "orders", **more: float) -> Iterator[None]:
    """Run a consumer of an event, which tries each message again after ten minutes, for the length of the block."""
    settings = {
        "CONTEXT": MESH,
        "DATABASE_URL": office.database,
        "NATS_URL": office.nats_url,
        "CONSUMER_STREAM": f"{MESH.upper()}_EVENTS",
        "CONSUMER_DURABLE": durable,
        "CONSUMER_FILTER_SUBJECTS": f"{MESH}.event.{event}.v1",
        "CONSUMER_BACKOFF_FIRST_SECONDS": 600,
        "CONSUMER_BACKOFF_MOST_SECONDS": 600,
        "HANDLER_URL": url,
        **more,
    }
    place = office.directory / durable
    place.mkdir()
    variables = {f"POSTROOM_CONSUMER_{name}": value for name, value in settings.items()}
    process = Process(place, "postroom.worker", variables, "consumer", zygote=shared())
    process.start()
    yield
    process.kill()


@pytest.fixture(scope="module")
def consumer(working: Office) -> Iterator[Office]:
    """With a consumer `counting`, whose handler fails as the body of a message says, until the message is replayed."""
    with handler(_judge) as url, consuming(working, "counting", url):
        yield working


def _judge(call: Call) -> web.StreamResponse:
    if b"fails" in call.body:
        return web.Response(status=500, text="no disk")
    return web.Response(status=422 if b"poison" in call.body and "~" not in call.request.message_id else 200)


@contextmanager
def handler(answer: Callable[[Call], web.StreamResponse]) -> Iterator[str]:
    """Serve a handler in a thread for the length of the block."""
    loop, listening = asyncio.new_event_loop(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with serving(answer) as running:
            urls.append(running.url)
            listening.set()
            await asyncio.Event().wait()

    task = loop.create_task(serve())
    task.add_done_callback(lambda _: loop.stop())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    listening.wait()
    yield urls[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


def test_what_no_worker_publishes_waits_for_one(office: Office) -> None:
    office.send("unpublished")
    office.until_told("unpublished", "accepted")
    story = office.story("unpublished")
    published = {step["thing"]: step for step in story["steps"] if step["what"] == "published"}
    ((id_,),) = office.fetch("SELECT broker_message_id FROM mesh.topic_message WHERE client_message_id = 'unpublished'")
    assert published.keys() == {str(id_), f"{id_}.alice"}
    assert {step["outcome"] for step in published.values()} == {"waiting"}
    assert {wait["step"] for wait in story["waits"]} == {step["id"] for step in published.values()}
    assert {wait["help"] for wait in story["waits"]} == {"postroom worker backlog"}


def test_what_the_broker_refuses_is_dead_and_says_in_which_phase_and_what_helps(office: Office) -> None:
    office.send("refused", "topic:nowhere")
    posted = office.until_told("refused", "posted", "dead")
    assert posted["reason"].startswith("refused in B2: topic_not_found")
    story = office.story("refused")
    assert [step["what"] for step in story["steps"]] == ["kept", "posted"]
    (wait,) = story["waits"]
    for command in wait["help"].split(" && "):
        pasted = office.user.run(*shlex.split(command)[1:], *(["--yes"] if "requeue" in command else []))
        assert pasted.code == 0, pasted.err
    assert office.user.run("topic", "delete", "nowhere", "--yes").code == 0


def test_a_row_that_died_on_a_daemon_is_told_of_on_every_host(office: Office) -> None:
    office.send("far-away", "topic:nowhere")
    elsewhere = office.at(None)  # a host without a daemon
    office.until_told("far-away", "kept", "dead", elsewhere)
    here, there = office.story("far-away"), office.story("far-away", elsewhere)
    (wait,), (wait_there,) = here["waits"], there["waits"]
    assert wait_there["why"].startswith(f"it died on {gethostname()}")
    assert wait_there["help"] == f"{wait['help']}  # on {gethostname()}"
    assert {step["id"]: step["outcome"] for step in there["steps"]} == {
        step["id"]: step["outcome"] for step in here["steps"]
    }
    row = there["steps"][0]["thing"]
    assert office.user.run("outbox", "abort", row, "--yes", "--reason", "not needed").code == 0
    office.until_told(row, "abort", "ended", elsewhere)
    assert office.story(row, elsewhere)["waits"] == []
    ((report,),) = office.fetch("SELECT report FROM mesh.ended_row WHERE row_id = $1", row)
    assert json.loads(report)["row"] == office.user.run("outbox", "inspect", row, "--json").json[0]["row"]


def test_what_died_while_the_broker_was_away_is_reported_when_it_is_back(office: Office, short_directory: Path) -> None:
    daemon = LoneDaemon(short_directory, zygote=shared())
    _run(daemon.start())
    try:
        user = office.at(daemon.socket)
        office.send("retired", user=user)
        assert user.run("outbox", "abort", "retired", "--yes", "--reason", "nobody wants it").code == 0
        reach = {"BROKER_URL": office.room.broker_urls[0], "BROKER_TOKEN_FILE": office.directory / "alice.token"}
        daemon.process.kill()
        daemon.process.settle({f"POSTROOM_DAEMON_{name}": value for name, value in reach.items()})
        _run(daemon.restart())
        office.until_told("retired", "abort", "ended", office.at(None))
    finally:
        daemon.stop()


def test_a_row_that_was_requeued_twice_is_one_story_under_each_of_its_ids(office: Office) -> None:
    office.send("again-1", "topic:elsewhere")
    office.until_told("again-1", "posted", "dead")
    requeue = ("outbox", "requeue", "again-1", "--new-client-id", "again-2", "--yes", "--reason")
    assert office.user.run(*requeue, "it was down").code == 0
    wait_until(lambda: office.user.run("outbox", "inspect", "again-2", "--json").json[0]["row"]["status"] == "dead")
    assert office.user.run("topic", "create", "elsewhere").code == 0
    assert office.user.run("topic", "subscribe", "elsewhere", "alice").code == 0
    requeue = ("outbox", "requeue", "again-2", "--new-client-id", "again-3", "--yes", "--reason", "it is there")
    assert office.user.run(*requeue).code == 0
    office.until_told("again-1", "accepted")
    chain = office.user.run("outbox", "inspect", "again-2", "--json").json[0]
    for name in ("again-1", "again-3", *(row["id"] for row in chain["chain"])):
        story = office.story(name)
        kept = [step for step in story["steps"] if step["what"] == "kept"]
        assert [step["thing"] for step in kept] == [row["id"] for row in chain["chain"]]
        assert [step["outcome"] for step in kept] == ["ended", "ended", "done"]
        acts = [step for step in story["steps"] if step["what"] == "requeue"]
        assert [step["reason"].split(";")[0] for step in acts] == ["it was down", "it is there"]
        assert all(step["by"] == line["actor"] for step, line in zip(acts, chain["log"], strict=True))
        (accepted,) = [step for step in story["steps"] if step["what"] == "accepted"]
        assert accepted["ids"]["client_message_id"] == "again-3"
        assert parents(story, accepted) == ["posted", "kept", "requeue", "kept", "requeue", "kept"]


def test_what_cannot_reach_a_broker_waits_for_it_and_an_operator_may_hold_it(
    office: Office, short_directory: Path
) -> None:
    daemon = LoneDaemon(short_directory, zygote=shared())
    _run(daemon.start())
    try:
        user = office.at(daemon.socket)
        office.send("waits", user=user)
        wait_until(lambda: office.story("waits", user)["waits"][0].get("help") == "postroom doctor")
        assert user.run("outbox", "hold", "waits", "--yes", "--reason", "not yet").code == 0
        (wait,) = office.story("waits", user)["waits"]
        (kept,) = office.steps("waits", "kept", user)
        assert wait["help"] == f"postroom outbox release {kept['thing']} --reason 'it may go'"
        (held,) = office.steps("waits", "hold", user)
        assert (held["reason"], held["by"].startswith("uid ")) == ("not yet", True)
    finally:
        daemon.stop()


def test_what_is_rate_limited_says_so_and_when_it_is_posted_again(office: Office, short_directory: Path) -> None:
    token = office.directory / "alice.token"
    daemon = LoneDaemon(
        short_directory, zygote=shared(), BROKER_URL=office.room.broker_urls[1], BROKER_TOKEN_FILE=token
    )
    _run(daemon.start())
    try:
        user = office.at(daemon.socket)
        for name in ("limited-1", "limited-2", "limited-3"):
            office.send(name, user=user)
        wait_until(
            lambda: any(
                "refused in B1: rate_limited" in step.get("reason", "")
                for step in office.steps("limited-3", "posted", user)
            )
        )
        (wait,) = office.story("limited-3", user)["waits"]
        assert wait["step"] == office.steps("limited-3", "kept", user)[0]["id"]
    finally:
        daemon.stop()


def test_a_message_that_was_delivered_has_every_step_and_waits_for_nothing(consumer: Office) -> None:
    office = consumer
    office.send("delivered")
    office.until_told("delivered", "handled")
    office.until_told("delivered", "received")
    wait_until(lambda: not office.story("delivered").get("waits"))
    story = office.story("delivered")
    what = [step["what"] for step in story["steps"]]
    assert what[:3] == ["kept", "posted", "accepted"]
    assert {"published", "handled", "received"} <= set(what)
    assert {step["outcome"] for step in story["steps"]} == {"done"}
    ((id_, history_id),) = office.fetch(
        "SELECT broker_message_id, history_id FROM mesh.topic_message WHERE client_message_id = 'delivered'"
    )
    (accepted,) = office.steps("delivered", "accepted")
    assert (accepted["thing"], accepted["ids"]["history_id"]) == (str(id_), str(history_id))
    ((stream, sequence, at),) = office.fetch(
        "SELECT stream, stream_sequence, published_at FROM postroom.outbox_events WHERE id = $1", id_
    )
    (event,) = [step for step in story["steps"] if step["id"] == f"event:{id_}"]
    assert (event["place"], event["at"]) == (f"{stream} #{sequence}", at.isoformat().replace("+00:00", "Z"))
    ((attempts, processed_at),) = office.fetch(
        "SELECT attempts, processed_at FROM postroom.inbox_messages WHERE message_id = $1", str(id_)
    )
    (handled,) = office.steps("delivered", "handled")
    assert (handled["attempt"], handled["place"]) == (attempts, "counting")
    assert handled["at"] == processed_at.isoformat().replace("+00:00", "Z")
    assert parents(story, handled) == ["published", "accepted", "posted", "kept"]
    row = office.user.run("outbox", "inspect", "delivered", "--json").json[0]["row"]["id"]
    for name in (str(id_), row, f"{id_}.alice", f"{id_}/1"):
        assert {step["id"] for step in office.story(name)["steps"]} == {step["id"] for step in story["steps"]}, name


def test_a_message_that_spark_wrote_begins_with_its_row_on_every_host(office: Office) -> None:
    name = "f2e9b47b905df4bc:17"  # as the writer makes them: tests/unit/postroom/test_sink_rows.py
    office.send(name)
    office.until_told(name, "accepted")
    for user in (office.user, office.at(None)):
        story = office.story(name, user)
        (accepted,) = [step for step in story["steps"] if step["what"] == "accepted"]
        assert (story["steps"][0]["what"], parents(story, accepted)[-1]) == ("written", "written")
        assert story["steps"][0]["reason"].startswith("the row 17 ")


def test_a_message_that_spark_wrote_for_a_job_follows_from_that_on_every_host(working: Office) -> None:
    job = uuid4()
    started = working.user.run("jobs", "start", "levels", "--first", "first", "--job", str(job), "--request", "{}")
    assert started.code == 0, started.err
    task = SparkTask("job", job.int, 2)
    with Client(working.room.socket) as client:
        row = SendRequest(to="topic:orders", body="{}", client_message_id="f2e9b47b905df4bc:18")
        (sent,) = client.send_many([row], traceparent=task.traceparent)
    assert sent.result is not None
    working.until_told("f2e9b47b905df4bc:18", "accepted")
    for user in (working.user, working.at(None)):
        story = working.story("f2e9b47b905df4bc:18", user)
        (accepted,) = [step for step in story["steps"] if step["what"] == "accepted"]
        assert parents(story, accepted)[-2:] == ["written", "job"]
        (written,) = [step for step in story["steps"] if step["what"] == "written"]
        assert written["reason"] == f"the row 18, by the partition 2 of the job {job}"
        assert [step["thing"] for step in story["steps"] if step["what"] == "job"] == [str(job)]


def test_a_message_that_its_handler_fails_waits_for_the_next_attempt(consumer: Office) -> None:
    consumer.send("failing", body='{"what": "fails"}')
    handled = consumer.until_told("failing", "handled", "waiting")
    assert handled["attempt"] == 1
    wait_until(lambda: "http_500" in consumer.steps("failing", "handled")[0].get("reason", ""))
    (wait,) = [wait for wait in consumer.story("failing")["waits"] if wait["step"] == handled["id"]]
    assert wait["help"] == "postroom consumer show counting --mesh demo"


def test_a_message_that_died_at_a_consumer_is_followed_by_its_replay(consumer: Office) -> None:
    office = consumer
    office.send("poisonous", body='{"what": "poison"}')
    buried = office.until_told("poisonous", "buried", "dead")
    waits = {wait["step"]: wait for wait in office.story("poisonous")["waits"]}
    help_ = shlex.split(waits[buried["id"]]["help"])
    assert help_[:4] == ["postroom", "dlq", "replay", buried["thing"]]
    assert parents(office.story("poisonous"), buried)[:2] == ["handled", "published"]
    ((settled_by,),) = office.fetch("SELECT settled_by FROM postroom.dead_letters WHERE id = $1", int(buried["thing"]))
    assert settled_by is None
    replay = office.user.run(*help_[1:], "--yes")
    assert replay.code == 0, replay.err
    replayed = office.until_told("poisonous", "replayed")
    assert (replayed["by"], replayed["reason"]) == ("administrator", "its cause is repaired")
    wait_until(lambda: [step["outcome"] for step in office.steps("poisonous", "handled")] == ["dead", "done"])
    story = office.story("poisonous")
    again = [step for step in story["steps"] if step["what"] == "handled"][1]
    assert again["thing"] == replayed["thing"]
    assert parents(story, again)[:3] == ["replayed", "buried", "handled"]
    for name in (again["thing"], buried["thing"], f"dead:counting:{again['thing'].partition('~')[0]}"):
        assert {step["id"] for step in office.story(name)["steps"]} == {step["id"] for step in story["steps"]}, name


def declare(office: Office, durable: str, stream: str = "EVENTS", subject: str = "event.orders.v1") -> None:
    """Make a consumer, of the orders by default, that no program runs."""

    async def work() -> None:
        connection = await nats.connect(office.nats_url)
        config = ConsumerConfig(
            durable_name=durable, ack_policy=AckPolicy.EXPLICIT, filter_subjects=[f"{MESH}.{subject}"]
        )
        await connection.jetstream().add_consumer(f"{MESH.upper()}_{stream}", config)
        await connection.close()

    _run(work())


def undeclare(office: Office, durable: str) -> None:
    async def work() -> None:
        connection = await nats.connect(office.nats_url)
        await connection.jetstream().delete_consumer(f"{MESH.upper()}_EVENTS", durable)
        await connection.close()

    _run(work())


def test_a_consumer_that_is_down_is_named_with_what_it_has_yet_to_take(consumer: Office) -> None:
    declare(consumer, "sleepy")
    consumer.send("asleep")
    taken = consumer.until_told("asleep", "taken", "waiting")
    assert taken["place"] == "sleepy"
    (wait,) = [wait for wait in consumer.story("asleep")["waits"] if wait["step"] == taken["id"]]
    assert "does not ask for them" in wait["why"]
    assert wait["help"] == "postroom consumer show sleepy --mesh demo"

    consumer.send("waiting", body='{"what": "fails"}')
    handled = consumer.until_told("waiting", "handled", "waiting")
    for name in ("sleepy", "counting"):
        assert consumer.user.run("consumer", "pause", name, "--reason", "it does harm").code == 0
    waits = {wait["step"]: wait for story in ("asleep", "waiting") for wait in consumer.story(story)["waits"]}
    for step, name in ((taken["id"], "sleepy"), (handled["id"], "counting")):
        assert waits[step]["why"].endswith("; paused by administrator because: it does harm")
        assert (
            waits[step]["help"] == f"postroom consumer resume DEMO_EVENTS/{name} --reason 'it was paused' --mesh demo"
        )
        assert consumer.user.shell(waits[step]["help"]).code == 0
    (wait,) = consumer.story("asleep")["waits"]
    assert (wait["help"], "paused by" in wait["why"]) == ("postroom consumer show sleepy --mesh demo", False)


def test_what_a_message_caused_and_what_caused_it_is_in_its_story(consumer: Office) -> None:
    office = consumer
    office.send("cause")
    cause = office.until_told("cause", "accepted")["thing"]
    sent = office.user.run("send", "topic:orders", "{}", "--id", "effect", "--meta", f"causation_id={cause}")
    assert sent.code == 0, sent.err
    office.until_told("effect", "accepted")
    for name in ("cause", "effect"):
        story = office.story(name)
        accepted = {step["ids"]["client_message_id"]: step for step in story["steps"] if step["what"] == "accepted"}
        assert accepted.keys() == {"cause", "effect"}, name
    assert {step["ids"]["client_message_id"] for step in office.steps("cause", "kept")} == {"cause", "effect"}


def test_a_job_is_told_with_all_its_levels(working: Office) -> None:
    job = str(uuid4())
    started = working.user.run("jobs", "start", "levels", "--first", "first", "--job", job, "--request", "{}")
    assert started.code == 0, started.err
    working.until_told(job, "job")
    story = working.story(job)
    assert story["waits"] == []
    tree = working.user.run("jobs", "show", job, "--json").json[0]["activities"]
    told = {step["thing"]: step for step in story["steps"] if step["what"] == "activity"}
    assert told.keys() == {activity["id"] for activity in tree}
    for activity in tree:
        step = told[activity["id"]]
        assert step["parent"] == (f"activity:{activity['parent']}" if activity["parent"] else f"job:{job}")
        assert (step["outcome"], step["place"]) == ("done", activity["name"])
    assert sorted(step["place"] for step in told.values()) == ["first", "second", "second", "third", "third"]


def test_a_request_that_an_agent_took_and_answered_is_told_from_both_ends(working: Office, tmp_path: Path) -> None:
    job = str(uuid4())
    request = '{"day": "2026-01-31", "parts": 1}'
    started = working.user.run(
        "jobs", "start", "nightly-export", "--first", "extract", "--job", job, "--request", request
    )
    assert started.code == 0, started.err
    working.until_told(job, "asked", "waiting")
    wait_until(lambda: any("no consumer takes cmd." in wait["why"] for wait in working.story(job)["waits"]))
    settings = {
        "POSTROOM_AGENT_NATS_URL": working.nats_url,
        "POSTROOM_AGENT_TENANT": MESH,
        "POSTROOM_AGENT_STATE_DIRECTORY": str(tmp_path),
        "PYTHONPATH": str(EXAMPLES),
    }
    agent = Process(tmp_path, "postroom.worker", settings, "agent", "nightly_export:Extract", zygote=shared())
    agent.start()
    try:
        working.until_told(job, "job")
    finally:
        agent.kill()
    (asked,) = working.steps(job, "asked")
    ((answered_by,),) = working.fetch("SELECT answered_by FROM ledger.request WHERE id = $1", UUID(asked["thing"]))
    for name in (asked["thing"], answered_by):
        story = working.story(name)
        (answered,) = [step for step in story["steps"] if step["what"] == "answered"]
        assert (answered["thing"], answered["outcome"]) == (answered_by, "done")
        assert parents(story, answered) == ["asked", "activity", "job"]
        (taken,) = [step for step in story["steps"] if step["what"] == "taken"]
        assert (taken["place"], taken["outcome"]) == ("extract_consumer", "done")
        assert "it does not run" in taken["reason"]
        assert f"`postroom agent trace --message {asked['thing']}`" in taken["reason"]
        assert parents(story, taken)[:2] == ["published", "asked"]
    told = working.at(None, **settings).process(
        "agent", "trace", "nightly_export:Extract", "--message", asked["thing"], "--json"
    )
    assert told.code == 0, told.err
    assert [step["thing"] for step in told.json[0]["steps"] if step["what"] == "emitted"] == [answered_by]


def test_what_an_agent_emitted_is_told_on_any_host_with_what_caused_it(working: Office, tmp_path: Path) -> None:
    """The agent's store is on its host; that a consumer took what it emitted, and who caused that, Postgres knows."""
    assert working.user.run("queue", "create", "counter").code == 0
    settings = {
        "POSTROOM_AGENT_NATS_URL": working.nats_url,
        "POSTROOM_AGENT_TENANT": MESH,
        "POSTROOM_AGENT_STATE_DIRECTORY": str(tmp_path),
        "PYTHONPATH": str(EXAMPLES),
    }
    agent = Process(tmp_path, "postroom.worker", settings, "agent", "counting_agent:Counter", zygote=shared())
    elsewhere = working.at(None)
    with handler(_judge) as url, consuming(working, "counted", url, "command_counted"):
        agent.start()
        try:
            working.send("count-me", "queue:counter")
            working.until_told("count-me", "accepted", user=elsewhere)

            def ended() -> set[tuple[str | None, str]]:
                steps = working.story("count-me", elsewhere)["steps"]
                return {(step.get("place"), step["outcome"]) for step in steps}

            wait_until(lambda: ("counted", "done") in ended())
        finally:
            agent.kill()
    story = working.story("count-me", elsewhere)
    (emitted,) = [step for step in story["steps"] if step["what"] == "emitted"]
    (handled,) = [step for step in story["steps"] if step["what"] == "handled"]
    assert (handled["thing"], handled["place"]) == (emitted["thing"], "counted")
    assert parents(story, handled)[:2] == ["emitted", "accepted"]
    assert (story["waits"], emitted["place"]) == ([], f"{MESH}.event.command_counted.v1")
    backwards = working.story(emitted["thing"], elsewhere)
    (accepted,) = [step for step in backwards["steps"] if step["what"] == "accepted"]
    assert accepted["ids"]["client_message_id"] == "count-me"
    (again,) = [step for step in backwards["steps"] if step["what"] == "handled"]
    assert parents(backwards, again)[:2] == ["emitted", "accepted"]


def test_what_one_agent_sent_to_another_is_joined_from_both_ends_while_they_run(
    working: Office, tmp_path: Path
) -> None:
    """No database knows it: the agents are asked, each for what is in its store."""
    agents: dict[str, Process] = {}
    (tmp_path / "relay_race.py").write_text(AGENTS)
    assert working.user.run("queue", "create", "starter").code == 0
    with ExitStack() as running:
        for name in ("Starter", "Finisher"):
            settings = {
                "POSTROOM_AGENT_NATS_URL": working.nats_url,
                "POSTROOM_AGENT_TENANT": MESH,
                "POSTROOM_AGENT_STATE_DIRECTORY": str(tmp_path / name),
                "PYTHONPATH": str(tmp_path),
            }
            (tmp_path / name).mkdir()
            agent = Process(
                tmp_path / name, "postroom.worker", settings, "agent", f"relay_race:{name}", zygote=shared()
            )
            agent.start()
            running.callback(agent.kill)
            agents[name] = agent
        elsewhere = working.at(None)
        working.send("race", "queue:starter")
        working.until_told("race", "accepted", user=elsewhere)
        wait_until(lambda: [step["what"] for step in working.story("race", elsewhere)["steps"]].count("emitted") == 2)
        story = working.story("race", elsewhere)
        last = [step for step in story["steps"] if step["what"] == "emitted"][-1]
        (accepted,) = [step for step in story["steps"] if step["what"] == "accepted"]
        chain = ["handled", "published", "emitted", "handled", "published", "accepted"]
        assert parents(story, last)[: len(chain)] == chain
        places = [step["place"] for step in story["steps"] if step["what"] == "handled"]
        assert places == ["starter_consumer", "finisher_consumer"]
        for step in [step for step in story["steps"] if step["what"] == "emitted"]:
            backwards = working.story(step["thing"], elsewhere)
            (again,) = [one for one in backwards["steps"] if one["thing"] == step["thing"] and one["what"] == "emitted"]
            assert "accepted" in parents(backwards, again), backwards
            assert accepted["thing"] in {one["thing"] for one in backwards["steps"]}
        agents["Starter"].kill()
        half = elsewhere.run("trace", last["thing"], "--json")
        (problem,) = half.json[0]["unread"]
        assert "starter_consumer" in problem["detail"]
    stopped = elsewhere.run("trace", last["thing"])
    assert stopped.code == 3
    assert "starter_consumer" in stopped.sentence()
    assert f"`postroom agent trace --message {last['thing']}` on its host" in stopped.sentence()


def test_a_member_is_told_of_what_it_may_read_and_an_admin_of_its_mesh_alone(consumer: Office) -> None:
    office = consumer
    files = {}
    assert office.user.run("mesh", "create", "other").code == 0
    for mesh, name, role in ((MESH, "bob", []), (MESH, "ada", ["--admin"]), ("other", "otto", ["--admin"])):
        created = office.user.run("member", "create", name, *role, "--mesh", mesh, "--json")
        assert created.code == 0, created.err
        files[name] = office.directory / f"{name}.token"
        files[name].touch(mode=0o600)
        files[name].write_text(created.json[0]["token"])
    office.send("private", body='{"what": "poison"}')
    office.until_told("private", "buried", "dead")
    told = {
        name: office.at(office.directory / "nobody.sock", POSTROOM_ADMIN_TOKEN_FILE=str(file)).run(
            "trace", "private", "--json"
        )
        for name, file in {**files, "alice": office.directory / "alice.token"}.items()
    }
    assert [told["bob"].code, told["otto"].code] != [0, 0]
    seen = {name: {step["what"] for step in told[name].json[0]["steps"]} for name in ("alice", "ada")}
    assert seen == {"alice": {"accepted", "published"}, "ada": seen["ada"]}
    assert {"handled", "buried"} <= seen["ada"]
    letter = office.steps("private", "buried")[0]["thing"]
    assert office.at(None, POSTROOM_ADMIN_TOKEN_FILE=str(files["otto"])).run("trace", letter, "--json").code != 0


def test_an_empty_id_is_a_mistake_of_the_command_line(office: Office) -> None:
    empty = office.user.run("trace", "")
    assert (empty.code, "HTTP" in empty.sentence(), "the id is empty" in empty.sentence()) == (2, False, True)


def test_an_unknown_id_is_exit_code_3(office: Office) -> None:
    for name in ("never-sent", str(uuid4()), "12345678", "dead:x:y", "é"):
        assert office.user.run("trace", name).code == 3, name


def test_where_a_part_cannot_be_asked_it_does_not_say_that_nothing_waits(office: Office, unused_tcp_port: int) -> None:
    office.send("half-known")
    office.until_told("half-known", "accepted")
    assert office.user.run("trace", "half-known").out.startswith("waits: ")  # for a worker, says the broker
    unreachable = office.at(office.room.socket, POSTROOM_BROKER_URL=f"http://127.0.0.1:{unused_tcp_port}")
    for user in (unreachable, office.at(office.room.socket, POSTROOM_BROKER_URL="")):
        told = user.run("trace", "half-known")
        assert (told.code, told.out.splitlines()[0]) == (0, "nothing waits, as far as could be asked"), told
        assert told.err


def test_a_terminal_of_80_columns_shows_ids_whole_and_what_waits_first(consumer: Office) -> None:
    consumer.send("narrow", body='{"what": "poison"}')
    consumer.until_told("narrow", "buried", "dead")
    shown = consumer.user.at_a_terminal("trace", "narrow", COLUMNS="80", NO_COLOR="1").out.splitlines()
    assert max(map(len, shown)) <= 80
    steps = consumer.story("narrow")["steps"]
    assert all(any(step["thing"] in line for line in shown) for step in steps)
    assert shown[0].startswith("waits: ")


def test_following_shows_each_change_and_ends_when_only_an_operator_can_help(office: Office) -> None:
    office.send("followed", "topic:nowhere")
    command = [sys.executable, "-m", "cli", "trace", "followed", "--follow", "--json"]
    followed = subprocess.run(
        tethered(command), env=office.user.environment, capture_output=True, text=True, timeout=60, check=True
    )
    stories = [json.loads(line) for line in followed.stdout.splitlines()]
    assert len(stories) in (1, 2, 3)
    assert [step["outcome"] for step in stories[-1]["steps"]] == ["dead", "dead"]


async def test_following_waits_for_a_daemon_that_is_restarted_and_says_once_what_is_not_asked(
    short_directory: Path,
) -> None:
    problem = Problem(type="", title="", status=503, detail="it stops", code="stopping", retryable=True, retry_after=3)
    stopping = web.Response(status=503, body=msgspec.json.encode(problem), content_type="application/problem+json")

    def story(outcome: str) -> web.Response:
        step = {"id": "1", "what": "kept", "thing": "row", "outcome": outcome, "ids": {"client_message_id": "a"}}
        return web.json_response({"waits": [{"step": "1", "why": "the broker"}], "steps": [step]})

    answers = iter([story("waiting"), stopping, story("waiting"), story("dead")])

    async def trace(_: web.Request) -> web.Response:
        return next(answers)

    app, path = web.Application(), short_directory / "d.sock"
    app.add_routes([web.get("/v1/trace/a", trace)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        followed = await asyncio.to_thread(Terminal(path).process, "trace", "a", "--follow", "--json")
    finally:
        await runner.cleanup()
    assert followed.code == 0, followed
    assert [each["steps"][0]["outcome"] for each in followed.json] == ["waiting", "dead"]
    assert followed.err.splitlines() == [
        "the broker was not asked: set POSTROOM_BROKER_URL and POSTROOM_ADMIN_TOKEN_FILE"
    ]


def shown(office: Office, name: str) -> dict[str, Any]:
    (found,) = office.user.run("consumer", "show", name, "--json").json
    return dict(found)


def test_consumers_are_listed_whether_they_run_or_not(consumer: Office) -> None:
    office = consumer
    office.send("for-the-idle")
    office.until_told("for-the-idle", "handled")  # which also made the stream
    declare(office, "idle")

    async def info() -> tuple[int, int]:
        connection = await nats.connect(office.nats_url)
        stream = f"{MESH.upper()}_EVENTS"
        found = await connection.jetstream().consumer_info(stream, "idle")
        first = await connection.jetstream().get_msg(stream, subject=f"{MESH}.event.orders.v1", seq=1, next=True)
        await connection.close()
        return found.num_pending, round(first.time.timestamp())

    pending, oldest = _run(info())
    idle = shown(office, "idle")
    assert (idle["stream"], idle["filters"]) == (f"{MESH.upper()}_EVENTS", [f"{MESH}.event.orders.v1"])
    assert (idle["waiting"], idle["in_hand"], idle["asks"]) == (pending, 0, False)
    assert round(datetime.fromisoformat(idle["oldest_at"]).timestamp()) == oldest
    assert "stopped" in office.user.run("consumer", "show", "idle").out
    listed = {one["consumer"]: one for one in office.user.run("consumer", "list", "--json").json}
    assert listed["idle"] == idle
    assert {"counting"} <= {name for name, one in listed.items() if one["asks"]}
    assert any(one["stream"] == f"{MESH.upper()}_INBOX" and one["asks"] for one in listed.values())
    assert office.user.run("consumer", "list", "--json", "--mesh", "another").json == []
    assert "counting" in office.user.run("consumer", "list").out
    assert office.user.run("consumer", "show", "nobody-knows").code == 3

    why = ("--reason", "it is retired", "--yes")
    running = office.user.run("consumer", "delete", f"{MESH.upper()}_EVENTS/counting", *why)
    assert (running.code, "a program runs it now" in running.err) == (4, True)
    assert office.user.run("consumer", "delete", f"{MESH.upper()}_EVENTS/counting", "--dry-run").code == 4
    assert office.user.run("consumer", "delete", "idle", *why).out == f"{MESH.upper()}_EVENTS/idle deleted\n"
    assert office.user.run("consumer", "show", "idle").code == 3
    assert "idle" in office.user.run("log", "--at", "broker").out


def test_a_name_that_consumers_of_two_streams_have_is_asked_about_with_both(consumer: Office) -> None:
    office = consumer
    office.send("in-its-stream")
    office.until_told("in-its-stream", "received")
    declare(office, "twice")
    declare(office, "twice", "INBOX", "inbox.>")
    both = sorted(f"{MESH.upper()}_{stream}/twice" for stream in ("EVENTS", "INBOX"))
    delete = ("consumer", "delete", "twice", "--reason", "it is retired")
    asked = office.user.at_a_terminal(*delete, answer="n\n")
    assert (asked.code, f"Delete {', '.join(both)}?" in asked.out) == (1, True)
    assert [one["stream"] for one in office.user.run("consumer", "show", "twice", "--json").json] == [
        each.partition("/")[0] for each in both
    ]
    assert office.user.run(*delete[:2], both[1], *delete[3:], "--yes").out == f"{both[1]} deleted\n"
    assert f"Delete {both[0]}? [y/N]: {both[0]} deleted" in office.user.at_a_terminal(*delete, answer="y\n").out
    declare(office, "counting", "INBOX", "inbox.>")  # the other one of this name runs
    asked = office.user.at_a_terminal("consumer", "delete", "counting", *delete[3:], answer="y\n")
    assert (asked.code, "a program runs it now" in asked.out) == (1, True)
    assert f"{MESH.upper()}_INBOX/counting deleted" in asked.out


def test_a_consumer_that_has_as_much_in_hand_as_it_may_is_not_deleted_while_it_runs(consumer: Office) -> None:
    patient = {"CONSUMER_MAX_ACK_PENDING": 1, "CONSUMER_ACK_WAIT_SECONDS": 600, "HANDLER_TIMEOUT_SECONDS": 300}
    with create_server(("127.0.0.1", 0)) as slow:  # a handler that never answers
        url = f"http://127.0.0.1:{slow.getsockname()[1]}/"
        with consuming(consumer, "busy", url, **patient):
            consumer.send("much-to-do")
            wait_until(lambda: consumer.user.run("consumer", "show", "busy").code == 0)
            wait_until(lambda: shown(consumer, "busy")["in_hand"] == 1 and not shown(consumer, "busy")["asks"])
            refused = consumer.user.run("consumer", "delete", "busy", "--reason", "it is retired", "--yes")
            assert (refused.code, "a program runs it now" in refused.sentence()) == (4, True)
    undeclare(consumer, "busy")


def test_a_consumer_says_what_it_has_begun_and_why_it_pauses(consumer: Office) -> None:
    office = consumer
    consumer.send("unfinished", body='{"what": "fails"}')
    consumer.until_told("unfinished", "handled", "waiting")
    counting = shown(office, "counting")
    ((begun,),) = office.fetch(
        "SELECT count(*) FROM postroom.inbox_messages"
        " WHERE consumer = 'counting' AND processed_at IS NULL AND dead_at IS NULL"
    )
    assert counting["begun"] == begun > 0
    assert counting["in_hand"] >= begun
    assert "paused" not in counting
    with consuming(office, "lonely", "http://127.0.0.1:9/"):
        wait_until(lambda: office.user.run("consumer", "show", "lonely").code == 0)
        wait_until(lambda: "unreachable" in shown(office, "lonely").get("paused", ""))
        assert "paused: " in office.user.run("consumer", "show", "lonely").out
        delete = ("consumer", "delete", "lonely", "--reason", "it is retired", "--yes")
        wait_until(lambda: "a program runs it now" in office.user.run(*delete, "--dry-run").err)
        assert office.user.run(*delete).code == 4
    ((begun, *_),) = office.fetch("SELECT message_id FROM postroom.inbox_messages WHERE consumer = 'lonely' LIMIT 1")
    assert "lonely tries it again" in office.user.run("trace", begun).out
    undeclare(office, "lonely")
    told = office.user.run("trace", begun).out
    assert ("lonely tries it again" in told, "the consumer lonely was deleted before" in told) == (False, True)
