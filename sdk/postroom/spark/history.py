"""What the source `postroom_history` reads: accepted messages as a DataFrame (docs/contract/spark.md#spark-12).

    spark.read.format("postroom_history").option("mesh", "sea").option("since", "2026-11-01").load()
    spark.readStream.format("postroom_history").option("max_rows_per_batch", 100_000).load()

Its columns are the fields of `postroom._wire.administration.HistoryMessage`; `meta` is JSON. With
`.schema("history_id BIGINT")` only those columns are read. The options are `history_options.HistoryOptions`.

A task reads one range of the numbers of one mesh. Every range is read by a statement of its own: what retention deletes
meanwhile may be missing, what is accepted meanwhile comes after the last range.

Whole rows are gathered into blocks, and each block becomes a batch: a result of any size takes a few blocks of memory.
All of it happens in the caller's thread, which lets the connection read only while it waits for a block: a second
thread would cost more in waits for the interpreter's lock than it gains. In CSV a null is an empty field and an empty
text is two quotes, so each comes out as what it was.
"""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from postroom._wire.retry import Patience, retrying
from postroom._wire.sql import load_queries
from postroom.errors import InvalidMessage, NotFound
from postroom.spark.database import connected
from postroom.spark.history_options import Conditions, HistoryOptions

if TYPE_CHECKING:
    import asyncpg
    import pyarrow as pa


# Checks a range in the snapshot that it is read from; raises where it must not be read.
Check: TypeAlias = "Callable[[Range, asyncpg.Connection[asyncpg.Record]], Awaitable[None]]"

_INSTANT: Final = timedelta(microseconds=1)  # the precision of Postgres and of Spark

# The fields of `HistoryMessage`, as columns; the first ones need no more than the table of the history.
_OF_HISTORY: Final = (
    StructType()
    .add("history_id", LongType())
    .add("broker_message_id", StringType())
    .add("client_message_id", StringType())
    .add("mesh", StringType())
    .add("sender", StringType())
    .add("to", StringType())
    .add("destination_kind", StringType())
    .add("accepted_at", TimestampType())
)
SCHEMA: Final = StructType(
    [
        *_OF_HISTORY.fields,
        StructField("request_fingerprint", StringType()),
        StructField("priority", StringType()),
        StructField("body", StringType()),
        StructField("body_base64", StringType()),
        StructField("meta", StringType()),  # JSON
        StructField("reply_to", StringType()),
        StructField("traceparent", StringType()),
    ]
)
Before: TypeAlias = "Callable[[asyncpg.Connection[asyncpg.Record]], Awaitable[None]]"

QUERIES: Final = load_queries("postroom.spark", "history.sql")
ABSENT_SECONDS: Final = 30.0  # longer than Postgres takes to start again, for a stream and for the tasks of any read
_BLOCK_BYTES: Final = 1024 * 1024  # of one batch, about

# Control characters, which hardly any text has, so that JSON needs no quotes around it, and its own are not doubled; a
# text that has one of them is quoted.
_DELIMITER: Final = "\x1f"
_QUOTE: Final = "\x1e"

# A range of numbers is found by its index, and so are the rows that belong to it: the time that a range takes depends
# on its own length. By its estimates Postgres would read each table whole for every range, or start parallel workers
# that pass every row to the sending process, although there are as many tasks as Spark has cores.
_SETTINGS: Final = {
    "datestyle": "ISO",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
}


class Range(InputPartition):
    """The numbers of a mesh after `after`, up to `last`; a stream began at `since`, after the deletion `deletion`."""

    def __init__(self, mesh_id: int, after: int, last: int, deletion: int = 0, since: datetime | None = None) -> None:
        self.mesh_id = mesh_id
        self.after = after
        self.last = last
        self.deletion = deletion
        self.since = since


class Ranges(InputPartition):
    """Several of them, which one task reads one after the other."""

    def __init__(self, ranges: Sequence[Range]) -> None:
        self.ranges = ranges


def split(whole: Range, rows: int) -> list[Range]:
    """Split a range into those of at most `rows` numbers."""
    starts = range(whole.after, whole.last, rows)
    return [Range(whole.mesh_id, start, min(start + rows, whole.last), whole.deletion, whole.since) for start in starts]


