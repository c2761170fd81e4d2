"""`postroom up`, `status` and `down`: everything on this machine with one verb, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.terminal import Terminal

from cli.stack import Stack
from cli.stack.layout import Layout
from cli.stack.supervisor import supervising, supervisor_of
from embedded import ProcessIdentity
from embedded.processes import tethered
from embedded.server import wait_until

SECONDS = 60.0  # a bound for what happens at once on an idle machine
VARIABLES = {
    "POSTROOM_SOCKET",
    "POSTROOM_MESH",
    "POSTROOM_BROKER_URL",
    "POSTROOM_BROKER_TOKEN_FILE",
    "POSTROOM_ADMIN_TOKEN_FILE",
    "POSTROOM_DATABASE_URL",
    "POSTROOM_REDIS_URL",
    "POSTROOM_NATS_URL",
    "POSTROOM_STATE",
}


class AcceptsAll(BaseHTTPRequestHandler):
    """A handler of messages."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Keep silent."""


def run(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(environ or {})},
        check=False,
    )


def environment(layout: Layout) -> dict[str, str]:
    """Read the env file as a shell does."""
    pairs = (shlex.split(line)[0].split("=", 1) for line in layout.env_file.read_text().splitlines())
    return dict(pairs)


def pids(stack: Stack) -> dict[str, ProcessIdentity | None]:
    return {program.name: program.process for program in stack.programs}


async def execute(stack: Stack, statement: str) -> None:
    connection = await asyncpg.connect(stack.postgres.url)
    await connection.execute(statement)
    await connection.close()


@pytest.fixture(scope="module")
def stack(session_directory: Path) -> Iterator[Stack]:
    state = session_directory / "up"
    done = run("up", "--state", str(state), "--detach")
    assert done.returncode == 0, done.stderr
    yield Stack(state)
    done = run("down", "--state", str(state), "--wipe", "--yes")
    assert done.returncode == 0, done.stderr
    assert not state.exists()


def test_the_env_file_is_for_this_user_alone_and_names_what_runs(stack: Stack) -> None:
    variables = environment(stack.layout)
    assert variables.keys() == VARIABLES
    assert variables == stack.environment()
    assert stack.layout.env_file.stat().st_mode & 0o777 == 0o600
    assert stack.layout.admin_token_file.stat().st_mode & 0o777 == 0o600


def test_each_config_says_that_it_is_written_at_every_start(stack: Stack) -> None:
    configs = list(stack.layout.state.glob("*/*.toml"))
    assert {config.stem for config in configs} == {"broker", "daemon", "worker"}
    assert all(config.read_text().startswith("# `postroom up` writes this file at every start") for config in configs)


def test_a_message_goes_all_the_way_with_the_environment_alone(stack: Stack) -> None:
    done = run("send", "topic:orders", "hello", "--id", "up-hello", "--wait", environ=environment(stack.layout))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "up-hello done\n"


def test_the_environment_alone_tells_status_where_to_look(stack: Stack) -> None:
    done = run("status", "--json", environ=environment(stack.layout))
    assert {row["state"] for row in processes(done.stdout).values()} == {"running"}


@pytest.mark.parametrize("destination", ["dm:bob", "dm:alice", "queue:work"])
def test_the_members_and_the_queue_are_there(stack: Stack, destination: str) -> None:
    done = run("send", destination, "hello", "--wait", environ=environment(stack.layout))
    assert done.returncode == 0, done.stderr


def processes(said: str) -> dict[str, Any]:
    """Return what `status --json` said of each process of `up`."""
    return {row["process"]: row for row in map(json.loads, said.splitlines()) if "process" in row}


def is_well(stack: Stack) -> bool:
    """Whether `status` finds nothing wrong."""
    return run("status", "--state", str(stack.layout.state)).returncode == 0


def test_status_shows_every_process_and_the_backlog(stack: Stack) -> None:
    done = run("status", "--state", str(stack.layout.state), "--json")
    assert done.returncode == 0, done.stderr
    rows = processes(done.stdout)
    assert list(rows) == ["up", "postgres", "redis", "nats", "broker", "worker", "daemon"]
    assert {row["state"] for row in rows.values()} == {"running"}
    assert all(rows[name]["pid"] == process.pid for name, process in pids(stack).items() if process)
    assert rows["daemon"]["backlog"] == {"pending": 0, "inflight": 0, "dead": 0}
    assert "@" not in rows["nats"]["address"]  # no password
    sources = ("events", "deliveries", "letters", "replays")
    assert set(rows["worker"]["backlog"]) == {f"unpublished {source}" for source in sources}
    assert rows["nats"]["backlog"] == {"dead in DEMO_DLQ": 0}
    assert rows["postgres"]["backlog"] == {"running jobs": 0, "failed jobs": 0, "steps that no worker knows": 0}


