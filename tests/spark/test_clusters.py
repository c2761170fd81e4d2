"""Processes of their own: a stream that is killed, a local cluster, and two "hosts" where everything goes wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from uuid import uuid4

import pyarrow as pa
import pyspark
import pytest
from pyarrow import parquet
from support import rough_write, stream_orders
from support.post import PostOffice
from support.write_jobs import completions, holding, shown

from embedded.processes import tethered
from postroom.spark.session import prepare_environment

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

PROGRAM = Path(rough_write.__file__)
STREAM = Path(stream_orders.__file__)
SPARK_CLASS = Path(pyspark.__file__).parent / "bin" / "spark-class"


def test_two_executors_of_a_local_cluster_lose_nothing_and_repeat_nothing(post: PostOffice, tmp_path: Path) -> None:
    environ = environment(tmp_path, SPARK_LOCAL_IP="127.0.0.1")
    write(post, tmp_path, environ, "local-cluster[2,1,1024]", rows=20_000, partitions=20)
    assert post.accepted().keys() == {str(number) for number in range(20_000)}


def test_two_hundred_thousand_rows_survive_failing_tasks_speculation_and_killed_workers(
    post: PostOffice, tmp_path: Path
) -> None:
    post.open_other()
    hosts = {"127.0.0.2": post.socket, "127.0.0.3": post.other_socket}
    with standalone(tmp_path, hosts) as master:
        write(post, tmp_path, environment(tmp_path), master, "--speculation", rows=200_000, partitions=200)
    notes = {note.name for note in (tmp_path / "notes").iterdir()}
    assert {f"{partition}-1" for partition in (3, 7, 11, 23, 183)} <= notes
    assert any(note.startswith("killed-") and note != "killed-0" for note in notes)
    assert post.accepted().keys() == {str(number) for number in range(200_000)}


def test_a_stream_that_is_killed_goes_on_from_its_checkpoint(post: PostOffice, tmp_path: Path) -> None:
    source = tmp_path / "orders"
    source.mkdir()
    for number in range(20):
        ids = range(number * 50, number * 50 + 50)
        parquet.write_table(pa.table({"order_id": pa.array(ids, pa.int64())}), source / f"{number:02}.parquet")
    words = [str(source), str(tmp_path / "checkpoint"), *(f"{name}={value}" for name, value in post.options().items())]
    command = [sys.executable, str(STREAM), *words]
    with killed_afterwards(command, environment(tmp_path)):
        rough_write.wait_until(lambda: len(post.accepted()) >= 150)
    assert len(post.accepted()) < 1000
    subprocess.run(command, env=environment(tmp_path), check=True)
    assert post.accepted().keys() == {str(number) for number in range(1000)}


def test_a_driver_that_is_killed_while_it_commits_leaves_a_job_that_the_next_run_completes_once(
    post: PostOffice, tmp_path: Path
) -> None:
    job = uuid4()
    options = post.options(job=str(job), mesh="demo", database_url=post.database_url, body="order_id")
    environ = environment(tmp_path, SPARK_LOCAL_IP="127.0.0.1")
    command = program(tmp_path, options, "--master=local-cluster[2,1,1024]", "--rows=2000", "--partitions=20")
    with holding(post.database_url, job, place=8) as committing, killed_afterwards(command, environ):
        committing()
    done = subprocess.run([*command, "--partitions=12"], env=environ, capture_output=True, text=True, check=True)
    assert f"postroom: the job {job} is completed" in done.stderr
    found = shown(post.database_url, job)
    assert [activity.name for activity in found.activities] == ["write"] + ["partition"] * 20
    assert {activity.state for activity in found.activities} == {"done"}
    (completion,) = completions(post.database_url, job)
    assert (completion["partitions"], completion["accepted"] + completion["duplicate"]) == (20, 2000)
    assert post.accepted().keys() == {str(number) for number in range(2000)}


def write(
    post: PostOffice, directory: Path, environ: dict[str, str], master: str, *words: str, rows: int, partitions: int
) -> None:
    options = post.options(body="order_id")
    if master.startswith("spark:"):
        del options["socket"]  # each host has its own
    command = program(directory, options, f"--master={master}", *words, f"--rows={rows}", f"--partitions={partitions}")
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-10_000:]
    counts = re.search(r"postroom: write-\w+ to topic:orders: (\d+) accepted, (\d+) duplicate, 0 conflict", done.stderr)
    assert counts, done.stderr[-10_000:]
    assert int(counts[1]) + int(counts[2]) == rows
    assert int(counts[2]) > 0, "no attempt had posted a part before it failed"


def program(directory: Path, options: dict[str, str], *words: str) -> list[str]:
    """Return the command of a rough write."""
    notes = directory / "notes"
    notes.mkdir(exist_ok=True)
    given = [f"{name}={value}" for name, value in options.items()]
    return [sys.executable, str(PROGRAM), *words, f"--notes={notes}", *given]


@contextmanager
def killed_afterwards(command: list[str], environ: dict[str, str]) -> Iterator[None]:
    """Run a program while the block lasts; then kill it with all that it has started, also where the block failed."""
    with subprocess.Popen(command, env=environ, start_new_session=True) as process:
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def environment(directory: Path, **others: str) -> dict[str, str]:
    environ = {**os.environ, "SPARK_WORKER_DIR": str(directory / "work"), "SPARK_LOCAL_DIRS": str(directory), **others}
    environ.pop("POSTROOM_SOCKET", None)
    prepare_environment(environ)
    return environ


@contextmanager
def standalone(directory: Path, sockets: dict[str, Path]) -> Iterator[str]:
    """Run a standalone master and a worker on each of the hosts, whose daemon listens on its socket."""
    with ExitStack() as processes:
        log = directory / "master.log"
        words = ["org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        processes.enter_context(running(words, log, environment(directory, SPARK_LOCAL_IP="127.0.0.1")))
        master = awaited(log, r"Starting Spark master at (spark://\S+)")
        for host, socket in sockets.items():
            words = ["org.apache.spark.deploy.worker.Worker", "--host", host, "--webui-port", "0"]
            words += ["--cores", "2", "--memory", "2g", "--work-dir", str(directory / host), master]
            environ = environment(directory, SPARK_LOCAL_IP=host) | {"POSTROOM_SOCKET": str(socket)}
            processes.enter_context(running(words, directory / f"{host}.log", environ))
            awaited(directory / f"{host}.log", r"(Successfully registered with master)")
        yield master


@contextmanager
def running(words: list[str], log: Path, environ: dict[str, str]) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(tethered([str(SPARK_CLASS), *words]), stdout=output, stderr=output, env=environ)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def awaited(log: Path, pattern: str) -> str:
    """Return the first group once `pattern` stands in a log."""
    with subprocess.Popen(["tail", "--follow", "--lines=+1", log], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                if found := re.search(pattern, line):
                    return found[1]
        finally:
            tail.terminate()
    raise AssertionError(log.read_text())
