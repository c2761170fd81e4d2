"""`postroom status` on real servers: two daemons, a broker and a worker, and what goes wrong with each."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import nats
import pytest
from msgspec.structs import replace
from nats.js.api import AckPolicy, ConsumerConfig
from support.databases import END_SESSIONS, create
from support.mailroom import MESH, Mailroom, Process, worker
from support.terminal import Outcome, Terminal
from support.waiting import wait_until
from support.zygote import shared

from embedded import EmbeddedNats, EmbeddedPostgres, EmbeddedRedis
from postroom import BrokerClient
from postroom._wire.unpublished import Durable

HEAVY = ("typer", "click", "rich", "aiohttp", "pydantic", "asyncpg", "nats", "uvloop", "prometheus_client")


class Office:
    """A mail room with two daemons, of alice and of bob, and an administrator at alice's."""

    def __init__(self, room: Mailroom, nats_url: str, database: str) -> None:
        self.room = room
        self.nats_url = nats_url
        self.database = database
        self.user = self.with_token("admin")
        self.other = room.directory / "b.sock"
        place = room.directory / "bob"
        place.mkdir()
        self.bob = Process(
            place,
            "daemon",
            {
                "POSTROOM_DAEMON_MESH": MESH,
                "POSTROOM_DAEMON_SOCKET_PATH": self.other,
                "POSTROOM_DAEMON_STATE_DIRECTORY": place / "state",
                "POSTROOM_DAEMON_BROKER_URL": room.broker_urls[0],
                "POSTROOM_DAEMON_BROKER_TOKEN_FILE": room.directory / "bob.token",
            },
            zygote=shared(),
        )

    def with_token(self, name: str, **environment: str) -> Terminal:
        reach = {
            "POSTROOM_BROKER_URL": self.room.broker_urls[0],
            "POSTROOM_ADMIN_TOKEN_FILE": str(self.room.directory / f"{name}.token"),
        }
        return Terminal(self.room.socket, **{**reach, **environment})

    async def add_bob(self) -> None:
        async with BrokerClient(self.room.broker_urls[0], self.room.admin_token) as administrator:
            self.room._secret("bob.token", (await administrator.create_member(MESH, "bob")).token)
        self.bob.start()

    def execute(self, statement: str) -> None:
        async def work() -> None:
            connection = await asyncpg.connect(self.database)
            await connection.execute(statement)
            await connection.close()

        run(work())


def run(work: Any) -> Any:
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


def all_reported_since(moment: str, seen: Outcome) -> bool:
    """Tell whether every program has told since `moment` what it counted: nothing from before is still to come."""
    reported = [one["reported_at"] for one in seen.json if "reported_at" in one]
    return bool(reported) and min(reported) > moment


def troubles(seen: Outcome) -> dict[str, tuple[str, str, str]]:
    """Return what is said to be wrong, by thing: the level, the sentence, the command."""
    return {one["thing"]: (one["level"], one["what"], one["help"]) for one in seen.json if "level" in one}


@pytest.fixture(scope="module")
def office(session_directory: Path, postgres_server: EmbeddedPostgres, redis_server: EmbeddedRedis) -> Iterator[Office]:
    directory = session_directory / "status"
    directory.mkdir(mode=0o711)
    database = postgres_server.url_of("status")
    run(create(postgres_server, "status"))
    server = EmbeddedNats(directory / "nats")
    url = server.start()
    room = Mailroom(directory, database, redis_server.url, zygote=shared())
    room.brokers[0].settle({"POSTROOM_BROKER_NATS_URL": url})
    run(room.open())
    office = Office(room, url, database)
    run(office.add_bob())
    with worker(POSTROOM_WORKER_DATABASE_URL=database, POSTROOM_WORKER_NATS_URL=url):
        yield office
    office.bob.stop()
    room.close()
    server.stop()


@pytest.fixture
def well(office: Office) -> Outcome:
    """What is seen while all is well."""
    look = functools.partial(office.user.run, "status", "--json")
    return wait_until(look, holds=lambda seen: seen.code == 0 and sum("kind" in one for one in seen.json) == 4)


