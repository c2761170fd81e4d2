"""`option("job", …)`: a write that is a job of the ledger, whoever is killed and whatever runs again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from support import crashing_write
from support.post import PostOffice
from support.write_jobs import cancel, completions, holding, in_database, shown

from postroom import Client, Conflict, InvalidMessage, PostroomError
from postroom._wire.spark import SparkTask, partition_id
from postroom.ledger.operations import start
from postroom.ledger.primitives import Start
from postroom.spark.jobs import Counts, JobOfWrite, answer
from postroom.spark.options import WritePlan, plan_write
from postroom.spark.sink import post as send

BREAK = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE application_name = 'postroom-spark' AND datname = current_database()
"""
COUNT_UP = "UPDATE ledger.activity SET ledger = 999100000000000 WHERE job_id = $1"
SENT = {"partitions": 3, "accepted": 30, "duplicate": 0, "conflict": 0, "refused": 0}
SENT_AGAIN = {"partitions": 2, "accepted": 0, "duplicate": 30, "conflict": 0, "refused": 0}


def test_a_write_is_a_job_of_its_partitions_and_completes_once_however_often_it_runs(
    spark: SparkSession, post: PostOffice
) -> None:
    job = uuid4()
    orders = spark.range(30, numPartitions=3).selectExpr("id AS order_id")
    write(orders, post, job)
    found = shown(post.database_url, job)
    write(orders.coalesce(2), post, job)
    assert (found.job.flow, found.job.mesh, found.job.state, found.job.open) == ("spark-write", "demo", "completed", 0)
    assert [(each.name, each.state, each.attempts) for each in found.activities] == [
        ("write", "done", 1),
        *[("partition", "done", 1)] * 3,
    ]
    assert shown(post.database_url, job) == found
    assert completions(post.database_url, job) == [SENT]
    assert post.accepted().keys() == {str(number) for number in range(30)}
    with Client(post.socket) as client:
        rows = [client.inspect(post.id_of(str(number))).row for number in range(30)]
    assert [SparkTask.read(row.traceparent) for row in rows] == [SparkTask("job", job.int, n // 10) for n in range(30)]


def test_a_write_that_fails_leaves_its_job_running_with_the_reason_and_goes_on_when_it_runs_again(
    spark: SparkSession, post: PostOffice
) -> None:
    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the workers do not know the modules of tests
    job = uuid4()
    orders = spark.range(30, numPartitions=3).selectExpr("id AS order_id", "'new' AS state")
    with pytest.raises(PySparkException):
        write(orders.mapInArrow(fail_one, orders.schema), post, job)
    tasks_failed = shown(post.database_url, job)
    write(orders.where("order_id = 7").selectExpr("order_id", "'old' AS state"), post)
    with pytest.raises(AnalysisException, match="order_id=7"):
        write(orders, post, job)
    one_refused = shown(post.database_url, job)
    write(orders, post, job, on_conflict=str(post.socket.parent / "conflicts"))
    assert [(found.job.state, len(found.activities)) for found in (tasks_failed, one_refused)] == [("running", 1)] * 2
    assert "tasks of the write failed" in str(tasks_failed.activities[0].error)
    assert "order_id=7" in str(one_refused.activities[0].error)
    assert [(each.state, each.error) for each in shown(post.database_url, job).activities] == [("done", None)] * 4
    assert [result["conflict"] for result in completions(post.database_url, job)] == [1]


def test_the_completion_counts_the_rows_that_were_refused_apart_from_the_conflicts(
    spark: SparkSession, post: PostOffice
) -> None:
    job = uuid4()
    orders = spark.range(4, numPartitions=2).selectExpr("id AS order_id", "if(id = 1, 'urgent', 'low') AS speed")
    write(spark.range(1).selectExpr("id AS order_id", "'now' AS speed"), post)
    reports = str(post.socket.parent / "reports")
    write(orders, post, job, priority="speed", on_conflict=reports, on_refused=reports)
    (result,) = completions(post.database_url, job)
    assert result == {"partitions": 2, "accepted": 2, "duplicate": 0, "conflict": 1, "refused": 1}


def test_a_commit_that_an_older_driver_began_without_a_count_of_refused_rows_is_finished(post: PostOffice) -> None:
    job = job_of(post)
    job.begin()
    root = UUID(str(shown(post.database_url, job.id).activities[0].id))
    kept, partitions = '[{"accepted": 7, "duplicate": 2, "conflict": 1}]', {partition_id(root, 0): '{"partition": 0}'}
    in_database(post.database_url, lambda connection: answer(connection, root, f"{job.id}/write", kept, partitions))
    job.close([Counts(10, 0, 0)])
    (result,) = completions(post.database_url, job.id)
    assert result == {"partitions": 1, "accepted": 7, "duplicate": 2, "conflict": 1, "refused": 0}


def test_a_job_that_cannot_be_this_writes_is_refused_before_a_row_is_sent(
    spark: SparkSession, post: PostOffice
) -> None:
    orders = spark.range(3).selectExpr("id AS order_id")
    nightly, cancelled = uuid4(), job_of(post)
    root = Start(nightly, "demo", "nightly-export", uuid4(), "extract")
    in_database(post.database_url, lambda connection: start(connection, root))
    with pytest.raises(AnalysisException, match="belongs to the flow 'nightly-export'"):
        write(orders, post, nightly)
    cancelled.begin()
    with pytest.raises(AnalysisException, match="belongs to another write"):
        write(orders, post, cancelled.id, namespace="another")
    cancel(post.database_url, cancelled.id)
    with pytest.raises(AnalysisException, match="was cancelled permanently"):
        write(orders, post, cancelled.id)
    with pytest.raises(AnalysisException, match="there is no mesh 'sea'"):
        write(orders, post, uuid4(), mesh="sea")
    assert post.accepted() == {}


def test_a_job_is_of_the_mesh_that_the_daemons_serve(post: PostOffice) -> None:
    plan = plan_of(post, mesh="sea")
    with pytest.raises(InvalidMessage, match="serves the mesh 'demo', but the job is in 'sea'"):
        send(plan, iter([pa.record_batch({"order_id": [1]})]), SparkTask("job", 1, 0))
    assert post.accepted() == {}


def test_a_job_that_is_cancelled_while_its_rows_are_sent_does_not_complete(post: PostOffice) -> None:
    job = job_of(post)
    job.begin()
    cancel(post.database_url, job.id)
    with pytest.raises(Conflict, match="was cancelled"):
        job.close([Counts(10, 0, 0)])
    job.note_failure("it was cancelled")
    assert completions(post.database_url, job.id) == []


def test_two_drivers_of_one_job_both_succeed_and_complete_it_once(post: PostOffice) -> None:
    job = job_of(post)

    def run(partitions: int) -> None:
        job.begin()
        job.close([Counts(10, 0, 0)] * partitions)

    with ThreadPoolExecutor(2) as drivers:
        list(drivers.map(run, (30, 20)))
    (result,) = completions(post.database_url, job.id)
    assert result["accepted"] in {200, 300}
    assert {activity.state for activity in shown(post.database_url, job.id).activities} == {"done"}


def test_a_driver_whose_connection_breaks_while_it_commits_goes_on_with_another(post: PostOffice) -> None:
    job = job_of(post)
    job.begin()
    with ThreadPoolExecutor(1) as driver:
        with holding(post.database_url, job.id, place=2) as committing:
            closing = driver.submit(job.close, [Counts(10, 0, 0)] * 3)
            committing()
            in_database(post.database_url, lambda connection: connection.execute(BREAK))
        closing.result()
    assert completions(post.database_url, job.id) == [SENT]


def test_a_job_that_was_begun_as_often_as_its_ledger_can_count_has_failed(post: PostOffice) -> None:
    job = job_of(post)
    job.begin()
    in_database(post.database_url, lambda connection: connection.execute(COUNT_UP, job.id))
    with pytest.raises(Conflict, match=r"begun 999 times under this job.*: run it under another job"):
        job.begin()
    with pytest.raises(Conflict, match=r"the job is failed .*: write under another job"):
        job.begin()
    found = shown(post.database_url, job.id)
    assert (found.job.state, found.activities[0].state) == ("failed", "failed")
    assert "begun 999 times" in str(found.job.error)


def test_a_database_without_jobs_is_told_how_to_get_them(post: PostOffice, database_url: str) -> None:
    plan = plan_of(post, database_url=database_url)
    assert plan.job is not None
    with pytest.raises(
        PostroomError, match=r"not the broker's database, or .*: name the broker's in database_url, or run `postroom"
    ):
        JobOfWrite(plan, plan.job).begin()


def test_a_driver_that_is_killed_after_any_statement_leaves_a_job_that_the_next_run_completes_once(
    post: PostOffice,
) -> None:
    command = [sys.executable, crashing_write.__file__, post.database_url]
    jobs = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    results = [completions(post.database_url, UUID(job)) for job in jobs]
    assert [SENT] in results
    assert [SENT_AGAIN] in results
    for job, result in zip(jobs, results, strict=True):
        assert result in ([SENT], [SENT_AGAIN])
        states = [activity.state for activity in shown(post.database_url, UUID(job)).activities]
        assert states == ["done"] * (1 + result[0]["partitions"])


def fail_one(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        if 7 in batch.column("order_id").to_pylist():
            raise OSError("this task fails on purpose")
        yield batch


def write(rows: DataFrame, post: PostOffice, job: UUID | None = None, **options: str) -> None:
    given = {} if job is None else {"job": str(job), "mesh": "demo", "database_url": post.database_url}
    rows.write.format("postroom").options(**post.options(**given | options)).mode("append").save()


def job_of(post: PostOffice) -> JobOfWrite:
    """A job of this test's writes, without Spark."""
    plan = plan_of(post)
    assert plan.job is not None
    return JobOfWrite(plan, plan.job)


def plan_of(post: PostOffice, **options: str) -> WritePlan:
    given = {"job": str(uuid4()), "mesh": "demo", "database_url": post.database_url}
    return plan_write(post.options(**given | options), crashing_write.ROWS)
