"""A pipeline that was killed while it wrote leaves, run anew, what one run leaves (docs/contract/spark.md#spark-19)."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

import asyncpg
import pyarrow as pa
import pytest
from pyarrow import parquet
from support.histories import History
from support.post import PostOffice
from support.rough_write import wait_until
from support.write_jobs import in_database

from postroom.delivery.agents.store import Owner, Store

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
MESSAGES = 3000
ROWS = 30_000  # of the backfill
POSTED = "SELECT EXISTS (SELECT FROM mesh.topic_message WHERE starts_with(client_message_id, $1))"

HOLD = """
CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  PERFORM pg_advisory_xact_lock(1);
  RETURN NEW;
END $$;
CREATE TRIGGER hold BEFORE INSERT ON {table} FOR EACH ROW WHEN ({middle}) EXECUTE FUNCTION public.hold();
SELECT pg_advisory_lock(1);
"""
IS_HELD = "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND NOT granted)"
LET_GO = "SELECT pg_advisory_unlock(1); DROP TRIGGER hold ON {table}; DROP FUNCTION public.hold();"


class Written(Protocol):
    """What a pipeline writes."""

    def words(self) -> list[str]:
        """Return the options of a run."""

    def half_way(self) -> AbstractContextManager[Callable[[], bool]]:
        """Lend, for the length of a block, what tells whether a run is in the middle of writing."""

    def found(self) -> Any:
        """Return all that was written."""

    def clear(self) -> None:
        """Remove it, or let further runs write elsewhere."""


class Table:
    """A table of Postgres; the middle of its rows is the one of which `middle` is true."""

    def __init__(self, history: History, name: str, middle: str, *words: str) -> None:
        self._history = history
        self._name = name
        self._middle = middle
        self._words = words

    def words(self) -> list[str]:
        return [f"database_url={self._history.url}", *self._words]

    @contextmanager
    def half_way(self) -> Iterator[Callable[[], bool]]:
        """Let no run get past the middle."""
        with asyncio.Runner() as runner:
            connection = runner.run(asyncpg.connect(self._history.url))
            runner.run(connection.execute(HOLD.format(table=self._name, middle=self._middle)))
            yield lambda: runner.run(connection.fetchval(IS_HELD))
            runner.run(connection.execute(LET_GO.format(table=self._name)))
            runner.run(connection.close())

    def found(self) -> Any:
        return sorted(map(tuple, self._history.fetch(f"TABLE {self._name}")))

    def clear(self) -> None:
        self._history.execute(f"TRUNCATE {self._name}")


class Files:
    """A directory of files; a run is in the middle of writing when one of the pattern `first` is there."""

    def __init__(self, directory: Path, first: str, *words: str) -> None:
        self._directory = directory
        self._first = first
        self._words = words

    def words(self) -> list[str]:
        return [f"output={self._directory}", *self._words]

    @contextmanager
    def half_way(self) -> Iterator[Callable[[], bool]]:
        yield lambda: any(self._directory.glob(self._first))

    def found(self) -> Any:
        files = (file for file in self._directory.rglob("[!.]*") if file.is_file())  # others are not whole
        return {str(file.relative_to(self._directory)): file.read_bytes() for file in files}

    def clear(self) -> None:
        shutil.rmtree(self._directory)


class Posted:
    """The messages of a namespace."""

    def __init__(self, post: PostOffice, file: Path) -> None:
        self._post = post
        self._file = file

    def words(self) -> list[str]:
        post = self._post
        return [
            f"input={self._file}",
            f"socket={post.socket}",
            f"namespace={post.namespace}",
            "id=n",
            "to=topic:orders",
        ]

    @contextmanager
    def half_way(self) -> Iterator[Callable[[], bool]]:
        prefix = self._post.id_of("x").removesuffix("x")
        yield lambda: in_database(self._post.database_url, lambda connection: connection.fetchval(POSTED, prefix))

    def found(self) -> Any:
        return self._post.accepted()

    def clear(self) -> None:
        self._post.namespace += " again"


@pytest.fixture
def history(database_url: str) -> History:
    """Messages of one second each, over fifty minutes of a day that is over."""
    made = History(database_url)
    made.accept(f"orders-{number}" for number in range(MESSAGES))
    made.tamper(
        "UPDATE mesh.message_history SET accepted_at = timestamptz '2026-11-20Z' + history_id * interval '1 second'"
    )
    return made


def rate_telemetry(request: pytest.FixtureRequest, _: Path) -> Written:
    middle = "NEW.window_start = timestamptz '2026-11-20 00:25Z'"
    return Table(request.getfixturevalue("history"), "pipeline.rate_limit_counter", middle, "window_seconds=1")


def search_index(request: pytest.FixtureRequest, _: Path) -> Written:
    return Table(request.getfixturevalue("history"), "pipeline.search_index", "NEW.history_id = 1500")


def audit_log(request: pytest.FixtureRequest, directory: Path) -> Written:
    history = request.getfixturevalue("history")
    history.tamper("UPDATE mesh.message_history SET accepted_at = accepted_at - history_id / 3 * interval '1 day'")
    return Files(directory, "history/*/part.parquet", f"database_url={history.url}")


def state_hash(_: pytest.FixtureRequest, directory: Path) -> Written:
    for number in range(5):
        asyncio.run(_make_store(directory.with_name(f"store-{number}") / "events.db"))
    return Files(directory, "../output", f"stores={directory.with_name('store-*')}/events.db")


async def _make_store(path: Path) -> None:
    path.parent.mkdir()
    await (await Store.open(path, Owner("counting", "demo", "default"))).close()


def delivery_report(request: pytest.FixtureRequest, directory: Path) -> Written:
    history = request.getfixturevalue("history")
    history.tamper(
        "UPDATE mesh.delivery_queue SET published_at = timestamptz '2026-11-21Z' + history_id * interval '1 ms', "
        "stream = 's', stream_created_at = now(), stream_sequence = history_id * 100 + recipient_id"
    )
    return Files(directory, "latency.parquet", f"database_url={history.url}")


def backfill(request: pytest.FixtureRequest, directory: Path) -> Written:
    file = directory.with_suffix(".parquet")
    parquet.write_table(pa.table({"n": pa.array(range(ROWS), pa.int64())}), file)
    return Posted(request.getfixturevalue("post"), file)


@pytest.mark.parametrize(
    "prepare",
    [rate_telemetry, search_index, audit_log, state_hash, delivery_report, backfill],
    ids=lambda f: f.__name__,
)
def test_a_pipeline_that_is_killed_while_it_writes_and_runs_again_leaves_what_one_run_leaves(
    prepare: Callable[[pytest.FixtureRequest, Path], Written], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    written = prepare(request, tmp_path / "output")
    name = prepare.__name__.replace("_", "-")
    run(name, written)
    clean = written.found()
    written.clear()
    kill_half_way(name, written, tmp_path / "log")
    assert written.found() != clean, "it was killed too late"
    run(name, written)
    assert written.found() == clean


def run(name: str, written: Written) -> None:
    done = subprocess.run(command(name, written), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def kill_half_way(name: str, written: Written, log: Path) -> None:
    """Start a run, and kill its process group when it is in the middle of writing."""
    with (
        written.half_way() as begun,
        log.open("wb") as output,
        subprocess.Popen(
            command(name, written), cwd=ROOT, stdout=output, stderr=output, start_new_session=True
        ) as process,
    ):
        try:
            wait_until(lambda: begun() or process.poll() is not None)
            assert process.returncode is None, log.read_text()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def command(name: str, written: Written) -> list[str]:
    return [sys.executable, "-m", "cli", "pipeline", "run", name, *written.words()]