def test_all_that_is_well_fits_a_screen(office: Office, well: Outcome) -> None:
    kinds = [(one["kind"], one["name"], one["status"]) for one in well.json]
    assert sorted(kinds) == [
        ("broker", "broker", "ok"),
        ("daemon", "alice", "ok"),
        ("daemon", "bob", "ok"),
        ("worker", "publishing", "ok"),
    ]
    assert all(one["version"] and one["host"] and abs(one["clock_seconds"]) < 30 for one in well.json)
    seen = office.user.at_a_terminal("status", COLUMNS="80")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", seen.out).splitlines()
    assert (seen.code, plain[0], plain[1]) == (0, "all is well", "1 broker, 2 daemons, 1 worker")
    assert [line for line in plain if len(line) > 80] == []
    assert len(plain) <= 24
    assert "\x1b[32m" in seen.out
    assert "\x1b" not in office.user.at_a_terminal("status", NO_COLOR="1").out
    assert "\x1b" not in office.user.run("status").out


def test_a_look_imports_neither_typer_nor_a_server(office: Office, well: Outcome) -> None:
    assert well.code == 0
    names = f"[name for name in {HEAVY!r} if name in sys.modules]"
    script = f"import sys, cli.main; cli.main.run(['status', '--json']); print({names})"
    done = office.user.shell(f'{sys.executable} -c "{script}"')
    assert done.out.splitlines()[-1] == "[]", done.err
    assert len(done.out.splitlines()) == 5


@pytest.mark.usefixtures("well")
def test_a_status_that_cannot_be_written_is_an_error(office: Office) -> None:
    for command in ("status", "status --json"):
        unwritten = office.user.shell(f"postroom {command} >&-")
        assert (unwritten.code, unwritten.err) == (74, "postroom: standard input or output: Bad file descriptor\n")


def test_a_paused_relay_is_wrong_and_the_command_that_is_shown_helps(office: Office, well: Outcome) -> None:
    assert well.code == 0
    words = ["--socket", str(office.other), "--reason", "a test"]
    assert office.user.run("relay", "pause", *words).code == 0
    seen = wait_until(lambda: office.user.run("status", "--json"), holds=lambda seen: seen.code == 1)
    (found,) = troubles(seen).items()
    assert found[0].startswith("bob@demo on ")
    assert found[1][:2] == ("wrong", "an operator paused its relay")
    assert office.user.run("status").out.splitlines()[0] == f"{found[0]}: an operator paused its relay"

    assert office.user.shell(found[1][2]).code == 0
    wait_until(lambda: office.user.run("status", "--json"), holds=lambda seen: seen.code == 0)


def test_a_daemon_that_is_silent_is_away_since_then(office: Office, well: Outcome) -> None:
    assert well.code == 0
    office.bob.kill()
    office.execute("UPDATE postroom.programs SET reported_at = '2026-01-01 12:00:00Z' WHERE name = 'bob'")
    seen = office.user.run("status", "--json")
    (found,) = troubles(seen).values()
    assert (seen.code, found[:2]) == (69, ("down", "no report since 2026-01-01 12:00:00Z"))
    assert office.user.run("status").out.splitlines()[2] == "1 broker, 2 daemons, 1 worker"
    office.bob.start()
    wait_until(lambda: office.user.run("status", "--json"), holds=lambda seen: seen.code == 0)


def test_a_disk_that_is_nearly_full_and_a_wrong_clock_are_seen_from_elsewhere(office: Office, well: Outcome) -> None:
    assert well.code == 0

    async def report() -> None:
        now = datetime.now(UTC)
        said = {"host": "blue", "pid": 1, "version": "1.0", "status": "ok", "disk_free": 5 * 1024**2, "dead": 3}
        said |= {"started_at": now.isoformat(), "at": (now - timedelta(hours=1)).isoformat()}
        headers = {"Authorization": f"Bearer {office.room.token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{office.room.broker_urls[0]}/v1/programs", json=said) as answer,
        ):
            assert answer.status == 204, await answer.text()

    run(report())
    seen = office.user.run("status", "--json")
    said = [(one["level"], one["what"]) for one in seen.json if one.get("thing") == "alice@demo on blue"]
    assert seen.code == 1
    assert said[0] == ("wrong", "its disk has only 5 MiB left")
    assert re.fullmatch(r"its clock is 3[56]\d\d s behind", said[1][1])
    assert said[2] == ("look", "3 dead rows")
    office.execute("DELETE FROM postroom.programs WHERE host = 'blue'")


