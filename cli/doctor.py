"""`postroom doctor`: looks at Python, SQLite, the disk, directories, secrets and every dependency; says what to do."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import sys
from collections.abc import AsyncIterator, Iterator
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Final

from cli.connect import read_token
from cli.dependencies import look_at_servers
from cli.noun import Json, Socket, TokenFile, Url, noun
from cli.output import show_findings
from postroom import AsyncClient, BrokerClient, PostroomError
from postroom.chassis.exits import Fatal, Finding

PROGRAMS: Final = (*("broker", "broker_client", "cli", "daemon", "embedded", "inbox", "ipc", "outbox", "pipeline"),)
OLDEST_SQLITE: Final = (3, 37, 0)  # STRICT tables
TWO_CONNECTIONS_SQLITE: Final = (3, 51, 3)  # the first without the bug that forbids a second writer or checkpointer
FREE_BYTES: Final = 1024**3


app = noun()


@app.command()
def doctor(*, as_json: Json = False, socket: Socket = None, url: Url = None, token_file: TokenFile = None) -> None:
    """Check files, SQLite, sockets, permissions and every dependency, and show what to do."""

    async def look() -> list[Finding]:
        """Look from the ground up: at the machine, the daemon, the broker, the servers behind it."""
        found = [*_python(), *_sqlite(), *_directories(), *_token(token_file)]
        for asked in (_daemon(socket), _broker(url, token_file), look_at_servers()):
            found += [finding async for finding in asked]
        return found

    show_findings(asyncio.run(look()), as_json=as_json)


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", sys.version.split()[0])
    owners = packages_distributions()
    for name in PROGRAMS:
        if others := set(owners.get(name, ())) - {"postroom-server"}:
            remedy = "install postroom-server into an environment of its own"
            yield Finding("packages", "failed", f"{', '.join(others)} also contains a package {name!r}", remedy)


def _sqlite() -> Iterator[Finding]:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        yield Finding("sqlite", "failed", f"{version} is too old", "use a Python linked with SQLite 3.37 or newer")
    elif sqlite3.sqlite_version_info < TWO_CONNECTIONS_SQLITE:
        detail = f"{version}: open outbox.db with nothing else while the daemon runs (SQLite's WAL-reset bug)"
        yield Finding("sqlite", "ok", detail)
    else:
        yield Finding("sqlite", "ok", version)


def _directories() -> Iterator[Finding]:
    if os.getuid() and "XDG_RUNTIME_DIR" not in os.environ:
        remedy = "log in through PAM (`loginctl enable-linger`), or set socket.path and POSTROOM_SOCKET"
        yield Finding("runtime directory", "warning", "XDG_RUNTIME_DIR is not set", remedy)
    # where `postroom up` keeps everything, else where services and users keep their state
    named = os.environ.get("POSTROOM_STATE") or os.environ.get("XDG_STATE_HOME")
    state = Path(named or ("~/.local/state" if os.getuid() else "/var/lib")).expanduser()
    existing = next(path for path in (state, *state.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    room = f"{free // 1024**2} MiB free below {existing}"
    if free < FREE_BYTES:
        yield Finding("disk", "warning", room, "free some space: sends are refused when the disk is full")
    else:
        yield Finding("disk", "ok", room)
    if not os.access(existing, os.W_OK):
        yield Finding("state directory", "warning", f"{existing} can't be written", "set state_directory")


def _token(file: Path | None) -> Iterator[Finding]:
    if file is None:
        return
    try:
        read_token(file)
    except Fatal as fatal:
        yield Finding("token file", "failed", str(fatal), "put the token there, mode 0600")
        return
    if file.stat().st_mode & 0o077:
        yield Finding("token file", "warning", f"{file} is open to other users", f"chmod 600 {file}")
    else:
        yield Finding("token file", "ok", str(file))


async def _daemon(socket: Path | None) -> AsyncIterator[Finding]:
    try:
        async with AsyncClient(socket, patience=0, timeout=5) as client:
            theirs, health = await client.version(), await client.health()
    except PostroomError as error:
        yield Finding("daemon", "failed", str(error))
        return
    if theirs.version != version("postroom-server"):
        detail = f"the daemon is of version {theirs.version}, this program of {version('postroom-server')}"
        yield Finding("daemon", "warning", detail, "restart the daemon")
    if health.status == "ok":
        yield Finding("daemon", "ok", f"{theirs.version}, mesh {theirs.mesh}")
    for reason in health.reasons:
        yield Finding("daemon", "warning", reason)


async def _broker(url: str | None, token_file: Path | None) -> AsyncIterator[Finding]:
    if url is None:
        yield Finding("broker", "warning", "not checked: POSTROOM_BROKER_URL is not set", "set it, or --url")
        return
    try:
        async with BrokerClient(url, read_token(token_file), patience=0, timeout=5) as client:
            health = await client.health()
    except (PostroomError, Fatal) as error:
        yield Finding("broker", "failed", str(error))
        return
    if health.status == "ok":
        yield Finding("broker", "ok", url)
    for reason in health.reasons:
        yield Finding("broker", "warning", reason)
