"""`audit-log`: senders, destinations and fingerprints by day, as append-only Parquet, and the rows of outbox exports.

    OUTPUT/history/day=2026-11-01/part.parquet      a line for each accepted message, by mesh and history_id
    OUTPUT/outbox/day=2026-11-01/part.parquet       a line for each row of an export (`postroom outbox export`)

A day is written once, an hour after its end, and then stays as it is. The bytes follow from the rows: one day rebuilt
elsewhere is the same file. A day of which retention has deleted messages is neither written nor compared, since what is
left of it would pass for the whole. It never has bodies, only their fingerprints.
"""

import filecmp
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from pipeline.runner import Database, Outcome, draft, local_directory, moment, submitted, sweep
from pipeline.tables import QUERIES, columns, read_ranges, snapshot
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import put_new

_GROUP_ROWS: Final = 65_536  # of a row group
DAYS: Final = columns("source string, day string, rows long, became string")
_SETTLED: Final = timedelta(hours=1)  # after which nothing of a day can still commit

_SENTENCES: Final = {
    "different": "not what it was",
    "missed": "not written: retention has deleted messages of it",
    "unverified": "not compared: retention has deleted messages of it",
}
_HISTORY: Final = columns(
    "day string, mesh string, history_id long, accepted_at timestamp, broker_message_id string, "
    "client_message_id string, sender string, to string, recipients integer, request_fingerprint string"
)
_OUTBOX: Final = columns(
    "id string, client_message_id string, status string, destination string, priority string, enqueued_at timestamp, "
    "attempts long, request_fingerprint string, last_error string, delivered_at timestamp, broker_message_id string, "
    "history_id long, aborted_at timestamp, aborted_by string, superseded_by string, submitted_by string"
)


class Day(NamedTuple):
    """A day, and what became of it.

    It was `written`, `kept` unread, or found to be the `same` or `different`. Where retention has deleted messages of
    it, it is `unverified`, or `missed` where it had not been written before.
    """

    source: str
    day: str
    rows: int
    became: str


def write_days(
    directory: Path, batches: Iterator[pa.RecordBatch], *, verify: bool, deleted_to: str = ""
) -> Iterator[pa.RecordBatch]:
    """Write the rows of each day, which come one day after the other; yield a row of `DAYS` for each.

    Days up to `deleted_to` are no longer whole. Row groups have one size, wherever Spark's batches end, and a file gets
    its name when it is complete: a task that runs twice writes the same bytes, and the second time finds the file.
    """
    for day, parts in groupby(_by_day(batches), key=lambda part: part[0]):
        done = _write_day(directory, day, (rows for _, rows in parts), verify=verify, is_whole=day > deleted_to)
        yield pa.RecordBatch.from_pylist([done._asdict()])


