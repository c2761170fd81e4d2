"""Tables of Postgres as DataFrames: each task copies one part to Arrow, all parts in one snapshot.

The driver holds a transaction open that exports its snapshot, so that many tasks read a table of any size as of one
moment, during accepts and sweeps. The only locks are those that keep a table from being rewritten.
"""

import asyncio
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import datetime
from itertools import islice
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, Row, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from broker.database import check_version
from pipeline.runner import History
from postroom._wire.sql import load_queries
from postroom.chassis import postgres
from postroom.chassis.postgres import Connection, fatal_errors
from postroom.spark.database import connected
from postroom.spark.formats import HistorySource
from postroom.spark.history import QUERIES as HISTORY_QUERIES
from postroom.spark.history import check_mesh, copy

ROOM: Final = "pipeline"
QUERIES: Final = load_queries("pipeline")
_BLOCKS: Final = 8192  # of a table that one task reads: 64 MiB
_RANGE: Final = 50_000  # numbers of the history that one task reads

_ROWS: Final = 1000  # of one statement


async def migrate(url: str) -> list[str]:
    """Migrate the pipelines' own tables to this program's version and return what was applied.

    Raises `Fatal`, also where the database is not a broker's of this version: nothing is created in another one.
    """
    async with postgres.connected(url) as connection:
        await check_version(connection)
    return await postgres.migrate(url, ROOM)


def columns(text: str) -> StructType:
    """Return the columns of `text`, each with its type: `mesh string, history_id long`."""
    schema = StructType()
    for column in text.split(", "):
        name, kind = column.split()
        schema.add(name, kind)
    return schema


def history(spark: SparkSession, options: History) -> DataFrameReader:
    """Return a reader of the history, or of the part of it that the options select."""
    spark.dataSource.register(HistorySource)
    return spark.read.format(HistorySource.name()).options(**source_options(options))


def source_options(options: History) -> dict[str, str]:
    """Return the options of `postroom_history` that select the same part of it."""
    given = {name: getattr(options, name) for name in History.__struct_fields__}
    return {name: value for name, value in given.items() if value is not None}


class Snapshot(NamedTuple):
    """A moment of the database: its exported name, and the time of its transaction."""

    url: str
    name: str
    now: datetime
    connection: Connection
    loop: asyncio.AbstractEventLoop

    def fetch(self, query: str, *arguments: Any) -> list[Any]:
        """Run a query in this snapshot; raises `Fatal`."""
        with fatal_errors():
            return asyncio.run_coroutine_threadsafe(self.connection.fetch(query, *arguments), self.loop).result()


@contextmanager
def snapshot(url: str) -> Iterator[Snapshot]:
    """Hold a snapshot of the broker's database; raises `Fatal`, also where its schema is of another version."""
    loop, ending = asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_forever, name="postroom-snapshot", daemon=True)
    thread.start()
    held: Future[Snapshot] = Future()

    async def hold() -> None:
        try:
            async with postgres.connected(url) as connection:
                await check_version(connection)
                await connection.transaction(isolation="repeatable_read", readonly=True).start()
                (row,) = await connection.fetch(QUERIES["export_snapshot"])
                held.set_result(Snapshot(url, row["name"], row["now"], connection, loop))
                await ending.wait()
        except BaseException as error:
            if not held.done():
                held.set_exception(error)
            raise

    holding = asyncio.run_coroutine_threadsafe(hold(), loop)
    try:
        yield held.result()
    finally:
        loop.call_soon_threadsafe(ending.set)
        holding.exception()  # waits for the end; what went wrong before was raised above
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def read_table(spark: SparkSession, moment: Snapshot, table: str, query: str, schema: StructType) -> DataFrame:
    """Read a query of `table`, with the first block that it reads and the block after the last as its arguments."""
    (size,) = moment.fetch(QUERIES["blocks"], table)
    parts = [[start, start + _BLOCKS] for start in range(0, max(size["blocks"], 1), _BLOCKS)]
    return read_parts(spark, moment, QUERIES[query].format(table=table), parts, schema)


def read_ranges(
    spark: SparkSession, moment: Snapshot, query: str, schema: StructType, mesh: str | None, *rest: Any
) -> DataFrame:
    """Read the query whose arguments are a mesh's id, a range of its history, and `rest`; of one mesh, or of all.

    Raises `NotFound` where there is no such mesh.
    """
    extents = moment.fetch(HISTORY_QUERIES["extent"], mesh)
    check_mesh(mesh, known=bool(extents))
    parts = [
        [row["mesh_id"], after, min(after + _RANGE, row["last"]), *rest]
        for row in extents
        if row["first"] is not None
        for after in range(row["first"] - 1, row["last"], _RANGE)
    ]
    return read_parts(spark, moment, QUERIES[query], parts, schema)


def read_parts(
    spark: SparkSession, moment: Snapshot, query: str, parts: Sequence[Sequence[Any]], schema: StructType
) -> DataFrame:
    """Run the query once for each of `parts`, which are its arguments, in a task for each."""
    arrow = to_arrow_schema(schema, timezone="UTC")

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part in batch.column(0).to_pylist():
                yield from copy(url, query, parts[part], arrow, snapshot=name)

    url, name = moment.url, moment.name
    return spark.range(0, len(parts), 1, max(len(parts), 1)).mapInArrow(read, schema)


def write_rows(frame: DataFrame, url: str, statement: str, key: Sequence[str]) -> None:
    """Run `statement` over all rows, each of its arguments the array of one column, in the columns' order.

    A second run of a task has to be harmless. Tasks take rows in the order of their key, so that none deadlock.
    """

    def write(rows: Iterable[Row]) -> None:
        async def run() -> None:
            waiting = iter(rows)
            async with connected(url) as connection:
                while batch := list(islice(waiting, _ROWS)):
                    arguments: list[list[Any]] = [[row[column] for row in batch] for column in named]
                    await connection.execute(statement, *arguments)

        asyncio.run(run())

    named = frame.columns
    frame.sortWithinPartitions(*key).foreachPartition(write)
