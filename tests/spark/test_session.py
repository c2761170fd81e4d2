"""That Spark starts on what Postroom finds, its workers in this environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from postroom.spark.session import spare_workers_the_zip


def test_the_workers_run_the_python_of_this_environment(spark: SparkSession) -> None:
    def prefix(_: int) -> str:
        return sys.prefix

    assert spark.sparkContext.parallelize(range(4), 2).map(prefix).distinct().collect() == [sys.prefix]


def test_the_workers_of_a_session_of_this_machine_import_the_compiled_pyspark(tmp_path: Path) -> None:
    environ = {"PYSPARK_PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path)}
    spare_workers_the_zip(environ)
    home = Path(environ["SPARK_HOME"])
    assert not (home / "python").exists()
    assert (home / "jars").resolve() == (Path(pyspark.__file__).parent / "jars").resolve()
    again = {name: value for name, value in environ.items() if name != "SPARK_HOME"}
    spare_workers_the_zip(again)
    assert again == environ


@pytest.mark.parametrize(
    "chosen",
    [
        {"SPARK_HOME": "/opt/spark"},
        {"SPARK_CONF_DIR": "/etc/spark"},
        {"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"},
        {"PYSPARK_GATEWAY_PORT": "1"},
        {"PYSPARK_PYTHON": "/usr/bin/python3"},
        {"XDG_CACHE_HOME": "/dev/null"},
    ],
)
def test_a_spark_that_was_configured_keeps_its_home(chosen: dict[str, str], tmp_path: Path) -> None:
    environ = {"PYSPARK_PYTHON": sys.executable, "XDG_CACHE_HOME": str(tmp_path), **chosen}
    before = dict(environ)
    spare_workers_the_zip(environ)
    assert environ == before
