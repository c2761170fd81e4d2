"""The Debian packages of a release, from its wheels and those that `requirements.lock` pins: `debian.py DIST`.

    postroom          the host's side: the command, the daemon, and in /usr/lib/postroom an environment for both
    postroom-server   units and configs of broker, worker, console, consumers, agents and pipelines

The environment holds the wheels' files as they are, so that installing needs nothing but Debian's python3: those of
pure Python once, compiled ones for the Python of each Debian in `PYTHONS`. One package therefore installs on all of
them, and goes on working when Debian is upgraded. Every time is `$SOURCE_DATE_EPOCH`.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Final

from typer.main import get_command

PYTHONS: Final = ("3.11", "3.13")  # of Debian 12 and 13
ROOT: Final = Path(__file__).parents[1]
MAINTAINER: Final = "The Postroom authors <authors@postroom.invalid>"  # there is no address to write to
_PLATFORMS: Final = ("manylinux_2_28_{}", "manylinux_2_17_{}", "manylinux2014_{}")
_HOME: Final = "usr/lib/postroom"
_PLACES: Final = {
    "systemd": "usr/lib/systemd/system",
    "user": "usr/lib/systemd/user",
    "sysusers.d": "usr/lib/sysusers.d",
    "tmpfiles.d": "usr/lib/tmpfiles.d",
}
_CONFIGS: Final = {"broker.toml": 0o600, "worker.toml": 0o600, "console.toml": 0o644}
"""The examples that are configs of their own, with their modes: the others are for instances of a unit."""

_PROGRAM: Final = """\
#!/usr/lib/postroom/bin/python3
import sys
from postroom_server import main
if __name__ == "__main__":
    sys.exit(main())
"""
_COMPLETIONS: Final = {
    "bash": "usr/share/bash-completion/completions/postroom",
    "zsh": "usr/share/zsh/vendor-completions/_postroom",
    "fish": "usr/share/fish/vendor_completions.d/postroom.fish",
}


def main() -> None:
    """Build both packages into the directory that has the wheels."""
    dist = Path(sys.argv[1]).absolute()
    day = datetime.fromtimestamp(int(os.environ["SOURCE_DATE_EPOCH"]), UTC)
    (wheel,) = dist.glob("postroom_server-*.whl")
    version = wheel.name.split("-")[1]
    os.umask(0o022)
    with tempfile.TemporaryDirectory() as directory:
        host, server = (Path(directory, name) for name in ("postroom", "postroom-server"))
        fill_environment(host / _HOME, dist, Path(directory, "wheels"))
        fill_shell(host, version, day)
        fill_units(host, server)
        for tree in (host, server):
            package(tree, f"{version}-1", day, dist)


def fill_environment(home: Path, dist: Path, downloads: Path) -> None:
    """Lay out a virtual environment that serves each Python of `PYTHONS`."""
    pure = home / "lib/python3/site-packages"
    machine = os.uname().machine
    # pip would judge what a lock says of versions by the Python that runs it
    lock = re.sub(r" ; python_full_version [^\\]*\\", r" \\", (ROOT / "requirements.lock").read_text("utf-8"))
    downloads.mkdir()
    (downloads / "requirements.lock").write_text(lock, "utf-8")
    for python in PYTHONS:
        found = downloads / python
        pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check", "download", "--no-deps"]
        kind = ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
        kind += [f"--platform={platform.format(machine)}" for platform in _PLATFORMS]
        lock_file = downloads / "requirements.lock"
        subprocess.run([*pip, *kind, "--require-hashes", "-r", lock_file, "-d", found], check=True)
        compiled = home / f"lib/python{python}/site-packages"
        for wheel in sorted(found.glob("*.whl")):
            unpack(wheel, pure if wheel.name.endswith("-none-any.whl") else compiled)
        (compiled / "postroom.pth").write_text("../../python3/site-packages\n")
    for wheel in sorted(dist.glob("*.whl")):
        unpack(wheel, pure)
    (home / "bin").mkdir()
    (home / "bin/python3").symlink_to("../../../bin/python3")
    (home / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    program = home / "bin/postroom"
    program.write_text(_PROGRAM)
    program.chmod(0o755)


def unpack(wheel: Path, site: Path) -> None:
    """Lay a wheel's modules where Python finds them; what it would install elsewhere is not needed here."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if not name.partition("/")[0].endswith(".data")]
        archive.extractall(site, modules)


def fill_shell(tree: Path, version: str, day: datetime) -> None:
    """Add the command, its manual page and its completions, the guides, and what Prometheus and Grafana read."""
    link = tree / "usr/bin/postroom"
    link.parent.mkdir(parents=True)
    link.symlink_to("../lib/postroom/bin/postroom")
    site = tree / _HOME / "lib/python3/site-packages"
    sys.path.insert(0, str(site))  # what is packaged describes itself
    from cli.app import app  # noqa: PLC0415

    compress(tree / "usr/share/man/man1/postroom.1.gz", manual(app, version, day).encode())
    for shell, place in _COMPLETIONS.items():
        file = tree / place
        file.parent.mkdir(parents=True)
        environment = os.environ | {"_POSTROOM_COMPLETE": f"source_{shell}", "PYTHONDONTWRITEBYTECODE": "1"}
        file.write_bytes(subprocess.check_output([sys.executable, "-m", "cli"], cwd=site, env=environment))
    for folder in ("docs", "monitoring"):
        place = tree / "usr/share/doc/postroom" / folder
        shutil.copytree(ROOT / folder, place, ignore=shutil.ignore_patterns("*.py", "__*"))


