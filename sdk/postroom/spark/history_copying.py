"""Postgres to Arrow, without a Python object per row: `COPY … TO STDOUT (FORMAT csv)`, read by Arrow's CSV reader.

A thread of its own copies into a pipe and the caller's thread reads from it, so that a result of any size takes a few
blocks of memory. In CSV a null is nothing at all and an empty text is two quotes, so each comes out as what it was.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from postroom.spark.database import connect

if TYPE_CHECKING:
    import asyncpg
    import pyarrow as pa

_BLOCK_BYTES: Final = 8 * 1024 * 1024  # more than a row can have: a body of 1 MiB whose every byte is a quote takes 2

# A range of numbers is found by its index, and what belongs to it as well: the time that a range takes depends on its
# own length. Left to its estimates Postgres would rather read each table whole for every range.
_SETTINGS: Final = {
    "datestyle": "ISO",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
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
    url: str, query: str, arguments: Sequence[Any], schema: pa.Schema, *, snapshot: str | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the result of `query` as batches of `schema`, which names some of its columns.

    With `snapshot` it is read as an exported snapshot shows the database. Raises as `connect` does, and what Postgres
    refuses the query with.
    """
    read_end, write_end = os.pipe()
    with ThreadPoolExecutor(1) as thread, os.fdopen(read_end, "rb") as stream:
        copying = thread.submit(asyncio.run, _copy(url, query, arguments, os.fdopen(write_end, "wb"), snapshot))
        try:
            yield from _batches(stream, schema, copying)
        finally:
            stream.close()  # whoever still writes notices that nobody reads any more


def _batches(stream: BinaryIO, schema: pa.Schema, copying: Future[None]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa  # noqa: PLC0415 - of the extra `spark`
    from pyarrow import csv  # noqa: PLC0415

    try:
        reader = csv.open_csv(
            stream,
            csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            csv.ParseOptions(newlines_in_values=True),
            csv.ConvertOptions(
                column_types=schema,
                include_columns=schema.names,
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
                true_values=["t"],
                false_values=["f"],
            ),
        )
    except pa.ArrowInvalid:
        copying.result()  # nothing came, not even a header: this says why
        raise
    for batch in reader:
        if batch.num_rows:
            yield pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    copying.result()


async def _copy(url: str, query: str, arguments: Sequence[Any], output: BinaryIO, snapshot: str | None) -> None:
    with output:
        connection = await connect(url, _SETTINGS)
        try:
            async with connection.transaction(isolation="repeatable_read", readonly=True):
                if snapshot is not None:
                    await connection.execute(f"SET TRANSACTION SNAPSHOT '{_checked(snapshot)}'")
                await connection.copy_from_query(
                    _statement(query), *arguments, output=output, format="csv", header=True
                )
        finally:
            await connection.close()


def _statement(query: str) -> str:
    """Return the query as COPY takes it: without its end, and without comments, where arguments would be put in too."""
    lines = (line for line in query.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).rstrip().removesuffix(";")


def _checked(snapshot: str) -> str:
    if not all(part.isalnum() for part in snapshot.split("-")):
        raise ValueError(f"{snapshot!r} is no snapshot")
    return snapshot
