"""Spark for the benchmarks: a session on two cores that says errors only, and a process of its own around it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_QUIET: Final = Path(__file__).parents[1] / "pipeline" / "log4j2.properties"
_JAVA_SAYS: Final = "WARNING: Using incubator modules"  # of every Java that has them; no setting keeps it from that


def session() -> SparkSession:
    """Start Spark on two cores of this machine."""
    # Spark is large, and the other benchmarks do without
    from pyspark.sql import SparkSession  # noqa: PLC0415

    from postroom.spark.session import prepare_environment  # noqa: PLC0415

    prepare_environment()
    return (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.extraJavaOptions", f"-Dlog4j2.configurationFile={_QUIET}")
        .getOrCreate()
    )


def output_of_spark(command: Sequence[str]) -> bytes:
    """Run `python -m <command>` to its end and return what it printed, and pass on what it complains of."""
    ran = subprocess.run([sys.executable, "-m", *command], capture_output=True, check=False)  # noqa: S603 - our own
    complaints = ran.stderr.decode(errors="replace").splitlines(keepends=True)
    sys.stderr.writelines(line for line in complaints if not line.startswith(_JAVA_SAYS))
    ran.check_returncode()
    return ran.stdout
