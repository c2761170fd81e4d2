"""The Spark source `postroom_history`: accepted messages as a DataFrame (docs/contract/spark.md#spark-12).

    spark.read.format("postroom_history").option("mesh", "sea").option("since", "2026-11-01").load()
    spark.readStream.format("postroom_history").option("max_rows_per_batch", 100_000).load()

Its columns are the fields of `postroom._wire.administration.HistoryMessage`; `meta` is JSON. With
`.schema("history_id BIGINT")` only those columns are read. The options are `history_options.HistoryOptions`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from postroom.spark.history_batch import SCHEMA, HistoryReader, PushingHistoryReader
from postroom.spark.history_options import read_options

if TYPE_CHECKING:
    from postroom.spark.history_stream import HistoryStreamReader


class HistorySource(DataSource):
    """The source, as Spark finds it."""

    @classmethod
    def name(cls) -> str:
        """Return the name of the format."""
        return "postroom_history"

    def schema(self) -> StructType:
        """Return every column."""
        return SCHEMA

    def reader(self, schema: StructType) -> HistoryReader:
        """Read what has committed; raises `InvalidMessage` for wrong options."""
        options = read_options(self.options, streaming=False)
        return PushingHistoryReader(options, schema) if options.push_filters else HistoryReader(options, schema)

    def streamReader(self, schema: StructType) -> HistoryStreamReader:  # noqa: N802 - Spark's name
        """Read what commits from now on too; raises `InvalidMessage` for wrong options."""
        from postroom.spark.history_stream import HistoryStreamReader  # noqa: PLC0415 - of newer PySparks

        return HistoryStreamReader(read_options(self.options, streaming=True), schema)