def test_the_command_for_a_consumer_names_its_mesh_where_its_filters_do() -> None:
    """Whoever may see every mesh has one of them in `POSTROOM_MESH`."""
    durable = Durable(
        consumer="books", stream="SHOP_EVENTS", filters=["shop.event.>"], waiting=1, in_hand=0, again=0, asks=False
    )
    paused = replace(durable, paused="it books twice", paused_by="ada")
    work = replace(durable, filters=["cmd.shop.default.books.>"])
    helps = [trouble.help for each in (durable, paused, work) for trouble in each.troubles()]
    assert helps == [
        "postroom consumer show books --mesh shop",
        "postroom consumer resume SHOP_EVENTS/books --reason 'it was paused' --mesh shop",
        "postroom consumer show books --mesh shop",
    ]


def test_the_broker_says_whether_a_consumer_with_messages_in_hand_is_full_or_stopped() -> None:
    """The clock of the machine that asks may be wrong."""
    for seen_at in (datetime(2000, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)):
        full = Durable(
            consumer="books", stream="SHOP_EVENTS", filters=["shop.event.>"], waiting=1, in_hand=1, again=0, asks=False,
            seen_at=seen_at,
        )  # fmt: skip
        assert not list(full.troubles())
        assert [trouble.thing for trouble in replace(full, still=True).troubles()] == ["consumer books"]


def test_a_consumer_that_nobody_runs_waits_for_somebody_to_look(office: Office, well: Outcome) -> None:
    assert well.code == 0
    assert office.user.run("send", "topic:orders", "one", "--wait").code == 0

    async def declare() -> None:
        connection = await nats.connect(office.nats_url)
        config = ConsumerConfig(durable_name="books", ack_policy=AckPolicy.EXPLICIT)
        await connection.jetstream().add_consumer(f"{MESH.upper()}_EVENTS", config)
        await connection.close()

    wait_until(
        lambda: office.user.run("worker", "backlog", "--json"),
        holds=lambda seen: all(not one["count"] for one in seen.json),
    )
    run(declare())
    seen = wait_until(
        lambda: office.user.run("status", "--json"), holds=lambda seen: "consumer books" in troubles(seen)
    )
    stopped = "1 waiting, 0 in hand, stopped: it asks for no messages"
    assert troubles(seen)["consumer books"] == ("look", stopped, "postroom consumer show books")
    assert seen.code == 1
    (books,) = office.user.run("consumer", "show", "books", "--json").json
    assert books["still"] is True
    assert office.user.run("consumer", "show", "DEMO_EVENTS/books").out.startswith("consumer     books\n")
    line = next(line for line in office.user.run("status").out.splitlines() if line.startswith("books"))
    assert line.split()[:4] == ["books", "DEMO_EVENTS", "1", "0"]

    pause = office.user.run("consumer", "pause", "books", "--reason", "it books twice", "--dry-run")
    assert (pause.code, pause.out) == (0, "DEMO_EVENTS/books would be paused\n")
    pause = office.user.run("consumer", "pause", "books", "--reason", "it books twice")
    assert (pause.code, pause.out) == (0, "DEMO_EVENTS/books paused\n")
    paused = "1 waiting, 0 in hand, paused by administrator: it books twice"
    remedy = "postroom consumer resume DEMO_EVENTS/books --reason 'it was paused'"
    assert troubles(office.user.run("status", "--json"))["consumer books"] == ("look", paused, remedy)
    assert "paused by administrator: it books twice" in office.user.run("consumer", "show", "books").out
    again = office.user.run("consumer", "pause", "DEMO_EVENTS/books", "nobody", "--reason", "again")
    assert (again.code, again.out) == (1, "")
    assert "cannot pause the consumer books: it must be active, and is paused" in again.err
    assert "there is no consumer 'nobody': `postroom consumer list` shows them" in again.err
    several = ("consumer", "pause", "--all", "--stream", "DEMO_EVENTS", "--reason", "again")
    assert "--all" in office.user.run("consumer", "pause", "--stream", "DEMO_EVENTS", "--reason", "x").sentence()
    assert "there is no terminal" in office.user.run("consumer", "resume", *several[2:]).sentence()
    assert "no consumers match" in office.user.run(*several, "--yes").err  # what is paused is not meant
    every = office.user.run("consumer", "resume", *several[2:], "--yes", "--json")
    assert (every.code, every.json) == (0, [{"id": "DEMO_EVENTS/books", "done": "resume"}])
    assert office.user.run(*several, "--yes").out == "DEMO_EVENTS/books paused\n"
    assert office.with_token("bob").run("consumer", "resume", "books", "--reason", "me too").code == 77
    assert office.user.shell(remedy).out == "DEMO_EVENTS/books resumed\n"
    assert troubles(office.user.run("status", "--json"))["consumer books"][1] == stopped
    log = office.user.run("log", "--noun", "consumer", "--json").json
    assert [(one["verb"], one["actor"], one["key"], one["reason"]) for one in log] == [
        ("resume", "administrator", "DEMO_EVENTS/books", "it was paused"),
        ("pause", "administrator", "DEMO_EVENTS/books", "again"),
        ("resume", "administrator", "DEMO_EVENTS/books", "again"),
        ("pause", "administrator", "DEMO_EVENTS/books", "it books twice"),
    ]

    async def delete() -> None:
        connection = await nats.connect(office.nats_url)
        await connection.jetstream().delete_consumer(f"{MESH.upper()}_EVENTS", "books")
        await connection.close()

    run(delete())


