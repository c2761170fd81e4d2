"""`df.write.format("postroom")`: real Spark, a real daemon and broker, counted in Postgres."""

from __future__ import annotations

import base64
import json
import statistics
import time
from pathlib import Path

import pytest
from pyspark import cloudpickle
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from support import rough_write
from support.post import PostOffice


def test_each_row_becomes_one_message_that_holds_it_as_json(spark: SparkSession, post: PostOffice) -> None:
    row = """
        SELECT 1L AS order_id, 'Grüße' AS text, true AS yes, 1.5D AS ratio, double('NaN') AS nan, 12.30BD AS amount,
        timestamp'2026-11-21 05:30:00' AS at, timestamp_ntz'2026-11-21 05:30:00' AS local, date'2026-11-21' AS day,
        named_struct('at', timestamp'2026-11-21 05:30:00', 'amounts', array(1.10BD, null)) AS nested,
        map(7, double('Infinity')) AS map, cast('ab' AS binary) AS bytes, cast(null AS string) AS nothing
    """
    write(spark.sql(row), post)
    assert post.accepted()["1"].json == {
        "order_id": 1,
        "text": "Grüße",
        "yes": True,
        "ratio": 1.5,
        "nan": "NaN",
        "amount": "12.30",
        "at": "2026-11-21T00:00:00Z",  # the session is in India
        "local": "2026-11-21T05:30:00",
        "day": "2026-11-21",
        "nested": {"at": "2026-11-21T00:00:00Z", "amounts": ["1.10", None]},
        "map": {"7": "Infinity"},
        "bytes": base64.b64encode(b"ab").decode(),
        "nothing": None,
    }


def test_columns_say_body_meta_priority_and_destination(spark: SparkSession, post: PostOffice) -> None:
    rows = spark.sql(
        """
        SELECT 1 AS order_id, 'a' AS line, 'hello' AS body, named_struct('day', date'2026-11-21') AS about,
               'now' AS urgency, 'topic:orders' AS destination
        """
    )
    options = post.options(id="order_id, line", body="body", meta="about", priority="urgency", to_column="destination")
    del options["to"]
    rows.write.format("postroom").options(**options).mode("append").save()
    (message,) = post.accepted().values()
    assert post.accepted().keys() == {"1:a"}
    assert (message.body, message.meta, message.priority) == (b"hello", {"day": "2026-11-21"}, "now")


