"""`spark.readStream.format("postroom_history")`: each message once, however late its transaction commits.

An offset has for each mesh, by its id, the `history_id` up to which everything was read. The query `latest` never goes
past a number that may still come, so that after a restart the stream goes on from its checkpoint without loss or
repeat. It also holds which database the stream reads, since the meshes of another one have the same numbers; the
`since` that it began with, which stays, and its `to`, which may not change; and the last deletion of messages before
the stream began, if there was one: unread messages that a later one deleted are lost. The driver checks for those
before each batch, and each task in the snapshot that it reads.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from postroom.errors import Conflict, Gone
from postroom.spark.history import ABSENT_SECONDS, QUERIES, Range, RangeReader, check_mesh, fetch, shared_out, split
from postroom.spark.history_options import Conditions, HistoryOptions

if TYPE_CHECKING:
    import asyncpg

    Connection = asyncpg.Connection[asyncpg.Record]

Offset: TypeAlias = dict[str, Any]

_DATABASE, _DELETION, _TO, _SINCE = _KEYS = ("database", "deletion", "to", "since")  # of an offset, besides meshes


class HistoryStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream of one mesh or of all, those that are created later too."""

    def __init__(self, options: HistoryOptions, schema: StructType) -> None:
        self._options = options
        self._ranges = RangeReader(options, schema)
        self._conditions = Conditions(mesh=options.mesh, to=options.to)
        self._target: Offset | None = None  # where a stream of what is available now ends

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Begin before the first message, or before the first one from `since` on."""
        to, since = self._options.to, self._options.since
        (state,) = self._fetch("database")
        begun = {} if since is None else _by_mesh(self._fetch("beginning", self._options.mesh, since))
        told = {**state, _TO: to, _SINCE: since and since.isoformat()}
        return begun | {key: told[key] for key in _KEYS if told[key]}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Read as many rows at once as the options allow."""
        rows = self._options.max_rows_per_batch
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Make the newest message of now the end of the stream."""
        self._target = self._newest()

    def reportLatestOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return how far the history goes, from which Spark computes how far the stream is behind."""
        return self._newest()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Return how far the next batch may go.

        Raises `Conflict` where the checkpoint is another source's, another database's or of another `to`, where the
        history ends before it or was restored since, or where messages were deleted that it has not read; `NotFound`
        where the option names an unknown mesh.
        """
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        read_to = self._read_to(start)
        found = dict(start)
        at = list(read_to), list(read_to.values())
        meshes = self._fetch("latest", self._options.mesh, *at, rows, _deletion(start))
        check_mesh(self._options.mesh, known=bool(meshes))
        for row in meshes:
            _check_database(start, row)
            # refuse to go on where the numbers begin again: new messages would look like those that were read
            read = row["after"]
            given_out = row["last_history_id"]
            if read > given_out:
                raise Conflict.of(
                    "history_behind_checkpoint",
                    f"the checkpoint is at history_id {read}, but the history ends at {given_out}: "
                    "was an older database restored? Start with a new checkpoint",
                )
            self._check_not_restored(row)
            self._check_not_lost(row)
            last = row["latest"] or row["lost"] or row["after"]  # past what is lost, where that is not a failure
            if self._target is not None:
                last = max(row["after"], min(last, self._target.get(str(row["mesh_id"]), 0)))
            if last:
                found[str(row["mesh_id"])] = last
        return dict(sorted(found.items()))  # Spark compares offsets as texts

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Split what is between two offsets into ranges.

        Raises `Conflict` where they are another source's, another database's or of another `to`, or where messages
        were deleted unread.
        """
        read_to, ends = self._read_to(start), _numbers(end)
        since = datetime.fromisoformat(start[_SINCE]) if _SINCE in start else None
        after = [read_to.get(mesh, 0) for mesh in ends]
        ranges: list[Range] = []
        for row in self._fetch("next", list(ends), after, _deletion(start)):
            _check_database(start, row)
            self._check_not_lost(row)
            mesh, first = row["mesh_id"], row["first"]
            if first is not None:  # numbers before it were never used, or their messages are deleted
                last = min(ends[mesh], row["up_to"])
                ranges += split(Range(mesh, first - 1, last, _deletion(start), since), self._options.partition_rows)
        return shared_out(ranges, self._options.max_connections)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one partition; raises `Conflict` where messages of it were deleted meanwhile, or prints that."""
        return self._ranges.read(partition, self._conditions, self._check_unread)

    def _read_to(self, start: Offset) -> dict[int, int]:
        """Return the numbers of an offset by mesh; raises `Conflict` where another `to` has omitted messages."""
        read_to = _numbers(start)
        if (before := start.get(_TO)) != self._options.to:
            raise _foreign(f"the checkpoint is of a stream {_to(before)}, and this one is {_to(self._options.to)}")
        return read_to

    def _newest(self) -> Offset:
        return _by_mesh(self._fetch("newest", self._options.mesh))

    def _fetch(self, query: str, *arguments: Any) -> list[asyncpg.Record]:
        return fetch(self._options.database_url, QUERIES[query], *arguments, seconds=ABSENT_SECONDS)

    async def _check_unread(self, part: Range, connection: Connection) -> None:
        for row in await connection.fetch(QUERIES["next"], [part.mesh_id], [part.after], part.deletion):
            self._check_not_lost(row)

    def _check_not_restored(self, row: asyncpg.Record) -> None:
        """Refuse to go on from a number that a restore has taken back, or print that where it is allowed."""
        if row["restored"] is None:
            return
        what = (
            f"the database was restored to an earlier state: the stream has read the mesh {row['mesh']} "
            f"up to history_id {row['after']}, and what it read after {row['restored']} is lost, or was sent again "
            "and will be read again"
        )
        if self._options.fail_on_data_loss:
            advice = "Set the option failOnDataLoss to false to continue anyway, or start with a new checkpoint"
            raise Gone.of("history_restored", f"{what}. {advice}", resume_after=row["restored"])
        print(f"postroom: {what}; the stream continues", file=sys.stderr, flush=True)  # noqa: T201 - the driver's

    def _check_not_lost(self, row: asyncpg.Record) -> None:
        """Refuse to skip messages that were deleted unread, or print that where it is allowed."""
        if row["lost"] is None:
            return
        what = (
            f"messages of the mesh {row['mesh']} were deleted before the stream had read them: it is at history_id "
            f"{row['after']}, and retention has deleted some up to {row['lost']}"
        )
        if self._options.fail_on_data_loss:
            advice = (
                "Set the option failOnDataLoss to false to continue with what is left, or start with a new checkpoint"
            )
            raise Conflict.of("history_lost", f"{what}. {advice}")
        print(f"postroom: {what}; the stream continues without them", file=sys.stderr, flush=True)  # noqa: T201 - the driver's, or a task's


def _by_mesh(rows: Iterable[asyncpg.Record]) -> Offset:
    return {str(row["mesh_id"]): row["history_id"] for row in rows}


def _check_database(offset: Offset, row: asyncpg.Record) -> None:
    """Refuse to go on in another database, whose messages would count as read up to the numbers of the offset."""
    if offset.get(_DATABASE, row["database"]) != row["database"]:
        raise _foreign("the checkpoint is of a stream over another database")


def _numbers(offset: Offset) -> dict[int, int]:
    """Return the numbers of an offset by mesh; raises `Conflict` for that of another source, as a copy may have."""
    try:
        return {int(mesh): int(number) for mesh, number in offset.items() if mesh not in _KEYS}
    except (AttributeError, TypeError, ValueError) as error:
        raise _foreign(f"the checkpoint is of a stream that reads something else, and is at {offset!r}") from error


def _to(to: str | None) -> str:
    return "to everything" if to is None else f"to {to}"


def _foreign(detail: str) -> Conflict:
    advice = "give this stream the checkpoint that it had, or a new one"
    return Conflict.of("foreign_checkpoint", f"{detail}: {advice}")


def _deletion(offset: Offset) -> int:
    return int(offset.get(_DELETION, 0))
