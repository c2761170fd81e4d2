"""Postgres to Arrow, without a Python object per row: `COPY … TO STDOUT (FORMAT csv)`, read by Arrow's CSV reader.

Whole rows are gathered into blocks, and each block becomes a batch: a result of any size takes a few blocks of memory.
All of it happens in the caller's thread, which lets the connection read only while it waits for a block: a second one
would cost more in turns of the interpreter's lock than it gains. In CSV a null is nothing at all and an empty text is
two quotes, so each comes out as what it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from postroom.spark.database import connect
from postroom.sql import load_queries

if TYPE_CHECKING:
    import asyncpg
    import pyarrow as pa

Before: TypeAlias = "Callable[[asyncpg.Connection[asyncpg.Record]], Awaitable[None]]"

QUERIES: Final = load_queries("postroom.spark", "history.sql")
_BLOCK_BYTES: Final = 1024 * 1024  # of one batch, about

# Control characters, which hardly any text has, so that JSON needs no quotes around it, nor a second one for each of
# its own; what does have one of them is quoted.
_DELIMITER: Final = "\x1f"
_QUOTE: Final = "\x1e"

# A range of numbers is found by its index, and what belongs to it as well: the time that a range takes depends on its
# own length. Left to its estimates Postgres would rather read each table whole for every range, or start processes that
# hand every row to the one that sends it: there are as many tasks as Spark has cores.
_SETTINGS: Final = {
    "datestyle": "ISO",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
    "max_parallel_workers_per_gather": "0",
}


def fetch(url: str, query: str, *arguments: Any) -> list[asyncpg.Record]:
    """Run one query on a connection of its own; raises as `connect` does."""

    async def run() -> list[asyncpg.Record]:
        connection = await connect(url, _SETTINGS)
        try:
            return await connection.fetch(query, *arguments)
        finally:
            await connection.close()

    return asyncio.run(run())


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

    With `snapshot` it is read as an exported snapshot shows the database. `before` looks at the same state of it first.
    Raises as `connect` does, what `before` raises, and what Postgres refuses the query with. Whoever stops half-way
    closes the generator, which ends the query too.
    """
    loop = asyncio.new_event_loop()
    blocks: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
    text = QUERIES["columns"].format(columns=", ".join(f'"{name}"' for name in schema.names), query=_statement(query))
    copying = loop.create_task(_copy(url, _statement(text), arguments, blocks.put, snapshot=snapshot, before=before))
    try:
        while block := loop.run_until_complete(_next_block(blocks, copying)):
            yield _parsed(block, schema)
    finally:
        copying.cancel()
        loop.run_until_complete(asyncio.wait([copying]))
        loop.close()


async def _next_block(blocks: asyncio.Queue[bytes], copying: asyncio.Task[None]) -> bytes:
    """Return the next block, and nothing at the end; raises what ended the copying."""
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
    connection = await connect(url, _SETTINGS)
    try:
        async with connection.transaction(isolation="repeatable_read", readonly=True):
            if snapshot is not None:
                await connection.execute(f"SET TRANSACTION SNAPSHOT '{_checked(snapshot)}'")
            if before is not None:
                await before(connection)
            gathering = _Gathering(put)
            await connection.copy_from_query(
                query, *arguments, output=gathering.add, format="csv", delimiter=_DELIMITER, quote=_QUOTE
            )
            await gathering.flush()
    finally:
        await connection.close()


class _Gathering:
    """Gathers what Postgres sends, which is whole rows always (a message of the protocol for each), into blocks."""

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
            await self._put(b"".join(held))


def _parsed(block: bytes, schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa  # noqa: PLC0415 - of the extra `spark`
    from pyarrow import csv  # noqa: PLC0415

    table = csv.read_csv(
        pa.py_buffer(block),
        csv.ReadOptions(column_names=schema.names, block_size=len(block), use_threads=False),
        csv.ParseOptions(delimiter=_DELIMITER, quote_char=_QUOTE, newlines_in_values=True, ignore_empty_lines=False),
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
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)


def _statement(query: str) -> str:
    """Return the query as COPY takes it: without its end, and without comments, where arguments would be put in too."""
    lines = (line for line in query.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).rstrip().removesuffix(";")


def _checked(snapshot: str) -> str:
    if not all(part.isalnum() for part in snapshot.split("-")):
        raise ValueError(f"{snapshot!r} is no snapshot")
    return snapshot
