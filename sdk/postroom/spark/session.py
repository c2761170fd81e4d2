"""What has to be in place before a Spark session starts in this process."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from postroom.spark.java import provide_java

_GATEWAY: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit for the program that it runs
_CHOSEN: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")  # any of them may name a cluster


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set `JAVA_HOME`, and `PYSPARK_PYTHON` where it is not set; return which Java it is, as a sentence.

    The Python workers are then of this environment, and not the `python3` of the `PATH`. Under `spark-submit` nothing
    is changed, since its JVM is running. Raises `Unavailable` where there is no Java.
    """
    if _GATEWAY in environ:
        return "Java of spark-submit"
    java = provide_java(environ)
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    do_without_names(environ)
    return f"Java {java.version} from {java.origin}, {java.home}"


def do_without_names(environ: MutableMapping[str, str]) -> None:
    """Let Spark start on a machine without `/etc/hosts`.

    It looks up the machine's own name (then `SPARK_LOCAL_IP` is set to loopback's address), and PySpark `localhost`
    (then Unix sockets are used instead, `PYSPARK_UDS_MODE`).
    """
    if not _has_address(socket.gethostname()):
        environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if not _has_address("localhost"):
        environ.setdefault("PYSPARK_UDS_MODE", "true")


def spare_workers_the_zip(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set `SPARK_HOME` for a session of this machine alone, so that Python workers start in about a third of the time.

    They put `pyspark.zip` of Spark's home first on their path, and compile anew what they import from it. The home that
    is set, in the user's cache, has links to the JVM's part and no such file: they import the PySpark of this
    environment, which is compiled. Nothing changes where Spark was configured (YARN insists on the file), where the
    workers are of another Python, and where the links cannot be made.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None or any(name in environ for name in (_GATEWAY, *_CHOSEN)):
        return
    original = Path(spec.origin).parent
    configured = (original / "conf").exists() or not (original / "jars").is_dir()
    if configured or environ.get("PYSPARK_PYTHON") != sys.executable:
        return
    with suppress(OSError, RuntimeError):  # the latter is of a user without a home
        environ["SPARK_HOME"] = str(_linked_home(original, environ))


def _has_address(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def _linked_home(original: Path, environ: MutableMapping[str, str]) -> Path:
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    home = Path(cache, "postroom", f"spark-{hashlib.sha256(os.fsencode(original)).hexdigest()[:16]}")
    home.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "jars"):
        with suppress(FileExistsError):
            (home / part).symlink_to(original / part)
    return home