def _by_day(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Split batches where the day changes; the column `day` is then in the name of the directory."""
    for batch in batches:
        days = batch.column("day").to_pylist()
        rest = batch.drop_columns(["day"])
        start = 0
        for day, rows in groupby(days):
            length = sum(1 for _ in rows)
            yield day, rest.slice(start, length)
            start += length


def _write_day(directory: Path, day: str, parts: Iterator[pa.RecordBatch], *, verify: bool, is_whole: bool) -> Day:
    final = directory / f"day={day}" / "part.parquet"
    sweep(final.parent)
    if (is_there := final.exists()) and not verify:
        return Day(directory.name, day, sum(part.num_rows for part in parts), "kept")
    if not is_whole:
        return Day(directory.name, day, sum(part.num_rows for part in parts), "unverified" if is_there else "missed")
    final.parent.mkdir(parents=True, exist_ok=True)
    with draft(final.parent) as fresh:
        first = next(parts)
        waiting = pa.Table.from_batches([first]).replace_schema_metadata(None)
        rows = int(first.num_rows)
        with parquet.ParquetWriter(fresh, waiting.schema, compression="zstd") as writer:
            for part in parts:
                waiting = pa.concat_tables([waiting, pa.Table.from_batches([part]).replace_schema_metadata(None)])
                rows += part.num_rows
                while waiting.num_rows >= _GROUP_ROWS:
                    writer.write_table(waiting.slice(0, _GROUP_ROWS).combine_chunks(), _GROUP_ROWS)
                    waiting = waiting.slice(_GROUP_ROWS)
            writer.write_table(waiting.combine_chunks(), _GROUP_ROWS)
        try:
            put_new(fresh, final)
            became = "written"
        except FileExistsError:
            became = "same" if filecmp.cmp(fresh, final, shallow=False) else "different"
        return Day(directory.name, day, rows, became)


class Options(Database, kw_only=True):
    """The options of `audit-log`."""

    output: Annotated[str, msgspec.Meta(description="the directory of the log, which all executors see")]
    outbox: Annotated[str | None, msgspec.Meta(description="exports of outboxes, as exports/*.ndjson")] = None
    verify: Annotated[bool, msgspec.Meta(description="recompute the existing days, and compare")] = False
    before: Annotated[str | None, msgspec.Meta(description="the first day that is not over [default: today]")] = None


def run(spark: SparkSession, options: Options) -> Outcome:
    """Write the days that are over; the outcome has failed where a day is not what it was, or no longer whole."""
    output = local_directory(options.output)
    ends = moment(options.before, "before")
    with snapshot(options.database_url) as taken:
        settled = taken.now - _SETTLED
        last = min(settled, ends or settled)
        before = last.replace(hour=0, minute=0, second=0, microsecond=0)  # what is written of a day is never completed
        history = read_ranges(spark, taken, "audit_rows", _HISTORY, None, before)
        ((deleted,),) = taken.fetch(QUERIES["deleted_to"])
        deleted_to = "" if deleted is None else f"{deleted:%Y-%m-%d}"
        days = _write(history, ("mesh", "history_id"), output / "history", options, deleted_to)
    if options.outbox is not None:
        # read rows as `postroom outbox export` writes them, and no column from the name of a directory; a row that two
        # exports agree about is one; a damaged one ends the pipeline, since a day that lacks it would stay so
        rows = spark.read.schema(_OUTBOX).json(options.outbox, mode="FAILFAST", recursiveFileLookup=True)
        if not rows.inputFiles():
            detail = f"no export is in {options.outbox}; Spark passes over files whose names begin with `.` or `_`"
            raise Fatal(Exit.IO_ERROR, detail)
        no_row = F.concat(F.input_file_name(), F.lit(" has a line that is no row of an export: it has no enqueued_at"))
        rows = rows.withColumn("enqueued_at", F.coalesce("enqueued_at", F.raise_error(no_row))).distinct()
        in_utc = F.to_utc_timestamp("enqueued_at", F.current_timezone())
        exported = rows.select(F.date_format(in_utc, "yyyy-MM-dd").alias("day"), "*").where(
            F.col("enqueued_at") < F.lit(before)
        )
        days += _write(exported, ("enqueued_at", "id", "status"), output / "outbox", options)
    counts = {what: sum(day.became == what for day in days) for what in ("written", "kept", "same", *_SENTENCES)}
    facts = {f"days {what}": count for what, count in counts.items() if count}
    said = {f"{day.source} of {day.day}": _SENTENCES[day.became] for day in days if day.became in _SENTENCES}
    facts["rows written"] = sum(day.rows for day in days if day.became == "written")
    return Outcome({**facts, **said}, failed=bool(counts["different"] or counts["missed"]))


def _write(rows: DataFrame, key: tuple[str, ...], directory: Path, options: Options, deleted_to: str = "") -> list[Day]:
    ordered = rows.repartition("day").sortWithinPartitions("day", *key)
    written = ordered.mapInArrow(partial(write_days, directory, verify=options.verify, deleted_to=deleted_to), DAYS)
    return sorted(Day(*row) for row in written.collect())


if __name__ == "__main__":
    submitted("audit-log")
