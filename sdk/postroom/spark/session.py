"""What has to be in place before a Spark session starts in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from typing import Final

from postroom.spark.java import provide_java

_GATEWAY: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit for the program that it runs


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set `JAVA_HOME`, and `PYSPARK_PYTHON` where it is not set; return which Java it is, as a sentence.

    The Python workers are then of this environment, and not the `python3` of the `PATH`. Under `spark-submit` nothing
    is changed, since its JVM is running. Raises `Unavailable` where there is no Java.
    """
    if _GATEWAY in environ:
        return "Java of spark-submit"
    java = provide_java(environ)
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    return f"Java {java.version} from {java.origin}, {java.home}"