def test_a_job_whose_flow_no_worker_has_is_wrong(office: Office, well: Outcome) -> None:
    assert well.code == 0
    started = office.user.run("jobs", "start", "nightly-export", "--mesh", MESH, "--first", "extract")
    seen = office.user.run("status", "--json")
    lack = "1 job has not ended, and no worker that reports has the flow"
    assert troubles(seen) == {"flow nightly-export": ("wrong", lack, "postroom jobs list --flow nightly-export")}
    assert office.user.shell("postroom jobs list --flow nightly-export").code == 0
    assert office.user.run("jobs", "cancel", started.out.strip(), "--reason", "a test", "--yes").code == 0
    assert office.user.run("status").code == 0


def test_a_broker_that_cannot_be_reached_is_said_and_the_daemon_is_shown_all_the_same(office: Office) -> None:
    user = office.with_token("admin", POSTROOM_BROKER_URL="http://127.0.0.1:9")
    seen = user.run("status", "--json")
    assert (seen.code, [one["mesh"] for one in seen.json if "kind" in one]) == (69, [MESH])
    state, reason, _ = troubles(seen)["the broker"]
    assert (state, reason.startswith("no broker at http://127.0.0.1:9 (")) == ("down", True)

    wrong = office.user.run("status", "--url", "http://olga:s3cr3t@127.0.0.1:9")
    assert (wrong.code, "give the broker's address as" in wrong.out, "s3cr3t" in wrong.out) == (69, True, False)

    nowhere = office.user.run("status", "--socket", office.room.directory / "no.sock")
    assert nowhere.code == 69
    assert nowhere.out.startswith(f"the daemon at {office.room.directory / 'no.sock'}: no daemon at ")


def test_a_postgres_that_takes_no_writes_is_named_and_the_programs_are_shown_all_the_same(
    office: Office, well: Outcome
) -> None:
    assert well.code == 0
    look = functools.partial(office.user.run, "status", "--json")
    office.execute("ALTER DATABASE status SET default_transaction_read_only = on")
    try:
        office.execute(END_SESSIONS.format(name="status"))
        seen = wait_until(look, holds=lambda seen: "is read-only" in seen.out)
    finally:
        office.execute("BEGIN READ WRITE; ALTER DATABASE status RESET ALL; COMMIT")
    assert (seen.code, sorted(one["kind"] for one in seen.json if "kind" in one)) == (
        69,
        ["broker", "daemon", "daemon", "worker"],
    )
    assert next(iter(troubles(seen))) == "the broker"
    wait_until(look, holds=lambda seen: seen.code == 0)


def test_a_member_sees_the_daemons_of_its_mesh_and_is_told_what_is_missing(office: Office, well: Outcome) -> None:
    assert well.code == 0
    seen = office.with_token("bob").run("status")
    assert seen.code == 0, seen
    assert seen.out.splitlines()[:2] == ["all is well", "2 daemons"]
    assert "consumers: only the administrator may see that" in seen.out


