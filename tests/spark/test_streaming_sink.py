"""`df.writeStream.format("postroom")`: a query that ends half-way and starts again from its checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructType
from support.post import PostOffice

from postroom import Client, InvalidMessage
from postroom._wire.spark import SparkTask
from postroom.spark.sink import stream_sink


def test_a_stream_that_starts_again_from_its_checkpoint_sends_each_row_once(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    source, checkpoint = tmp_path / "orders", tmp_path / "checkpoint"
    spark.range(0, 30, numPartitions=3).selectExpr("id AS order_id").write.parquet(str(source))
    run(spark, post, source, checkpoint)
    crash_before_commit(checkpoint)
    spark.range(30, 40).selectExpr("id AS order_id").write.mode("append").parquet(str(source))
    run(spark, post, source, checkpoint)
    assert post.accepted().keys() == {str(number) for number in range(40)}
    with Client(post.socket) as client:
        tasks = [SparkTask.read(client.inspect(post.id_of(str(number))).row.traceparent) for number in range(40)]
    written = [task.write.rpartition("-") for task in tasks if task is not None]
    assert len({stream for stream, _, _ in written}) == 1
    assert {batch for _, _, batch in written} >= {"0", "1"}  # a file is a micro-batch


def test_a_stream_ends_with_the_reason_when_it_cannot_work(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    source = tmp_path / "orders"
    spark.range(1).selectExpr("id AS order_id").write.parquet(str(source))
    with pytest.raises(StreamingQueryException, match="`number` of the option `id` is not a column"):
        run(spark, post, source, tmp_path / "checkpoint", id="number")


def test_a_micro_batch_whose_tasks_do_not_report_is_no_success(post: PostOffice) -> None:
    """Spark commits so for the trigger `continuous`, for which it drops the rows."""
    sink = stream_sink(post.options(), StructType().add("order_id", LongType()), overwrite=False)
    with pytest.raises(InvalidMessage, match="use the trigger processingTime or availableNow"):
        sink.commit([None, None], 0)


def test_streams_that_share_a_directory_keep_their_conflicts_apart(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    sent = spark.range(4).selectExpr("id AS order_id", "'sent before' AS state")
    sent.write.format("postroom").options(**post.options()).mode("append").save()
    conflicts = tmp_path / "conflicts"
    for name, numbers in (("a", (0, 2)), ("b", (2, 4))):
        spark.range(*numbers).coalesce(1).selectExpr("id AS order_id").write.parquet(str(tmp_path / name))
        run(spark, post, tmp_path / name, tmp_path / f"{name}-checkpoint", on_conflict=str(conflicts))
    first = {file.name: keys(file) for file in conflicts.iterdir()}
    crash_before_commit(tmp_path / "a-checkpoint")
    run(spark, post, tmp_path / "a", tmp_path / "a-checkpoint", on_conflict=str(conflicts))

    assert sorted(first.values()) == [["0", "1"], ["2", "3"]]
    assert {file.name: keys(file) for file in conflicts.iterdir()} == first


def test_a_stream_with_a_new_checkpoint_keeps_the_reports_of_the_one_before(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    sent = spark.range(2).selectExpr("id AS order_id", "'sent before' AS state")
    sent.write.format("postroom").options(**post.options()).mode("append").save()
    conflicts, checkpoint = tmp_path / "conflicts", tmp_path / "checkpoint"
    for number in range(2):
        source = tmp_path / f"source-{number}"
        spark.range(number, number + 1).coalesce(1).selectExpr("id AS order_id").write.parquet(str(source))
        run(spark, post, source, checkpoint, on_conflict=str(conflicts))
        shutil.rmtree(checkpoint)

    assert sorted(keys(file) for file in conflicts.iterdir()) == [["0"], ["1"]]


def keys(file: Path) -> list[str]:
    return sorted(json.loads(line)["key"]["order_id"] for line in file.read_text().splitlines())


def run(spark: SparkSession, post: PostOffice, source: Path, checkpoint: Path, **options: str) -> None:
    """Send what lies in `source` and was not sent by this query before, a file at a time."""
    orders = spark.readStream.schema("order_id long").option("maxFilesPerTrigger", 1).parquet(str(source))
    query = (
        orders.writeStream.format("postroom")
        .queryName("orders")
        .options(**post.options(**options), checkpointLocation=str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


def crash_before_commit(checkpoint: Path) -> None:
    """Leave the checkpoint as a crash does after the sink has the last micro-batch and before Spark notes so."""
    last = max((file for file in (checkpoint / "commits").iterdir() if file.name.isdigit()), key=lambda f: int(f.name))
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
