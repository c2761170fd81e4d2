"""DataFrames into Postgres: rows by the thousand, through a statement that a second run of a task does not mind.

Tasks take the rows of a batch in one order, that of their key, so that no two wait for each other in a circle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from postroom.chassis.postgres import connected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row

_ROWS: Final = 1000  # of one statement


def write_rows(frame: DataFrame, url: str, statement: str, key: Sequence[str]) -> None:
    """Run `statement` over all rows, each of its arguments the array of one column, in the columns' order."""
    frame.sortWithinPartitions(*key).foreachPartition(partial(_write, url, statement, frame.columns))


def _write(url: str, statement: str, columns: Sequence[str], rows: Iterable[Row]) -> None:
    asyncio.run(_write_batches(url, statement, columns, iter(rows)))


async def _write_batches(url: str, statement: str, columns: Sequence[str], rows: Iterator[Row]) -> None:
    async with connected(url) as connection:
        while batch := list(islice(rows, _ROWS)):
            arguments: list[list[Any]] = [[row[column] for row in batch] for column in columns]
            await connection.execute(statement, *arguments)