@pytest.mark.parametrize("verb", [("status", "--json"), ("top", "--count", "1")])
def test_a_state_that_is_named_is_looked_at_alone_whatever_the_environment_says(
    stack: Stack, verb: tuple[str, ...]
) -> None:
    another = dict.fromkeys(VARIABLES, "/nowhere") | {"POSTROOM_BROKER_URL": "http://127.0.0.1:1"}
    done = run(*verb, "--state", str(stack.layout.state), environ=another)
    assert (done.returncode, done.stderr) == (0, "")
    assert "nowhere" not in done.stdout
    assert verb[0] == "status" or done.stdout.endswith("wrong 0\n")


def test_status_tells_a_broker_that_hangs_from_one_that_runs(stack: Stack) -> None:
    hung = stack.broker.process
    assert hung is not None
    hung.send(signal.SIGSTOP)
    try:
        done = run("status", "--state", str(stack.layout.state), "--json")
    finally:
        hung.send(signal.SIGCONT)
    rows = {name: row["state"] for name, row in processes(done.stdout).items()}
    assert (rows["broker"], rows["daemon"], done.returncode) == ("silent", "running", 69)
    assert wait_until(lambda: is_well(stack), SECONDS)


def test_status_says_that_the_broker_limits_without_redis(stack: Stack) -> None:
    redis = stack.redis.process
    assert redis is not None
    redis.send(signal.SIGSTOP)
    try:
        done = run("status", "--state", str(stack.layout.state), "--json")
        helped = f"the same rate\n    tail {stack.broker.log_file}\n"  # once the broker has reported it
        assert wait_until(lambda: helped in run("status", "--state", str(stack.layout.state)).stdout, SECONDS)
    finally:
        redis.send(signal.SIGCONT)
    broker = processes(done.stdout)["broker"]
    assert (broker["state"], broker["problem"]) == (
        "running",
        "Redis does not answer: each broker limits by itself, at the same rate",
    )
    assert wait_until(lambda: is_well(stack), SECONDS)


def test_status_tells_what_fails_from_what_is_silent(stack: Stack) -> None:
    asyncio.run(execute(stack, "ALTER SCHEMA ledger RENAME TO elsewhere"))
    try:
        done = run("status", "--state", str(stack.layout.state))
    finally:
        asyncio.run(execute(stack, "ALTER SCHEMA elsewhere RENAME TO ledger"))
    assert done.returncode == 69
    row = next(line for line in done.stdout.splitlines() if line.startswith("postgres  "))
    assert row.startswith("postgres  failing")
    assert "internal error: see the log" in row
    assert wait_until(lambda: is_well(stack), SECONDS)


def test_status_names_a_consumer_that_pauses_until_its_handler_is_there(stack: Stack) -> None:
    environ = environment(stack.layout)
    handler = HTTPServer(("127.0.0.1", 0), AcceptsAll, bind_and_activate=False)
    handler.server_bind()  # nobody listens yet
    address = f"http://127.0.0.1:{handler.server_port}/"
    words = ["consumer", "run", "--context", "demo", "--name", "billing", "--handler", address]

    def problem() -> str:
        done = run("status", "--json", environ=environ)
        rows = [json.loads(line) for line in done.stdout.splitlines()]
        troubles = {row["thing"]: str(row["what"]) for row in rows if "level" in row}
        assert done.returncode == (1 if troubles else 0), done.stdout
        return troubles.get("consumer billing", "")

    with subprocess.Popen(tethered([sys.executable, "-m", "cli", *words]), env={**os.environ, **environ}) as consumer:
        try:
            run("send", "topic:orders", "to be billed", environ=environ)
            assert wait_until(lambda: "handler_unreachable" in problem(), SECONDS)
            assert address in problem()
            handler.server_activate()
            threading.Thread(target=handler.serve_forever, daemon=True).start()
            assert wait_until(lambda: not problem(), SECONDS)
            handler.shutdown()
        finally:
            consumer.terminate()
            handler.server_close()