def test_the_same_write_again_is_all_duplicates_and_a_changed_row_is_reported(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    orders = spark.range(50, numPartitions=2).selectExpr("id AS order_id", "'new' AS state")
    changed = orders.selectExpr("order_id", "if(order_id = 17, 'changed', state) AS state")
    conflicts = tmp_path / "conflicts"
    write(orders, post, wait="accepted")
    write(orders.repartition(3), post)
    with pytest.raises(AnalysisException, match=r"the id of 1 row was used before .*order_id=17:"):
        write(changed, post)
    write(changed, post, on_conflict=str(conflicts))
    write(changed, post, on_conflict=f"file:{conflicts}")  # a URI, as Hadoop and Spark show a path
    assert {message.json["state"] for message in post.accepted().values()} == {"new"}
    reports = [json.loads(line) for file in conflicts.iterdir() for line in file.read_text().splitlines()]
    told = [(report["key"], report["client_message_id"]) for report in reports]
    assert told == [({"order_id": "17"}, post.id_of("17"))] * 2


def test_tasks_that_fail_after_posting_a_part_lose_nothing_and_repeat_nothing(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    cloudpickle.register_pickle_by_value(rough_write)  # the workers do not know the modules of tests
    spark.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "100")
    try:
        orders = spark.range(2400, numPartitions=4).selectExpr("id AS order_id", rough_write.FILLER)
        spoil = rough_write.rough(tmp_path, post.namespace, str(post.socket), speculates=False)
        write(orders.mapInArrow(spoil, rough_write.COLUMNS), post, body="order_id")
    finally:
        spark.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert {note.name for note in tmp_path.iterdir()} == {"0-0", "1-0", "2-0", "3-0", "3-1"}
    assert post.accepted().keys() == {str(number) for number in range(2400)}


def test_a_row_that_the_daemon_refuses_fails_the_write_with_its_key_and_the_others_are_sent(
    spark: SparkSession, post: PostOffice
) -> None:
    rows = spark.range(3).selectExpr("id AS order_id", "if(id = 1, 'shout', 'low') AS urgency")
    with pytest.raises(AnalysisException, match=r"1 row not sent: order_id=1: .*priority"):
        write(rows, post, priority="urgency")
    assert post.accepted().keys() == {"0", "2"}


def test_a_message_that_dies_at_the_broker_is_seen_by_a_write_that_waits_for_it(
    spark: SparkSession, post: PostOffice
) -> None:
    with pytest.raises(AnalysisException, match=r"1 row not sent: order_id=0: .*there is no topic:nowhere"):
        write(spark.range(1).selectExpr("id AS order_id"), post, to="topic:nowhere", wait="accepted")


def test_refused_rows_go_to_a_directory_and_the_others_are_sent(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    rows = spark.sql(
        "SELECT * FROM VALUES (1, 'topic:orders'), (2, 'topic:nowhere'), (3, null), (null, 'topic:orders'), "
        "(4, 'shop'), (5, 'topic:orders') AS rows (order_id, target)"
    )
    options = post.options(to_column="target", wait="accepted", on_refused=str(tmp_path), on_conflict=str(tmp_path))
    del options["to"]
    rows.coalesce(1).write.format("postroom").options(**options).mode("append").save()
    (file,) = tmp_path.iterdir()
    report = [json.loads(line) for line in file.read_text().splitlines()]

    assert post.accepted().keys() == {"1", "5"}
    refused = {(line["key"] or {}).get("order_id"): line["detail"] for line in report}
    assert refused.keys() == {"2", "3", "4", None}
    assert "there is no topic:nowhere" in refused["2"]
    assert "its `target` is null" in refused["3"]
    assert "It is row 4 of the partition 0, with target='topic:orders'" in refused[None]


def test_a_task_with_more_than_10_000_rows_that_were_not_sent_fails_and_asks_for_the_namespace_of_conflicts_alone(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    options = post.options(to_column="target", on_refused=str(tmp_path), on_conflict=str(tmp_path))
    del options["to"]

    def fails(rows: DataFrame) -> str:
        with pytest.raises(PySparkException) as failed:
            rows.write.format("postroom").options(**options).mode("append").save()
        return next(line for line in str(failed.value).splitlines() if "rows of this task were not sent" in line)

    nowhere = spark.range(10_001, numPartitions=1).selectExpr("id AS order_id", "cast(null AS string) AS target")
    nowhere.where("order_id > 0").write.format("postroom").options(**options).mode("append").save()
    (file,) = tmp_path.iterdir()
    assert len(file.read_text().splitlines()) == 10_000
    assert fails(nowhere).endswith("the row order_id=0 has no destination: its `target` is null")

    orders = nowhere.selectExpr("order_id", "'topic:orders' AS target", "'new' AS state")
    orders.write.format("postroom").options(**options).mode("append").save()
    changed = orders.selectExpr("order_id", "target", "'old' AS state")
    assert fails(changed).endswith(f"Does another write use the namespace {post.namespace!r}?")


@pytest.mark.soak
def test_waiting_for_the_broker_takes_at_most_twice_as_long_as_not_waiting(
    spark: SparkSession, post: PostOffice
) -> None:
    def rate(wait: str, run: int) -> float:
        namespace = f"{post.namespace} {wait} {run}"
        orders = spark.range(5_000, numPartitions=2).selectExpr("id AS order_id", "repeat('x', 1000) AS body")
        began = time.perf_counter()
        write(orders, post, wait=wait, body="body", namespace=namespace)
        return 5_000 / (time.perf_counter() - began)

    rate("accepted", 0)
    pairs = []
    for run in range(1, 4):
        queued = rate("queued", run)
        post.accepted()  # nothing of it is left to relay
        pairs.append((rate("accepted", run), queued))
    print(pairs)  # noqa: T201 - the rates
    assert statistics.median(accepted / queued for accepted, queued in pairs) >= 0.5


def test_an_id_sent_through_two_hosts_is_accepted_once(spark: SparkSession, post: PostOffice) -> None:
    orders = spark.range(20, numPartitions=2).selectExpr("id AS order_id", "'same' AS state")
    changed = orders.where("order_id = 7").selectExpr("order_id", "'other' AS state")
    post.open_other()
    write(orders, post, wait="accepted")
    write(orders, post, socket=str(post.other_socket), wait="accepted")
    assert {key: message.json["state"] for key, message in post.accepted().items()} == dict.fromkeys(
        map(str, range(20)), "same"
    )
    with pytest.raises(AnalysisException, match=r"the id of 1 row was used before .*order_id=7:"):
        write(changed, post, socket=str(post.other_socket), namespace=post.namespace, wait="accepted")


def test_a_conflict_that_the_broker_finds_is_one_to_a_later_attempt_too(
    spark: SparkSession, post: PostOffice, tmp_path: Path
) -> None:
    """To the daemon that sent it, a message that died of it is no other message under its id, but the same."""
    post.open_other()
    write(spark.range(3).selectExpr("id AS order_id", "'new' AS state"), post, wait="accepted")
    changed = spark.range(3).selectExpr("id AS order_id", "if(id = 1, 'changed', 'new') AS state")
    options = {"socket": str(post.other_socket), "on_conflict": str(tmp_path), "wait": "accepted"}
    for _ in range(2):
        write(changed, post, **options)
    first, again = [json.loads(file.read_text()) for file in sorted(tmp_path.iterdir())]
    assert first["key"] == again["key"] == {"order_id": "1"}
    assert (first["code"], first["detail"]) == (again["code"], again["detail"])


def test_a_write_that_cannot_work_is_refused_before_a_row_is_sent(spark: SparkSession, post: PostOffice) -> None:
    rows = spark.range(3).selectExpr("id AS order_id")
    with pytest.raises(AnalysisException, match="set the option `id`"):
        write(rows, post, id="")
    with pytest.raises(AnalysisException, match="is not a column"):
        write(rows, post, body="text")
    with pytest.raises(AnalysisException, match=r'mode\("append"\)'):
        rows.write.format("postroom").options(**post.options()).mode("overwrite").save()
    with pytest.raises(AnalysisException, match="postroom_history"):
        spark.read.format("postroom").load()
    assert post.accepted() == {}


def write(rows: DataFrame, post: PostOffice, **options: str) -> None:
    rows.write.format("postroom").options(**post.options(**options)).mode("append").save()


def test_sql_writes_into_a_view_or_with_the_options_of_its_statement(spark: SparkSession, post: PostOffice) -> None:
    options = ", ".join(f"`{name}` '{value}'" for name, value in post.options().items())
    spark.sql(f"CREATE TEMPORARY VIEW sent (order_id BIGINT, state STRING) USING postroom OPTIONS ({options})")
    spark.sql("CREATE TABLE sent_too (order_id BIGINT, state STRING) USING postroom")
    try:
        spark.sql("INSERT INTO sent VALUES (1, 'new')")
        with_options = f"WITH ({options.replace('` ', '` = ')})"
        spark.sql(f"INSERT INTO sent_too {with_options} VALUES (2, 'new')")  # noqa: S608 - our own options
        with pytest.raises(AnalysisException, match=r"no options.*in SQL: write CREATE TEMPORARY VIEW"):
            spark.sql("INSERT INTO sent_too VALUES (3, 'new')")
        with pytest.raises(AnalysisException, match="is for writing"):
            spark.sql("SELECT * FROM sent_too").collect()
    finally:
        spark.sql("DROP TABLE sent_too")
        spark.catalog.dropTempView("sent")
    assert post.accepted().keys() == {"1", "2"}