def test_top_writes_a_line_for_each_look_off_a_terminal(office: Office, well: Outcome) -> None:
    assert well.code == 0
    seen = office.user.run("top", "--count", "2", "--interval", "0.1")
    lines = seen.out.splitlines()
    assert (seen.code, len(lines)) == (0, 2)
    assert all(re.search(r"Z  queued \S+  accepted \S+ .* waiting 0 \(\S+\)  dead \d+ ", line) for line in lines)


def test_the_last_hour_is_shown_minute_by_minute(office: Office, well: Outcome) -> None:
    assert well.code == 0
    began = datetime.now(UTC).isoformat()
    wait_until(lambda: office.user.run("status", "--json"), holds=lambda seen: all_reported_since(began, seen))
    counted = "INSERT INTO postroom.minute_counts SELECT date_trunc('minute', now()) - interval '{} minutes', '{}', {}"
    office.execute("DELETE FROM postroom.minute_counts")
    counts = (
        (61, "accepted", 5),
        (20, "accepted", 8000),
        (5, "accepted", 500),
        (20, "handled_in_2", 98),
        (20, "handled_in_8", 2),
    )
    for each in counts:
        office.execute(counted.format(*each))
    seen = office.user.run("status", "--hour")
    lines = seen.out.splitlines()
    assert seen.code == 0
    assert re.fullmatch(r"\d\d:\d\dZ to \d\d:\d\dZ, a column for each minute", lines[0])
    assert lines[1] == "accepted: 8,500, at most 8,000 in a minute"
    assert (lines[2].index("█"), lines[2].strip().replace(" ", "")) == (39, "█▁")
    assert "handled: none" in lines
    assert "until handled, p99: 1.5 s, at most 1.5 s" in lines
    assert "all is well" in lines
    assert all(len(line) <= 80 for line in lines)
    minutes = office.user.run("status", "--hour", "--json").json
    assert (len(minutes), sum(one.get("accepted", 0) for one in minutes)) == (60, 8500)
    frames = office.user.at_a_terminal("top", "--count", "1", answer="hq", COLUMNS="80", LINES="24").out
    assert "a column for each minute" in frames.split("\033[H\033[J")[2]
    office.execute("DELETE FROM postroom.minute_counts")


def test_top_asks_for_the_hour_only_where_it_is_shown(office: Office, well: Outcome) -> None:
    assert well.code == 0

    async def look_while_nobody_can_read_the_hour() -> Outcome:
        connection = await asyncpg.connect(office.database)
        async with connection.transaction():
            await connection.execute("LOCK TABLE postroom.minute_counts IN ACCESS EXCLUSIVE MODE")
            seen = await asyncio.to_thread(office.user.at_a_terminal, "top", "--count", "1", answer="q", COLUMNS="80")
        await connection.close()
        return seen

    assert "the last hour:" not in run(look_while_nobody_can_read_the_hour()).out  # that it cannot be asked


def test_top_on_a_terminal_follows_keys_and_leaves_it_as_it_was(office: Office, well: Outcome) -> None:
    assert well.code == 0
    seen = office.user.at_a_terminal("top", "--interval", "9", "--count", "2", answer="dcoq", COLUMNS="80", LINES="24")
    frames = seen.out.split("\033[H\033[J")
    assert (seen.code, len(frames)) == (0, 5)
    assert seen.out.count("\033[?1049h") == seen.out.count("\033[?1049l") == 1
    assert "all is well" in frames[1] or "look" in frames[1] or "waiting" in frames[1]
    assert "PROGRAM" in frames[2]
    assert "bob@demo" in frames[2]
    assert "bob@demo" not in frames[3]
    assert all(len(frame.splitlines()) <= 24 and "q quit" in frame for frame in frames[1:])


def test_without_anything_to_ask_it_says_what_to_set(tmp_path: Path) -> None:
    seen = Terminal(None, XDG_STATE_HOME=str(tmp_path)).run("status")
    assert seen.code == 3
    assert "POSTROOM_BROKER_URL" in seen.sentence()


def test_a_wrong_option_is_explained(office: Office) -> None:
    assert office.user.run("status", "--nonsense").code == 2
    assert json.loads(office.user.run("status", "--json").out.splitlines()[0])