def test_status_for_people_is_a_table(stack: Stack) -> None:
    done = run("status", "--state", str(stack.layout.state))
    tables = [[line.split()[0] for line in table.splitlines()] for table in done.stdout.split("\n\n")]
    assert tables[1] == ["PROCESS", "up", "postgres", "redis", "nats", "broker", "worker", "daemon"]
    assert sorted(tables[2]) == ["PROGRAM", "alice@demo", "broker", "worker"]


def test_up_twice_is_up_once(stack: Stack) -> None:
    before = pids(stack)
    done = run("up", "--state", str(stack.layout.state))
    assert done.returncode == 0
    assert "runs already" in done.stderr
    assert pids(stack) == before


@pytest.mark.parametrize("name", ["daemon", "broker", "redis", "postgres"])
def test_a_killed_process_is_started_again(stack: Stack, name: str) -> None:
    program = next(program for program in stack.programs if program.name == name)
    killed = program.process
    assert killed is not None
    assert killed.end((signal.SIGKILL, SECONDS))
    assert wait_until(lambda: program.process not in {None, killed}, SECONDS)

    def arrives() -> bool:  # a process is not ready as soon as it is there: who sends to no daemon sends again
        words = ["topic:orders", f"after {name}", "--id", f"up-after-{name}", "--wait"]
        return run("send", *words, environ=environment(stack.layout)).returncode == 0

    assert wait_until(arrives, SECONDS), stack.layout.log_file.read_text()


def test_status_names_the_log_of_a_program_that_has_ended(stack: Stack) -> None:
    supervisor, worker = supervisor_of(stack.layout), stack.worker.process
    assert supervisor is not None
    assert worker is not None
    supervisor.send(signal.SIGSTOP)  # so that it is not started again at once
    try:
        assert worker.send(signal.SIGKILL)
        assert wait_until(lambda: stack.worker.process is None, SECONDS)
        done = run("status", "--state", str(stack.layout.state))
    finally:
        supervisor.send(signal.SIGCONT)
    assert done.returncode == 69
    assert "stopped: it ended, and is started again" in done.stdout
    assert f"tail {stack.worker.log_file}" in done.stdout
    assert wait_until(lambda: stack.worker.process not in {None, worker}, SECONDS)


def test_killed_with_9_nothing_keeps_running_and_started_again_it_carries_on(stack: Stack) -> None:
    run("send", "topic:orders", "before", "--id", "up-before", "--wait", environ=environment(stack.layout))
    supervisor = supervisor_of(stack.layout)
    assert supervisor is not None
    before = [process for process in pids(stack).values() if process is not None]
    assert supervisor.end((signal.SIGKILL, SECONDS))
    assert all(process.wait(SECONDS) for process in before)
    assert run("status", "--state", str(stack.layout.state)).returncode == 69

    done = run("up", "--state", str(stack.layout.state), "--detach")
    assert done.returncode == 0, done.stderr
    again = run("send", "topic:orders", "before", "--id", "up-before", environ=environment(stack.layout))
    assert again.stdout == "up-before done (duplicate)\n"


def test_it_starts_again_whatever_was_revoked_or_deleted_of_what_it_made(short_directory: Path) -> None:
    state = short_directory / "up"
    layout = Layout(state)
    try:
        assert run("up", "--state", str(state), "--detach").returncode == 0
        revoke, delete = ("member", "revoke", "bob", "--mesh", "demo"), ("mesh", "delete", "demo")
        for changes in ((revoke, delete), (revoke,)):
            for words in changes:
                done = run(*words, "--yes", environ=environment(layout))
                assert done.returncode == 0, done.stderr
            assert run("down", "--state", str(state)).returncode == 0
            done = run("up", "--state", str(state), "--detach")
            assert done.returncode == 0, done.stderr
        sent = run("send", "topic:orders", "by a member made anew", "--wait", environ=environment(layout))
        assert sent.returncode == 0, sent.stderr
    finally:
        run("down", "--state", str(state), "--wipe", "--yes")


