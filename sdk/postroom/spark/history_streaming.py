"""`spark.readStream.format("postroom_history")`: each message once, however late its transaction commits.

An offset says for each mesh, by its id, up to which `history_id` everything was read. The query `latest` never goes
past a number that may still come, so that after a restart the stream goes on from its checkpoint without loss or
repeat.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from postroom.errors import Conflict
from postroom.spark.history_conditions import Conditions
from postroom.spark.history_copying import QUERIES, fetch
from postroom.spark.history_options import HistoryOptions
from postroom.spark.history_reading import Range, RangeReader, mesh_ids, split

Offset: TypeAlias = dict[str, int]


class HistoryStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream of one mesh or of all, those that are created later too."""

    def __init__(self, options: HistoryOptions, schema: StructType) -> None:
        self._options = options
        self._ranges = RangeReader(options, schema)
        self._conditions = Conditions(since=options.since, mesh=options.mesh)
        self._target: Offset | None = None  # where a stream of what is available now ends

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Begin before the first message."""
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Read as many rows at once as the options say."""
        rows = self._options.max_rows_per_batch
        return ReadAllAvailable() if rows is None else ReadMaxRows(rows)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        """Take what can be read now as the end of the stream."""
        self._target = self._read_latest({}, None)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        """Say how far the next batch may go; raises `Conflict` where the history ends before the checkpoint."""
        found = self._read_latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)
        if self._target is None:
            return found
        return {mesh: max(start.get(mesh, 0), min(last, self._target.get(mesh, 0))) for mesh, last in found.items()}

    def partitions(self, start: Offset, end: Offset) -> list[Range]:
        """Cut what lies between two offsets into ranges."""
        rows = self._options.partition_rows
        return [part for mesh, last in end.items() for part in split(int(mesh), start.get(mesh, 0), last, rows)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Read one range; without any there is one task with none."""
        return self._ranges.read(partition, self._conditions) if isinstance(partition, Range) else iter(())

    def _read_latest(self, start: Offset, rows: int | None) -> Offset:
        meshes = mesh_ids(self._options.database_url, self._options.mesh)
        after = [start.get(str(mesh), 0) for mesh in meshes]
        found = dict(start)
        for row in fetch(self._options.database_url, QUERIES["latest"], meshes, after, rows):
            mesh = str(row["mesh_id"])
            _check_not_lost(start.get(mesh, 0), row["last_history_id"])
            if row["latest"] is not None:
                found[mesh] = row["latest"]
        return dict(sorted(found.items()))  # Spark compares offsets as texts


def _check_not_lost(read: int, given_out: int) -> None:
    """Refuse to go on where the numbers begin anew: new messages would look like those that were read."""
    if read > given_out:
        raise Conflict.of(
            409,
            "history_behind_checkpoint",
            f"the checkpoint has read up to history_id {read}, the history ends at {given_out}: was an older database "
            "put back? Begin with a new checkpoint",
        )
