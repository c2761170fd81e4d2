"""That Spark starts on what Postroom finds, its workers in this environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyspark
import pytest
from pyspark.sql import SparkSession

from postroom.spark.session import prepare_environment


def test_the_workers_run_the_python_of_this_environment(spark: SparkSession) -> None:
    def prefix(_: int) -> str:
        return sys.prefix

    assert spark.sparkContext.parallelize(range(4), 2).map(prefix).distinct().collect() == [sys.prefix]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}


def test_workers_import_a_compiled_pyspark(environ: dict[str, str]) -> None:
    prepare_environment(environ)
    home, shipped = Path(environ["SPARK_HOME"]), Path(pyspark.__file__).parent
    paths = [str(archive) for archive in (home / "python/lib").iterdir()]
    assert {Path(path).name for path in paths} == {archive.name for archive in (shipped / "python/lib").iterdir()}
    modules = ("pyspark.sql.worker.plan_data_source_read", "py4j.java_gateway")
    code = "import importlib, sys; print(*(importlib.import_module(name).__cached__ for name in sys.argv[1:]))"
    ran = subprocess.run(
        [sys.executable, "-c", code, *modules],
        env={"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        check=True,
    )
    (py4j,) = (home / "python/lib").glob("py4j-*.zip")
    assert ran.stdout.decode().split() == [
        f"{home}/python/lib/pyspark.zip/pyspark/sql/worker/plan_data_source_read.pyc",
        f"{py4j}/py4j/java_gateway.pyc",
    ]
    for part in ("bin", "jars", "python/pyspark"):
        assert (home / part).resolve() == (shipped / part).resolve()


def test_the_compiled_pyspark_is_written_once(environ: dict[str, str]) -> None:
    prepare_environment(environ)
    written = {path: path.lstat().st_mtime_ns for path in Path(environ["SPARK_HOME"]).rglob("*")}
    again = {name: text for name, text in environ.items() if name != "SPARK_HOME"}
    prepare_environment(again)
    assert again == environ
    assert {path: path.lstat().st_mtime_ns for path in Path(environ["SPARK_HOME"]).rglob("*")} == written
    (home,) = Path(environ["XDG_CACHE_HOME"], "postroom").glob("spark-*")
    assert home == Path(environ["SPARK_HOME"])


def test_two_programs_that_write_the_compiled_pyspark_at_once_have_the_same(environ: dict[str, str]) -> None:
    both = [dict(environ), dict(environ)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(prepare_environment, both))
    assert both[0] == both[1]
    assert list(Path(environ["XDG_CACHE_HOME"], "postroom").glob("[!j]*")) == [Path(both[0]["SPARK_HOME"])]


@pytest.mark.parametrize(
    "chosen",
    [
        {"SPARK_HOME": "/opt/spark"},
        {"SPARK_CONF_DIR": "/etc/spark"},
        {"PYSPARK_SUBMIT_ARGS": "--master yarn pyspark-shell"},
        {"PYSPARK_PYTHON": "/usr/bin/python3"},
    ],
)
def test_a_spark_that_was_configured_keeps_its_home(chosen: dict[str, str], environ: dict[str, str]) -> None:
    environ |= chosen
    prepare_environment(environ)
    assert environ.get("SPARK_HOME") == chosen.get("SPARK_HOME")


def test_where_the_compiled_pyspark_cannot_be_written_spark_keeps_its_home(environ: dict[str, str]) -> None:
    without = dict(environ)
    prepare_environment(environ)
    home = Path(environ["SPARK_HOME"])
    shutil.rmtree(home)
    home.touch()
    prepare_environment(without)
    assert "SPARK_HOME" not in without
