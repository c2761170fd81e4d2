"""A Spark program that streams a directory of orders through Postroom, a file at a time, until it has sent all."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def main(source: str, checkpoint: str, *options: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .getOrCreate()
    )
    orders = spark.readStream.schema("order_id long").option("maxFilesPerTrigger", 1).parquet(source)
    chosen = dict(option.split("=", 1) for option in options) | {"checkpointLocation": checkpoint}
    orders.writeStream.format("postroom").options(**chosen).trigger(availableNow=True).start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