def shared_out(ranges: Sequence[Range], tasks: int) -> list[InputPartition]:
    """Return a partition for each range, or `tasks` partitions with several each where there are more ranges."""
    if len(ranges) <= tasks:
        return list(ranges)
    return [Ranges(ranges[first::tasks]) for first in range(tasks)]


class RangeReader:
    """Reads ranges as Arrow, with the columns of `schema`; raises `InvalidMessage` where it names others."""

    def __init__(self, options: HistoryOptions, schema: StructType) -> None:
        self._url = options.database_url
        known = {field.name: field.dataType for field in SCHEMA.fields}
        for field in schema.fields:
            if known.get(field.name) != field.dataType:
                sentence = (
                    f"the history has no column {field.name} of the type {field.dataType.simpleString()}: "
                    f"its columns are {SCHEMA.simpleString()}"
                )
                raise InvalidMessage.of("invalid_schema", sentence, field=field.name)
        names = schema.fieldNames()
        if twice := [name for name in names if names.count(name) > 1]:
            raise InvalidMessage.of("invalid_schema", f"the schema has the column {twice[0]} twice", field=twice[0])
        if not names:
            raise InvalidMessage.of("invalid_schema", "the schema has no column: omit it to read all of them")
        self._schema = to_arrow_schema(schema, timezone="UTC")
        is_history = set(schema.fieldNames()) <= set(_OF_HISTORY.fieldNames())
        self._query = "read_history" if is_history else "read_messages"

    def read(
        self, part: InputPartition, conditions: Conditions, check: Check | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a partition that may meet the conditions, once each range has passed `check`.

        Spark also starts a task for a query without partitions; that one has no ranges.
        """
        ranges = part.ranges if isinstance(part, Ranges) else [part] if isinstance(part, Range) else []
        for each in ranges:
            bounds = conditions if each.since is None else conditions._replace(since=each.since)
            arguments = bounds.arguments(each.mesh_id, each.after, each.last)
            before = None if check is None else partial(check, each)
            yield from copy(self._url, QUERIES[self._query], arguments, self._schema, before=before)


class HistoryReader(DataSourceReader):
    """`spark.read.format("postroom_history")`."""

    def __init__(self, options: HistoryOptions, schema: StructType) -> None:
        self._options = options
        self._ranges = RangeReader(options, schema)
        until = options.until and options.until - _INSTANT
        self._conditions = Conditions(since=options.since, until=until, mesh=options.mesh, to=options.to)

    def partitions(self) -> list[InputPartition]:
        """Split the history as it is now into ranges; raises `NotFound` where the option names an unknown mesh."""
        url, wanted = self._options.database_url, self._conditions
        if wanted.since is None and wanted.until is None:
            extents = fetch(url, QUERIES["extent"], wanted.mesh)
        else:
            extents = fetch(url, QUERIES["extent_within"], wanted.mesh, wanted.since, wanted.until)
        check_mesh(self._options.mesh, known=bool(extents))
        ranges: list[Range] = []
        for row in (row for row in extents if row["first"] is not None):
            after, last = max(row["first"], wanted.first) - 1, min(row["last"], wanted.last)
            ranges += split(Range(row["mesh_id"], after, last), self._options.partition_rows)
        return shared_out(ranges, self._options.max_connections)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one partition."""
        return self._ranges.read(partition, self._conditions)


class PushingHistoryReader(HistoryReader):
    """The same, without the rows that the query filters out, for a DataFrame that is filtered once.

    PySpark up to 4.3 keeps one reader for all queries of a DataFrame: where one has filters and the next has none, the
    next gets the filters of the one before, and so does the second half of a union with itself. A task cannot see which
    query its filters are from. So this has to be asked for (`push_filters`).
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Use the filters, and have Spark apply each as well."""
        self._conditions = self._conditions.narrowed(filters)
        return filters


def check_mesh(mesh: str | None, *, known: bool) -> None:
    """Raise `NotFound` where the mesh to be read is not known."""
    if mesh is not None and not known:
        raise NotFound.of("mesh_not_found", f"there is no mesh {mesh!r}: `postroom mesh list` shows them")


def fetch(url: str, query: str, *arguments: Any, seconds: float = 0.0) -> list[asyncpg.Record]:
    """Run one query on a connection of its own, again for up to `seconds`; raises as `connected` does."""

    async def run() -> list[asyncpg.Record]:
        async with connected(url, _SETTINGS) as connection:
            return await connection.fetch(query, *arguments)

    return asyncio.run(retrying(run, Patience(seconds)))


def copy(
    url: str,
    query: str,
    arguments: Sequence[Any],
    schema: pa.Schema,
    *,
    snapshot: str | None = None,
    before: Before | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the result of `query` as batches of `schema`, which names some of its columns; others are not computed.

    With `snapshot` it is read in an exported snapshot of the database. `before` checks the same state of it first.
    Raises as `connected` does, and what `before` raises. A caller that stops half-way closes the generator, which ends
    the query too.
    """
    loop = asyncio.new_event_loop()
    blocks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
    text = QUERIES["columns"].format(columns=", ".join(f'"{name}"' for name in schema.names), query=_statement(query))
    copying = loop.create_task(_copy(url, _statement(text), arguments, blocks.put, snapshot=snapshot, before=before))
    try:
        while block := loop.run_until_complete(_next_block(blocks, copying)):
            import pyarrow as pa  # noqa: PLC0415 - of the extra `spark`
            from pyarrow import csv  # noqa: PLC0415

            table = csv.read_csv(
                pa.py_buffer(block),
                csv.ReadOptions(column_names=schema.names, block_size=len(block), use_threads=False),
                csv.ParseOptions(
                    delimiter=_DELIMITER, quote_char=_QUOTE, newlines_in_values=True, ignore_empty_lines=False
                ),
                csv.ConvertOptions(
                    column_types=schema,
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                    true_values=["t"],
                    false_values=["f"],
                ),
            )
            (batch,) = table.combine_chunks().to_batches()
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    finally:
        copying.cancel()
        loop.run_until_complete(asyncio.wait([copying]))
        loop.close()


async def _next_block(blocks: asyncio.Queue[bytes], copying: asyncio.Task[None]) -> bytes:
    """Return the next block, empty at the end; raises what ended the copying."""
    getting = asyncio.ensure_future(blocks.get())
    await asyncio.wait({getting, copying}, return_when=asyncio.FIRST_COMPLETED)
    if getting.done():
        return getting.result()
    getting.cancel()
    copying.result()
    return b""


async def _copy(
    url: str,
    query: str,
    arguments: Sequence[Any],
    put: Callable[[bytes], Awaitable[None]],
    *,
    snapshot: str | None,
    before: Before | None,
) -> None:
    seconds = ABSENT_SECONDS if snapshot is None else 0.0  # a restart ends the snapshot too
    async with connected(url, _SETTINGS, seconds=seconds) as connection:
        await connection.transaction(isolation="repeatable_read", readonly=True).start()  # ends with the connection
        if snapshot is not None:
            if not all(part.isalnum() for part in snapshot.split("-")):
                raise ValueError(f"{snapshot!r} is not a snapshot")
            await connection.execute(f"SET TRANSACTION SNAPSHOT '{snapshot}'")
        if before is not None:
            await before(connection)
        blocks = _Blocks(put)
        await connection.copy_from_query(
            query, *arguments, output=blocks.add, format="csv", delimiter=_DELIMITER, quote=_QUOTE
        )
        await blocks.flush()


class _Blocks:
    """Gathers the rows that Postgres sends (always whole: a protocol message for each) into blocks."""

    def __init__(self, put: Callable[[bytes], Awaitable[None]]) -> None:
        self._put = put
        self._held: list[bytes] = []
        self._bytes = 0

    async def add(self, rows: bytes) -> None:
        """Hold rows until there is a block of them."""
        self._held.append(rows)
        self._bytes += len(rows)
        if self._bytes >= _BLOCK_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Hand on what is held, if anything."""
        held, self._held, self._bytes = self._held, [], 0
        if held:
            await self._put(codecs.BOM_UTF8 + b"".join(held))  # the reader drops one: without, it would be a text's own


def _statement(query: str) -> str:
    """Return the query for COPY: without its semicolon, and without comments, in which arguments would be put too."""
    lines = (line for line in query.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).rstrip().removesuffix(";")
