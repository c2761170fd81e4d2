"""`backfill`: sends every row of a Parquet, CSV or JSON data set through the daemon of each executor's host.

It uses `df.write.format("postroom")` (docs/spark.md). The id columns make a second run harmless: the same rows get the
same ids, and are duplicates.
"""

import re
from typing import Annotated, Final, Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession

from pipeline.runner import Outcome, Struct, own_sentences, submitted
from postroom.chassis.exits import Fatal
from postroom.spark.formats import Sink

_OF_ENDING: Final = {"csv": "csv", "json": "json", "ndjson": "json", "jsonl": "json", "parquet": "parquet"}
_NOT_PARQUET: Final = re.compile(r"(\S+) is not a Parquet file")
_OF_READING: Final = frozenset({"input", "format"})
_RFC_4180: Final = {"header": "true", "escape": '"', "multiLine": "true"}
# How Spark reads each format. Whatever the mode, it empties a column of the data that has its name for damaged records.
_STRICT: Final = {"mode": "FAILFAST", "columnNameOfCorruptRecord": "(a record that cannot be read)"}
_UNNAMED: Final = re.compile(r"_c\d+")  # Spark's name of a column without one, such as the index that pandas writes


class Options(Struct, kw_only=True):
    """The options of `backfill`; all but the first two are options of the sink."""

    input: Annotated[str, msgspec.Meta(description="the data: a file, a directory or a pattern")]
    format: Annotated[
        Literal["parquet", "csv", "json"] | None,
        msgspec.Meta(description="its format [default: by its ending, else parquet]"),
    ] = None
    id: Annotated[str, msgspec.Meta(description="the column, or columns with commas, that name a row")]
    to: Annotated[str | None, msgspec.Meta(description="the destination of all rows, as topic:orders")] = None
    to_column: Annotated[str | None, msgspec.Meta(description="or the column with each row's destination")] = None
    body: Annotated[str | None, msgspec.Meta(description="the column with the body [default: the row as JSON]")] = None
    meta: Annotated[str | None, msgspec.Meta(description="the column with the meta")] = None
    priority: Annotated[str | None, msgspec.Meta(description="now, next or low, or a column")] = None
    socket: Annotated[str | None, msgspec.Meta(description="the daemon's socket on every host")] = None
    namespace: Annotated[str | None, msgspec.Meta(description="a prefix that keeps these ids apart from others")] = None
    wait: Annotated[
        Literal["queued", "accepted"] | None, msgspec.Meta(description="wait for `queued` or `accepted`")
    ] = None
    on_conflict: Annotated[str | None, msgspec.Meta(description="fail, or a directory for the keys of conflicts")] = (
        None
    )
    on_refused: Annotated[str | None, msgspec.Meta(description="fail, or a directory for the refused rows")] = None


def run(spark: SparkSession, options: Options) -> Outcome:
    """Send the rows; raises what the sink raises, and a second run goes on where it stopped."""
    spark.dataSource.register(Sink)
    rows = read(spark, options)
    given = msgspec.structs.asdict(options)
    chosen = {name: value for name, value in given.items() if value is not None and name not in _OF_READING}
    rows.write.format(Sink.name()).options(**chosen).mode("append").save()
    return Outcome({"rows": rows.count(), "to": options.to or f"the destinations in {options.to_column}"})


def read(spark: SparkSession, options: Options) -> DataFrame:
    """Read the data set, with the columns of all its files; a row that cannot be read ends the pipeline.

    CSV is by RFC 4180, with a header and as text.
    """
    ending = options.input.rstrip("/").removesuffix(".gz").rpartition(".")[2].lower()
    said = options.format or _OF_ENDING.get(ending)
    kind = said or "parquet"
    chosen = {"csv": _RFC_4180, "parquet": {"mergeSchema": "true"}}.get(kind, {})  # else the columns of one file alone
    reading = spark.read.format(kind).options(**_STRICT, **chosen)
    try:
        with own_sentences():
            rows = reading.load(options.input)
    except Fatal as error:
        if said is not None or (found := _NOT_PARQUET.search(str(error))) is None:
            raise
        assumed = f"{options.input} has no ending that says its format, so it was read as Parquet"
        raise Fatal(error.exit_code, f"{assumed}, which {found[1]} is not: give format=csv or format=json") from error
    if kind != "csv" or any(map(_UNNAMED.fullmatch, rows.columns)):
        return rows
    # else Spark would take the columns of each further file by their place, and rename those with one name
    return reading.schema(rows.schema).option("enforceSchema", "false").load(options.input)


if __name__ == "__main__":
    submitted("backfill")
