"""The format `postroom` as Spark sees it: a sink for DataFrames, batch and streaming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

if TYPE_CHECKING:
    from postroom.spark.sink import BatchSink, StreamSink


class DefaultSource(DataSource):
    """`df.write.format("postroom")` and `df.writeStream.format("postroom")`; the options: `postroom.spark.options`."""

    @classmethod
    def name(cls) -> str:
        """Return what `format` is given."""
        return "postroom"

    def schema(self) -> str:
        """Refuse to be read: Spark asks for a schema only then."""
        raise ValueError('the format "postroom" is for writing: read what was sent with format("postroom_history")')

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:  # noqa: FBT001 - Spark's signature
        """Check the options and the schema on the driver; what comes back goes to the executors."""
        from postroom.spark.sink import batch_sink  # noqa: PLC0415 - not before a write begins

        return batch_sink(self.options, schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:  # noqa: FBT001, N802 - Spark's
        """Do as `writer` does, for each micro-batch of a stream."""
        from postroom.spark.sink import stream_sink  # noqa: PLC0415 - the same

        return stream_sink(self.options, schema, overwrite=overwrite)