def manual(root: Any, version: str, day: datetime) -> str:
    """Write the manual page of a Typer application: its verbs, each with its options, in the order of the help."""
    command = get_command(root)
    context = command.context_class(command, info_name="postroom", **command.context_settings)
    lines = [
        f'.TH POSTROOM 1 "{day.astimezone(UTC):%Y-%m-%d}" "postroom {version}" "User Commands"',
        ".SH NAME",
        r"postroom \- the mail room of a machine",
        ".SH SYNOPSIS",
        r"\fBpostroom\fR [\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGS\fR]...",
        ".SH DESCRIPTION",
        "A program hands a message to a daemon on its own host and carries on. This command sends and reads messages,",
        "shows what became of them, repairs what could not be delivered, and runs the programs of an installation.",
        ".SH OPTIONS",
        *_options(command, context),
        ".SH COMMANDS",
        *_commands(command, context, "postroom"),
        ".SH EXIT STATUS",
        _text(command.epilog),
        ".SH SEE ALSO",
        r"\fBsystemctl\fR(1), \fBjournalctl\fR(1), the guides in \fI/usr/share/doc/postroom/docs\fR",
    ]
    return "\n".join(lines) + "\n"


def _commands(group: Any, context: Any, words: str) -> Iterator[str]:
    """Yield a subsection for each verb of a group, and of the groups in it."""
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        inner = verb.context_class(verb, info_name=name, parent=context)
        if verb.hidden:
            continue
        if hasattr(verb, "list_commands"):
            yield from _commands(verb, inner, f"{words} {name}")
            continue
        yield f'.SS "{_text(" ".join([words, name, *verb.collect_usage_pieces(inner)]))}"'
        for paragraph in (verb.help or "").split("\n\n"):
            yield from (_text(" ".join(paragraph.split())), "")
        yield from _options(verb, inner)


def _options(command: Any, context: Any) -> Iterator[str]:
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            name, meaning = record
            yield from (".TP", rf"\fB{_text(name)}\fR", _text(" ".join(meaning.split())) or r"\&")


def _text(plain: str) -> str:
    """Escape what roff would read as its own."""
    escaped = plain.replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped


def fill_units(host: Path, server: Path) -> None:
    """Give each package its units, its users and directories, and its configs."""
    for file in sorted(path for path in (ROOT / "systemd").rglob("*") if path.is_file()):
        tree = host if file.stem in {"postroom", "mesh"} or file.name.startswith("postroomd@") else server
        mode = 0o644
        if file.parent.name != "examples":
            place = tree / _PLACES[file.parent.name] / file.name
        elif file.name in _CONFIGS:
            place, mode = tree / "etc/postroom" / file.name, _CONFIGS[file.name]
        else:
            place = tree / "usr/share/doc" / tree.name / "examples" / file.name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file.read_text("utf-8").replace("/opt/postroom/bin/postroom", "/usr/bin/postroom"), "utf-8")
        place.chmod(mode)


def package(tree: Path, version: str, day: datetime, dist: Path) -> None:
    """Add what Debian wants to know of a package, and build it."""
    name, source = tree.name, ROOT / "release/debian" / tree.name
    documents = tree / "usr/share/doc" / name
    documents.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "release/debian/copyright", documents / "copyright")
    entry = f"{name} ({version}) stable; urgency=medium\n\n  * changelog.gz says what changed.\n\n"
    entry += f" -- {MAINTAINER}  {format_datetime(day)}\n"
    compress(documents / "changelog.Debian.gz", entry.encode())
    compress(documents / "changelog.gz", (ROOT / "CHANGELOG.md").read_bytes())

    overrides = tree / "usr/share/lintian/overrides" / name
    overrides.parent.mkdir(parents=True)
    shutil.copyfile(source / "lintian-overrides", overrides)

    for cache in sorted(tree.rglob("__pycache__")):
        shutil.rmtree(cache)
    files = [path for path in sorted(tree.rglob("*")) if path.is_file() and not path.is_symlink()]
    sums = {
        str(path.relative_to(tree)): hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() for path in files
    }
    control = tree / "DEBIAN"
    control.mkdir()
    (control / "md5sums").write_text("".join(f"{each}  {path}\n" for path, each in sums.items()))
    if configs := "".join(f"/{each}\n" for each in sums if each.startswith("etc/")):
        (control / "conffiles").write_text(configs)
    architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
    described = (source / "control").read_text()
    size = sum(path.stat().st_size // 1024 + 1 for path in files)
    facts = {"version": version, "architecture": architecture, "maintainer": MAINTAINER, "size": size}
    (control / "control").write_text(described.format(**facts, python=", ".join(python_range())))
    shutil.copyfile(ROOT / "release/debian/triggers", control / "triggers")
    for script in ("postinst", "prerm", "postrm"):
        shutil.copyfile(source / script, control / script)
        (control / script).chmod(0o755)
    for path in tree.rglob("*"):
        os.utime(path, (day.timestamp(), day.timestamp()), follow_symlinks=False)
    # threads would cut the data at other places; level 1 takes a fifth of the time of 6, for a quarter more bytes
    build = ["dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--threads-max=1", "--build", tree, dist]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)


def python_range() -> list[str]:
    """Say of Debian's python3 that it is one of `PYTHONS`: from the first to the last, and none between."""
    minors = [int(python.partition(".")[2]) for python in PYTHONS]
    between = [minor for minor in range(minors[0], minors[-1]) if minor not in minors]
    gaps = [f"python3 (<< 3.{minor}~) | python3 (>= 3.{minor + 1}~)" for minor in between]
    return [f"python3 (>= 3.{minors[0]}~)", *gaps, f"python3 (<< 3.{minors[-1] + 1}~)"]


def compress(file: Path, content: bytes) -> None:
    """Write a file as gzip does, but for the time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content, 9, mtime=0))


if __name__ == "__main__":
    main()
