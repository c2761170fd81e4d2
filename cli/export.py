"""`postroom outbox export`: every row as a line of JSON, into a new file or to standard output."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from cli.output import json_line
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import AsyncClient, ListQuery


async def export_rows(client: AsyncClient, query: ListQuery, output: Path | None) -> int:
    """Write what `query` means and return how many rows that was; a file that exists is never overwritten."""
    if output is None:
        return await _write(client, query, None)
    try:
        with output.open("x", encoding="utf-8") as stream:
            return await _write(client, query, stream)
    except OSError as error:
        raise Fatal(Exit.IO_ERROR, f"cannot write {output}: {error.strerror}") from error


async def _write(client: AsyncClient, query: ListQuery, stream: TextIO | None) -> int:
    count = 0
    async for row in client.export(query):
        json_line(row, stream)
        count += 1
    return count
