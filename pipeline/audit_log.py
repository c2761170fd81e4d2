"""`audit-log`: who sent what to whom, as append-only Parquet by day, and what exports of outboxes say of their rows.

    OUTPUT/history/day=2026-11-01/part.parquet      a line for each accepted message, by mesh and history_id
    OUTPUT/outbox/day=2026-11-01/part.parquet       a line for each row of an export (`postroom outbox export`)

A day is written once, when it has been over for an hour, and then stays as it is, also when retention has deleted its
messages. The bytes follow from the rows: one day rebuilt elsewhere is the same file. With `verify=true` every day that
is there is computed anew and compared. Bodies are never in it; the fingerprint says what was sent.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import IntegerType, LongType, StringType, StructType, TimestampType

from pipeline.days import DAYS, Day, write_days
from pipeline.options import Database
from pipeline.registry import Outcome
from pipeline.running import submitted
from pipeline.tables import read_ranges, snapshot

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SETTLED: Final = timedelta(hours=1)  # after which nothing of a day can still commit

_HISTORY: Final = (
    StructType()
    .add("day", StringType())
    .add("mesh", StringType())
    .add("history_id", LongType())
    .add("accepted_at", TimestampType())
    .add("broker_message_id", StringType())
    .add("client_message_id", StringType())
    .add("sender", StringType())
    .add("to", StringType())
    .add("recipients", IntegerType())
    .add("request_fingerprint", StringType())
)
_OUTBOX: Final = (
    StructType()
    .add("id", StringType())
    .add("client_message_id", StringType())
    .add("status", StringType())
    .add("destination", StringType())
    .add("priority", StringType())
    .add("enqueued_at", TimestampType())
    .add("attempts", LongType())
    .add("request_fingerprint", StringType())
    .add("last_error", StringType())
    .add("delivered_at", TimestampType())
    .add("broker_message_id", StringType())
    .add("history_id", LongType())
    .add("aborted_at", TimestampType())
    .add("aborted_by", StringType())
    .add("superseded_by", StringType())
    .add("submitted_by", StringType())
)


class Options(Database, kw_only=True):
    """What `audit-log` may be told."""

    output: Annotated[str, msgspec.Meta(description="the directory of the log, which all executors see")]
    outbox: Annotated[str | None, msgspec.Meta(description="exports of outboxes, as exports/*.ndjson")] = None
    verify: Annotated[bool, msgspec.Meta(description="compute the days that are there anew, and compare")] = False
    before: Annotated[str | None, msgspec.Meta(description="the first day that is not over [default: today]")] = None


def run(spark: SparkSession, options: Options) -> Outcome:
    """Write the days that are over; an outcome with a day that is not what it was is a failed one."""
    before = _before(options)
    with snapshot(options.database_url) as moment:
        history = read_ranges(spark, moment, "audit_rows", _HISTORY, before)
        days = _write(history, ("mesh", "history_id"), f"{options.output}/history", verify=options.verify)
    if options.outbox is not None:
        exported = _read_exports(spark, options.outbox).where(F.col("enqueued_at") < F.lit(before))
        days += _write(exported, ("enqueued_at", "id", "status"), f"{options.output}/outbox", verify=options.verify)
    counts = {what: sum(day.became == what for day in days) for what in ("written", "kept", "same", "different")}
    facts = {f"days {what}": count for what, count in counts.items() if count}
    different = [f"{day.source} of {day.day}" for day in days if day.became == "different"]
    facts["rows written"] = sum(day.rows for day in days if day.became == "written")
    return Outcome({**facts, **dict.fromkeys(different, "not what it was")}, failed=bool(different))


def _before(options: Options) -> datetime:
    """Return the moment at which the first day begins that is not over yet."""
    settled = datetime.now(UTC) - _SETTLED
    today = settled.replace(hour=0, minute=0, second=0, microsecond=0)
    return today if options.before is None else min(today, datetime.fromisoformat(options.before).replace(tzinfo=UTC))


def _read_exports(spark: SparkSession, files: str) -> DataFrame:
    """Read rows as `postroom outbox export` writes them; a row that two exports agree about is one."""
    rows = spark.read.schema(_OUTBOX).json(files).distinct()
    in_utc = F.to_utc_timestamp("enqueued_at", F.current_timezone())
    return rows.select(F.date_format(in_utc, "yyyy-MM-dd").alias("day"), "*")


def _write(rows: DataFrame, key: tuple[str, ...], directory: str, *, verify: bool) -> list[Day]:
    ordered = rows.repartition("day").sortWithinPartitions("day", *key)
    written = ordered.mapInArrow(partial(write_days, directory, verify=verify), DAYS)
    return sorted(Day(*row) for row in written.collect())


if __name__ == "__main__":
    submitted("audit-log")
