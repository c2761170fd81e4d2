"""Parquet files by day whose bytes follow from their rows: written once, and compared when computed again.

A day's rows come in order and in one task. They are written in row groups of one size, wherever Spark's batches end,
and under another name until they are whole. So a task that runs twice writes the same, and finds it there.
"""

from __future__ import annotations

import filecmp
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from pyspark.sql.types import LongType, StringType, StructType

if TYPE_CHECKING:
    import pyarrow as pa

_GROUP_ROWS: Final = 65_536  # of a row group
_UNFINISHED: Final = ".part-"  # how names of files begin that are not whole
_ABANDONED_SECONDS: Final = 86_400  # since the last byte of one whose task was killed
DAYS: Final = (
    StructType()
    .add("source", StringType())
    .add("day", StringType())
    .add("rows", LongType())
    .add("became", StringType())
)


class Day(NamedTuple):
    """A day, and what became of it: `written`, `kept` unseen, or found to be the `same` or `different`."""

    source: str
    day: str
    rows: int
    became: str


def write_days(directory: str, batches: Iterator[pa.RecordBatch], *, verify: bool) -> Iterator[pa.RecordBatch]:
    """Write the rows of each day, which come one day after the other; yield a row of `DAYS` for each."""
    import pyarrow as pa  # noqa: PLC0415 - of the extra `pipeline`

    for day, parts in groupby(_by_day(batches), key=lambda part: part[0]):
        done = _write_day(Path(directory), day, (rows for _, rows in parts), verify=verify)
        yield pa.RecordBatch.from_pylist([done._asdict()])


def _by_day(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Cut batches where the day changes; the column `day` is then in the name of the directory."""
    for batch in batches:
        days = batch.column("day").to_pylist()
        rest = batch.drop_columns(["day"])
        start = 0
        for day, rows in groupby(days):
            length = sum(1 for _ in rows)
            yield day, rest.slice(start, length)
            start += length


def _write_day(directory: Path, day: str, parts: Iterator[pa.RecordBatch], *, verify: bool) -> Day:
    final = directory / f"day={day}" / "part.parquet"
    _sweep(final.parent)
    if final.exists() and not verify:
        return Day(directory.name, day, sum(part.num_rows for part in parts), "kept")
    final.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_UNFINISHED, dir=final.parent)
    os.close(handle)
    try:
        rows = _write_file(name, parts)
        return Day(directory.name, day, rows, _place(Path(name), final))
    finally:
        Path(name).unlink()


def _sweep(directory: Path) -> None:
    """Remove what tasks that were killed have left in a day's directory, and never what one is writing."""
    for file in directory.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another task sweeps as well
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


def _place(made: Path, final: Path) -> str:
    """Give a file that is whole its name, unless there is one of that name."""
    with suppress(FileExistsError):
        made.chmod(0o644)
        os.link(made, final)  # never replaces a file
        return "written"
    return "same" if filecmp.cmp(made, final, shallow=False) else "different"


def _write_file(name: str, parts: Iterator[pa.RecordBatch]) -> int:
    import pyarrow as pa  # noqa: PLC0415
    from pyarrow import parquet  # noqa: PLC0415

    first = next(parts)
    waiting = pa.Table.from_batches([first]).replace_schema_metadata(None)
    rows = int(first.num_rows)
    with parquet.ParquetWriter(name, waiting.schema, compression="zstd") as writer:
        for part in parts:
            waiting = pa.concat_tables([waiting, pa.Table.from_batches([part]).replace_schema_metadata(None)])
            rows += part.num_rows
            while waiting.num_rows >= _GROUP_ROWS:
                writer.write_table(waiting.slice(0, _GROUP_ROWS).combine_chunks(), _GROUP_ROWS)
                waiting = waiting.slice(_GROUP_ROWS)
        writer.write_table(waiting.combine_chunks(), _GROUP_ROWS)
    return rows
