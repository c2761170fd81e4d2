"""That Spark starts on what Postroom finds, its workers in this environment."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession


def test_the_workers_run_the_python_of_this_environment(spark: SparkSession) -> None:
    def prefix(_: int) -> str:
        return sys.prefix

    assert spark.sparkContext.parallelize(range(4), 2).map(prefix).distinct().collect() == [sys.prefix]
