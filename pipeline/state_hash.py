"""`state-hash`: the chain of hashes of every agent's event store, recomputed and compared with the recorded one.

Each chain is computed by one task, with the code of `postroom agent verify`; stores are processed in parallel. The
files are only read; on a cluster they have to be where the executors see them.
"""

import asyncio
from collections.abc import Iterable, Iterator
from glob import glob
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from pyarrow import parquet
from pyspark.sql import SparkSession

from pipeline.runner import Outcome, Struct, local_directory, replacement, submitted, sweep
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.agents.replay import verify

_COLUMNS: Final = (
    "store STRING, agent STRING, tenant STRING, workspace STRING, position LONG, state_hash STRING, why STRING"
)


class Options(Struct, kw_only=True):
    """The options of `state-hash`."""

    stores: Annotated[str, msgspec.Meta(description="the event stores, as /var/lib/postroom/agents/**/events.db")]
    output: Annotated[str | None, msgspec.Meta(description="a directory for state-hash.parquet, which is replaced")] = (
        None
    )


def run(spark: SparkSession, options: Options) -> Outcome:
    """Verify each store; the outcome has failed where one was altered, or cannot be read."""
    directory = None if options.output is None else local_directory(options.output)
    stores = sorted(glob(options.stores, recursive=True))  # noqa: PTH207 - the pattern may be absolute
    if not stores:
        raise Fatal(Exit.NOT_FOUND, f"no event store matches {options.stores}: pass where they are with stores=PATTERN")
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)  # before the verifying, which may take long
        sweep(directory)
    frame = spark.createDataFrame([(store,) for store in stores], "store STRING").repartition(len(stores))
    found = spark.createDataFrame(frame.rdd.mapPartitions(_verify_all), _COLUMNS).orderBy("store").toArrow()
    if directory is not None:
        with replacement(directory / "state-hash.parquet") as fresh:
            parquet.write_table(found, fresh)
    rows = found.to_pylist()
    facts = {row["store"]: row["why"] or f"{row['agent']} {row['state_hash']} at {row['position']}" for row in rows}
    return Outcome(facts, failed=any(row["why"] for row in rows))


def _verify_all(rows: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    for row in rows:
        try:
            verified = asyncio.run(verify(Path(row["store"])))
        except Fatal as error:  # the other stores are verified
            yield row["store"], None, None, None, None, None, str(error)
        else:
            head = verified.head
            yield row["store"], *verified.owner, head.position, head.state_hash.hex(), verified.why


if __name__ == "__main__":
    submitted("state-hash")
