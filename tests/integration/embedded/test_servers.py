"""Start, stop, crash and start again: the contract of every embedded server."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.small_disk import run_on_a_small_disk

from embedded import EmbeddedError, EmbeddedNats, EmbeddedPostgres, EmbeddedRedis, EmbeddedServer, ProcessIdentity
from embedded.processes import processes_in, tethered
from embedded.server import wait_until

SECONDS = 20.0  # a bound for what the kernel or a server does at once
FULL_DISK = """
import signal
import sys
from pathlib import Path
from embedded import EmbeddedError, EmbeddedRedis
from embedded.processes import processes_in

directory, filler = Path(sys.argv[1], "redis"), Path(sys.argv[1], "filler")
server = EmbeddedRedis(directory)
server.start()
server.process.end((signal.SIGKILL, 10))
try:
    with filler.open("wb", buffering=0) as full:
        while True:
            full.write(bytes(4096))
except OSError:
    pass
try:
    server.start()
except EmbeddedError as error:
    print(error, list(processes_in(directory)))
filler.unlink()
server.start()
print(server.process.alive)
server.stop()
"""


@pytest.fixture(params=["postgres", "redis", "nats"])
def make(
    request: pytest.FixtureRequest, postgres_in: Callable[[Path], EmbeddedPostgres]
) -> Callable[[Path], EmbeddedServer]:
    """How to make a server that lives in a directory."""
    kinds: dict[str, Callable[[Path], EmbeddedServer]] = {
        "postgres": postgres_in,
        "redis": EmbeddedRedis,
        "nats": EmbeddedNats,
    }
    return kinds[request.param]


@pytest.fixture
def server(make: Callable[[Path], EmbeddedServer], short_directory: Path) -> Iterator[EmbeddedServer]:
    server = make(short_directory / "server")
    yield server
    server.stop()


def running(server: EmbeddedServer) -> ProcessIdentity:
    process = server.process
    assert process is not None
    return process


def test_starting_twice_starts_one_process_and_stopping_twice_is_harmless(server: EmbeddedServer) -> None:
    server.stop()
    url = server.start()
    first = running(server)
    assert server.start() == url
    assert running(server) == first
    server.stop()
    server.stop()
    assert not first.alive
    assert server.process is None


def test_a_server_whose_place_was_moved_does_not_begin_anew_in_the_old_one(short_directory: Path) -> None:
    state, moved = short_directory / "state", short_directory / "moved"
    state.mkdir()
    server = EmbeddedRedis(state / "server")
    try:
        server.start()
        state.rename(moved)
        running(server).end((signal.SIGKILL, SECONDS))
        with pytest.raises(EmbeddedError, match="No such file or directory"):
            server.start()
        assert not state.exists()
        moved.rename(state)
        server.start()
    finally:
        server.stop()


@pytest.mark.parametrize("suffix", ["lock", "pid.new", "log"])
def test_what_it_writes_goes_through_no_link(short_directory: Path, suffix: str) -> None:
    server = EmbeddedRedis(short_directory / "server")
    (short_directory / "theirs").write_text("theirs")
    server.directory.mkdir()
    (server.directory / f"{server.name}.{suffix}").symlink_to(short_directory / "theirs")
    try:
        with pytest.raises(EmbeddedError, match="is a symbolic link"):
            server.start()
        assert (short_directory / "theirs").read_text() == "theirs"
    finally:
        (server.directory / f"{server.name}.{suffix}").unlink()
        server.stop()


def test_its_directory_may_have_any_name(make: Callable[[Path], EmbeddedServer], short_directory: Path) -> None:
    server = make(short_directory / "ein 'Bü\"ro'")
    try:
        server.start()
        assert server.start() == server.url
    finally:
        server.stop()


def test_nobody_else_may_write_to_its_files_whatever_the_umask(
    make: Callable[[Path], EmbeddedServer], short_directory: Path
) -> None:
    server = make(short_directory / "server")
    before = os.umask(0o000)
    try:
        server.start()
        assert os.umask(0o000) == 0o000
    finally:
        os.umask(before)
        server.stop()
    own = [file for file in server.directory.iterdir() if file.name != "data"]
    assert [file.name for file in own if file.stat().st_mode & 0o022] == []


def test_a_killed_server_starts_again_at_the_same_address(server: EmbeddedServer) -> None:
    url = server.start()
    first = running(server)
    first.send(signal.SIGKILL)
    assert first.wait(SECONDS)
    assert server.start() == url
    assert running(server) != first


def test_another_process_stops_what_the_directory_started(server: EmbeddedServer) -> None:
    server.start()
    process = running(server)
    type(server)(server.directory).stop()
    assert not process.alive


def test_a_copy_of_its_directory_stops_nothing(server: EmbeddedServer) -> None:
    server.start()
    process = running(server)
    copy = type(server)(server.directory.with_name("copy"))
    copy.directory.mkdir()
    shutil.copy2(server.pid_file, copy.pid_file)
    assert copy.process is None
    copy.stop()
    assert process.alive


def test_a_pid_that_belongs_to_somebody_else_by_now_is_left_alone(server: EmbeddedServer) -> None:
    with subprocess.Popen(tethered(["/bin/sleep", "600"])) as stranger:
        stranger_now = ProcessIdentity.of(stranger.pid)
        assert stranger_now is not None
        server.directory.mkdir(exist_ok=True)
        stranger_now._replace(started=stranger_now.started - 1).write(server.pid_file)
        server.stop()
        assert stranger.poll() is None
        server.start()
        assert running(server).pid != stranger.pid
        server.stop()
        assert stranger.poll() is None
        stranger.kill()


def test_a_server_ends_with_the_process_that_started_it_even_by_kill_9(server: EmbeddedServer) -> None:
    kind = type(server).__name__
    program = f"import embedded, pathlib, sys; embedded.{kind}(pathlib.Path(sys.argv[1])).start(); print(); input()"
    with subprocess.Popen(
        tethered([sys.executable, "-c", program, str(server.directory)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"\n"
        process = running(server)
        parent.kill()
        assert process.wait(SECONDS)
    if isinstance(server, EmbeddedPostgres):
        assert wait_until(lambda: not any(processes_in(server.data_directory)), SECONDS)


def test_a_server_that_cannot_start_says_where_its_log_is(server: EmbeddedServer) -> None:
    server.start()
    server.stop()
    obstacle = {"postgres": "data/PG_VERSION", "redis": "redis.sock", "nats": "jetstream"}[server.name]
    found = server.directory / obstacle
    if found.is_dir():
        found.rename(found.with_name("aside"))
    if server.name == "redis":
        found.mkdir()
    else:
        found.write_text("no longer what it was")
    with pytest.raises(EmbeddedError, match=str(server.log_file)):
        server.start()


async def test_on_a_full_disk_nothing_starts_that_nobody_would_find_and_it_starts_once_there_is_space(
    tmp_path: Path,
) -> None:
    assert await run_on_a_small_disk(tmp_path, FULL_DISK) == [
        f"redis cannot start in {tmp_path}/redis: No space left on device []",
        "True",
    ]


def test_a_thread_may_not_start_a_server(server: EmbeddedServer) -> None:
    with ThreadPoolExecutor(1) as pool, pytest.raises(EmbeddedError, match="main thread"):
        pool.submit(server.start).result()


def test_two_processes_that_start_one_directory_start_one_server(server: EmbeddedServer) -> None:
    kind = type(server).__name__
    program = (
        f"import embedded, pathlib, sys; server = embedded.{kind}(pathlib.Path(sys.argv[1])); server.start();"
        "print(server.process.pid, flush=True); input()"
    )
    command = tethered([sys.executable, "-c", program, str(server.directory)])
    starters = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    pids = {starter.stdout.readline() for starter in starters if starter.stdout is not None}
    for starter in starters:
        starter.communicate(b"\n")
    assert len(pids) == 1
    assert int(pids.pop()) != os.getpid()
