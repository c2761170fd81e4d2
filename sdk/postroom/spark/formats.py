"""The formats as Spark sees them: `postroom`, a sink for DataFrames, and `postroom_history`, a source of them.

A format needs only PySpark; the rest of Postroom is imported when a write or a read begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from postroom.spark.history import HistoryReader
    from postroom.spark.history_stream import HistoryStreamReader
    from postroom.spark.sink import BatchSink, StreamSink


class Sink(DataSource):
    """`df.write.format("postroom")` and `df.writeStream.format("postroom")`; the options: `postroom.spark.options`."""

    @classmethod
    def name(cls) -> str:
        """Return what `format` is given."""
        return "postroom"

    def schema(self) -> str:
        """Raise `ValueError`: Spark asks for a schema only to read."""
        raise ValueError('the format "postroom" is for writing: read what was sent with format("postroom_history")')

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:  # noqa: FBT001 - Spark's signature
        """Check the options and the schema on the driver; Spark sends the writer to the executors."""
        from postroom.spark.sink import batch_sink  # noqa: PLC0415 - not before a write begins

        return batch_sink(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: FBT001, N802 - Spark's
        """Do as `writer` does, for each micro-batch of a stream."""
        from postroom.spark.sink import stream_sink  # noqa: PLC0415 - the same

        return stream_sink(self.options, schema, overwrite=overwrite)


class HistorySource(DataSource):
    """`spark.read` and `spark.readStream`, with `format("postroom_history")`; the options: `history_options`."""

    @classmethod
    def name(cls) -> str:
        """Return what `format` is given."""
        return "postroom_history"

    def schema(self) -> StructType:
        """Return every column."""
        from postroom.spark.history import SCHEMA  # noqa: PLC0415 - not before a read begins

        return SCHEMA

    def reader(self, schema: StructType) -> HistoryReader:
        """Read what has committed; raises `InvalidMessage` for wrong options."""
        from postroom.spark.history import HistoryReader, PushingHistoryReader  # noqa: PLC0415 - the same
        from postroom.spark.history_options import read_options  # noqa: PLC0415 - the same

        options = read_options(self.options, streaming=False)
        return PushingHistoryReader(options, schema) if options.push_filters else HistoryReader(options, schema)

    def streamReader(self, schema: StructType) -> HistoryStreamReader:  # noqa: N802 - Spark's name
        """Read what commits from now on too; raises `InvalidMessage` for wrong options."""
        from postroom.spark.history_options import read_options  # noqa: PLC0415 - the same
        from postroom.spark.history_stream import HistoryStreamReader  # noqa: PLC0415 - the same

        return HistoryStreamReader(read_options(self.options, streaming=True), schema)