def test_in_the_foreground_ctrl_c_stops_everything_that_it_started_anew(short_directory: Path) -> None:
    stack = Stack(short_directory / "up")
    stack.layout.create()
    stack.redis.start()  # another's, as of a supervisor that was killed a moment ago: it ends with that one
    leftover = stack.redis.process
    command = tethered([sys.executable, "-m", "cli", "up", "--state", str(stack.layout.state)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as foreground:
        assert foreground.stdout is not None
        is_up = any("Postroom is up" in line for line in foreground.stdout)
        running = [process for process in pids(stack).values() if process is not None]
        foreground.send_signal(signal.SIGINT)
        foreground.communicate()
    stack.redis.stop()  # the test's own child, which has ended, leaves no zombie
    assert is_up
    assert leftover not in running
    assert len(running) == len(stack.programs)
    assert foreground.returncode == 0
    assert not any(process.alive for process in running)
    assert run("down", "--state", str(stack.layout.state)).stdout == "nothing was running\n"


def test_up_beside_one_that_starts_returns_when_that_is_ready(short_directory: Path) -> None:
    layout = Layout(short_directory / "up")
    layout.create()
    layout.env_file.write_text("POSTROOM_MESH=before\n")
    up = [sys.executable, "-m", "cli", "up", "--state", str(layout.state)]
    with (
        subprocess.Popen(tethered(up), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first,
        contextlib.ExitStack() as undo,
    ):
        undo.callback(first.terminate)
        assert wait_until(lambda: supervisor_of(layout) is not None, SECONDS)
        first.send_signal(signal.SIGSTOP)  # before its Postgres can be ready
        with subprocess.Popen(tethered([*up, "--detach"]), stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            assert "runs already" in second.stderr.readline()
            first.send_signal(signal.SIGCONT)
            second.communicate()
        assert second.returncode == 0
        assert environment(layout) == Stack(layout.state).environment()


def test_up_beside_one_that_ends_while_it_starts_says_so(short_directory: Path) -> None:
    layout = Layout(short_directory / "up")
    with supervising(layout), subprocess.Popen(tethered(["/bin/sleep", "600"])) as starting:
        process = ProcessIdentity.of(starting.pid)
        assert process is not None
        process.write(layout.pid_file)
        command = [sys.executable, "-m", "cli", "up", "--state", str(layout.state)]
        with subprocess.Popen(tethered(command), stderr=subprocess.PIPE, text=True) as second:
            assert second.stderr is not None
            assert "runs already" in second.stderr.readline()
            starting.kill()
            said = second.stderr.read()
    assert (second.returncode, "ended while it started: start again" in said) == (75, True)


def test_up_that_is_stopped_while_it_starts_says_so(short_directory: Path) -> None:
    layout = Layout(short_directory / "up")
    up = tethered([sys.executable, "-m", "cli", "up", "--state", str(layout.state), "--detach"])
    with subprocess.Popen(up, stderr=subprocess.PIPE, text=True) as starting:
        assert wait_until((layout.state / "postgres").exists, SECONDS)
        assert run("down", "--state", str(layout.state)).returncode == 0
        _, said = starting.communicate()
    assert (starting.returncode, said) == (1, f"postroom: what starts in {layout.state} was stopped: start it again\n")


@pytest.mark.parametrize("verb", ["down", "status"])
def test_a_directory_that_no_stack_made_is_left_alone(short_directory: Path, verb: str) -> None:
    (short_directory / "precious").touch()
    done = run(verb, "--state", str(short_directory))
    assert done.returncode == 3
    assert str(short_directory) in done.stderr


def test_up_does_not_spread_over_somebody_elses_files(short_directory: Path) -> None:
    (short_directory / "precious").touch()
    done = run("up", "--state", str(short_directory), "--detach")
    assert done.returncode == 2
    assert "has other files" in done.stderr
    assert [file.name for file in short_directory.iterdir()] == ["precious"]


def test_a_failure_to_start_in_the_background_is_said_in_the_foreground(short_directory: Path) -> None:
    state = short_directory / "up"
    Layout(state).create()
    (state / "redis" / "redis.sock").mkdir(parents=True)  # where its socket belongs
    done = run("up", "--state", str(state), "--detach")
    assert done.returncode == 1
    assert "redis ended by itself" in done.stderr
    assert not any(pids(Stack(state)).values())


def test_a_terminal_shows_which_program_is_starting(short_directory: Path) -> None:
    state = short_directory / "up"
    Layout(state).create()
    (state / "redis" / "redis.sock").mkdir(parents=True)
    shown = Terminal().at_a_terminal("up", "--state", str(state), "--detach")
    assert shown.code == 1
    assert shown.out.index("  postgres starts") < shown.out.index("  redis starts") < shown.out.index("ended by itself")
    assert "nats starts" not in shown.out
