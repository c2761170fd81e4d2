"""The formats as Spark sees them: `postroom`, a sink for DataFrames, and `postroom_history`, a source of them.

A format needs only PySpark; the rest of Postroom is imported when a write or a read begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

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

    def schema(self) -> NoReturn:
        """Raise `ValueError`: Spark asks for a schema only to read, or for a view or table that names no columns."""
        raise ValueError(
            'the format "postroom" is for writing: read what was sent with format("postroom_history"); '
            "to write in SQL, name the columns of the view"
        )

    def reader(self, schema: StructType) -> NoReturn:
        """Raise the same, also where a query names the columns."""
        del schema
        self.schema()

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
        """Return every column; raises `ValueError` for a table with options, which Spark would not pass on."""
        if any(name.startswith("option.") for name in self.options):  # only `CREATE TABLE` has such names
            raise ValueError(
                "Spark does not pass on the options of a table, which would be the whole history: write CREATE "
                "TEMPORARY VIEW in place of CREATE TABLE, or name them in each query, as in SELECT * FROM history WITH "
                "(mesh = 'demo')"
            )
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
