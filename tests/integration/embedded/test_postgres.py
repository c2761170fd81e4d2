"""Postgres on its own: its data, its children, its privileges."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import asyncpg
import pytest

from embedded import EmbeddedError, EmbeddedPostgres, postgres
from embedded.postgres import postgres_home, unprivileged_account
from embedded.processes import ProcessIdentity, tethered
from embedded.server import wait_until

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has to give up privileges")


@pytest.fixture
def server(short_directory: Path, postgres_in: Callable[[Path], EmbeddedPostgres]) -> Iterator[EmbeddedPostgres]:
    server = postgres_in(short_directory / "postgres")
    yield server
    server.stop()


async def test_a_committed_row_survives_a_kill_of_every_process(short_directory: Path) -> None:
    server = EmbeddedPostgres(short_directory / "postgres")  # durable, as `postroom up` starts it
    connection = await asyncpg.connect(server.start())
    await connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
    process = server.process
    assert process is not None
    assert process.end((signal.SIGKILL, 20))
    server.start()
    connection.terminate()
    connection = await asyncpg.connect(server.url)
    assert await connection.fetchval("SELECT answer FROM kept") == 42
    assert await connection.fetchval("SHOW fsync") == "on"
    await connection.close()
    server.stop()


async def test_the_role_may_create_databases_and_nothing_above_that(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.start())
    await connection.execute("CREATE DATABASE another")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await connection.execute("CREATE ROLE another SUPERUSER")
    await connection.close()


async def test_the_role_may_end_an_autovacuum_of_a_database_that_it_drops(server: EmbeddedPostgres) -> None:
    connection = await asyncpg.connect(server.start())
    assert await connection.fetchval("SELECT pg_has_role('pg_signal_backend', 'USAGE')")
    await connection.close()


async def test_a_port_that_is_set_for_another_postgres_is_not_taken(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPORT", "5433")  # what asyncpg and libpq take where an address has none
    connection = await asyncpg.connect(server.start())
    await connection.close()


@pytest.mark.parametrize("name", ["data/postmaster.pid", "run/.s.PGSQL.5432.lock"])
def test_a_lock_file_that_names_a_stranger_is_no_obstacle(server: EmbeddedPostgres, name: str) -> None:
    server.start()
    process = server.process
    assert process is not None
    lock = server.directory / name
    left = lock.read_text()
    server.stop()
    with subprocess.Popen(tethered(["/bin/sleep", "600"], account=unprivileged_account())) as stranger:
        try:
            assert wait_until(lambda: Path(f"/proc/{stranger.pid}/comm").read_text() == "sleep\n", 20)
            lock.write_text(left.replace(str(process.pid), str(stranger.pid), 1))
            server.start()
            assert server.process is not None
        finally:
            stranger.kill()


def test_a_postgres_that_lost_its_pid_file_is_not_started_twice(
    server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "_ORPHAN_SECONDS", 0.1)
    server.start()
    process = server.process
    assert process is not None
    server.pid_file.unlink()
    assert server.start()  # who started it still knows
    assert server.process == process
    with pytest.raises(EmbeddedError, match=str(process.pid)):
        EmbeddedPostgres(server.directory).start()


def test_half_a_cluster_left_by_a_crash_is_made_anew(short_directory: Path) -> None:
    server = EmbeddedPostgres(short_directory / "postgres", durable=False)
    half = server.directory / "data.new"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18")
    server.start()
    assert not half.exists()
    server.stop()


def test_a_directory_too_long_for_a_socket_still_works(
    short_directory: Path, postgres_in: Callable[[Path], EmbeddedPostgres]
) -> None:
    server = postgres_in(short_directory / ("long" * 25))
    server.start()
    assert server.directory not in server.socket_directory.parents
    server.stop()
    server.socket_directory.rmdir()


@as_root
def test_root_starts_it_as_an_unprivileged_user(server: EmbeddedPostgres) -> None:
    server.start()
    account = unprivileged_account()
    process = server.process
    assert account is not None
    assert process is not None
    status = Path(f"/proc/{process.pid}/status").read_text()
    assert f"Uid:\t{account.uid}\t{account.uid}\t{account.uid}\t{account.uid}\n" in status
    assert f"Gid:\t{account.gid}\t{account.gid}\t{account.gid}\t{account.gid}\n" in status
    assert "Groups:\t \n" in status
    assert server.directory.stat().st_uid == 0


@as_root
def test_a_directory_that_the_unprivileged_user_cannot_reach_is_named(short_directory: Path) -> None:
    closed = short_directory / "closed"
    (closed / "state").mkdir(parents=True)
    closed.chmod(0o700)
    with pytest.raises(EmbeddedError, match=rf"may not enter {closed} on the way"):
        EmbeddedPostgres(closed / "state" / "postgres").start()


@pytest.fixture(params=[0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


async def test_a_new_cluster_is_made_and_served_under_any_umask(short_directory: Path, umask: int) -> None:
    assert os.umask(umask) == umask
    server = EmbeddedPostgres(short_directory / "postgres", durable=False)
    connection = await asyncpg.connect(server.start())
    assert await connection.fetchval("SELECT 42") == 42
    await connection.close()
    server.stop()


@as_root
def test_programs_that_the_unprivileged_user_cannot_reach_are_copied(
    server: EmbeddedPostgres, short_directory: Path, monkeypatch: pytest.MonkeyPatch, umask: int
) -> None:
    closed = short_directory / "closed"
    closed.mkdir(mode=0o700)
    wheel = postgres_home().parent
    for folder in (wheel, wheel.with_name(f"{wheel.name}.libs")):
        shutil.copytree(folder, closed / folder.name)
    for installed in closed.rglob("*"):
        installed.chmod(installed.stat().st_mode & ~umask)
    monkeypatch.setattr(postgres, "postgres_home", lambda: closed / wheel.name / "pginstall18")
    server.start()
    process = server.process
    assert process is not None
    program = Path(f"/proc/{process.pid}/exe").readlink()
    assert program.is_relative_to(server.directory)


@as_root
def test_data_of_another_user_is_refused(server: EmbeddedPostgres) -> None:
    server.start()
    server.stop()
    os.chown(server.data_directory, 12345, 12345)
    with pytest.raises(EmbeddedError, match="belongs to uid 12345"):
        server.start()


def test_the_identity_of_a_process_that_has_ended_is_not_alive(server: EmbeddedPostgres) -> None:
    server.start()
    process = server.process
    assert process is not None
    server.stop()
    assert ProcessIdentity.of(process.pid) != process
    assert not process.send(signal.SIGKILL)
    assert process.wait(0)
