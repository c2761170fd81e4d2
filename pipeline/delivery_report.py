"""`delivery-report`: how long deliveries took, as percentiles by mesh, destination, stage and day, and as a picture.

Two stages are measured, each from the accept on: until a message was `published` into JetStream, and until a consumer
had `handled` it. Writes OUTPUT/latency.parquet and OUTPUT/latency.png, both anew each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import msgspec
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
from pyspark.sql.types import DoubleType, StringType, StructType

from pipeline.registry import History, Outcome, moment
from pipeline.runner import submitted
from pipeline.tables import read_ranges, snapshot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS: Final = (
    StructType()
    .add("day", StringType())
    .add("mesh", StringType())
    .add("to", StringType())
    .add("stage", StringType())
    .add("milliseconds", DoubleType())
)
_PERCENTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


class Latency(NamedTuple):
    """What one day's deliveries to one destination took; percentiles in milliseconds."""

    mesh: str
    to: str
    stage: str
    day: str
    deliveries: int
    p50: float
    p90: float
    p99: float


class Options(History, kw_only=True):
    """The options of `delivery-report`."""

    output: Annotated[str, msgspec.Meta(description="the directory for latency.parquet and latency.png")]


def run(spark: SparkSession, options: Options) -> Outcome:
    """Measure, write the table, draw the picture."""
    from pipeline.delivery_plot import draw  # noqa: PLC0415 - matplotlib is slow to import

    latencies = measure(spark, options)
    directory = Path(options.output)
    directory.mkdir(parents=True, exist_ok=True)
    picture = directory / "latency.png"
    with _replaced(directory / "latency.parquet") as fresh:
        import pyarrow as pa  # noqa: PLC0415 - of the extra `pipeline`
        from pyarrow import parquet  # noqa: PLC0415

        schema = pa.schema(
            [(name, pa.string()) for name in ("mesh", "to", "stage", "day")]
            + [("deliveries", pa.int64())]
            + [(name, pa.float64()) for name in ("p50", "p90", "p99")]
        )
        parquet.write_table(pa.Table.from_pylist([line._asdict() for line in latencies], schema=schema), fresh)
    with _replaced(picture) as fresh:
        draw(latencies, fresh)
    slowest = {
        f"{line.to} {line.stage} on {line.day}": f"p50 {line.p50:.1f} ms, p99 {line.p99:.1f} ms"
        for line in sorted(latencies, key=lambda line: -line.p99)[:3]
    }
    deliveries = sum(line.deliveries for line in latencies if line.stage == "published")
    return Outcome({"deliveries": deliveries, **slowest, "picture": str(picture)})


def measure(spark: SparkSession, options: Options) -> list[Latency]:
    """Return the percentiles, by mesh, destination, stage and day."""
    with snapshot(options.database_url) as held:
        since, until = moment(options.since, "since"), moment(options.until, "until")
        rows = read_ranges(spark, held, "latency_rows", _ROWS, since, until)
        wanted = rows if options.mesh is None else rows.where(rows["mesh"] == options.mesh)
        days = wanted.groupBy("mesh", "to", "stage", "day")
        percentiles = [F.percentile("milliseconds", share).alias(name) for name, share in _PERCENTILES]
        found = days.agg(F.count("*").alias("deliveries"), *percentiles).orderBy("mesh", "to", "stage", "day")
        return [Latency(*row) for row in found.collect()]


@contextmanager
def _replaced(file: Path) -> Iterator[Path]:
    """Lend a path to write to, and give the file its name when it is whole: until then the old one stays."""
    fresh = file.with_name(f".{file.name}")
    yield fresh
    fresh.replace(file)


if __name__ == "__main__":
    submitted("delivery-report")
