"""`postroom doctor`: looks at Python, SQLite, the disk, directories, secrets and every server; says what to do."""

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
from cli.noun import Json, Socket, TokenFile, Url, noun
from cli.output import show_findings
from postroom import AsyncClient, BrokerClient, PostroomError
from postroom._wire.administration import BrokerHealth
from postroom._wire.programs import LOW_DISK_BYTES
from postroom._wire.sends import Health
from postroom._wire.sql import why_failed
from postroom.chassis.config import state_home
from postroom.chassis.exits import EXIT_OF, Exit, Fatal, Finding
from postroom.chassis.store import CHECKPOINT_BYTES
from postroom.errors import TryAgain

PROGRAMS: Final = (
    "broker", "broker_client", "cli", "console", "daemon", "embedded", "inbox", "ipc", "outbox", "pipeline",
)  # fmt: skip
OLDEST_SQLITE: Final = (3, 37, 0)  # STRICT tables
TWO_CONNECTIONS_SQLITE: Final = (3, 51, 3)  # the first without the bug that forbids a second writer or checkpointer
PATIENCE: Final = 5.0  # seconds that a person waits for NATS
_REDIS_MILLISECONDS: Final = 5000


app = noun()


@app.command()
def doctor(*, as_json: Json = False, socket: Socket = None, url: Url = None, token_file: TokenFile = None) -> None:
    """Check files, SQLite, sockets, permissions and every dependency, and show what to do."""

    async def look() -> list[Finding]:
        """Look from the ground up: at the machine, the daemon, the broker, the servers behind it."""
        found = [*_machine(), *_token(token_file)]
        for asked in (_programs(socket, url, token_file), _servers()):
            found += [finding async for finding in asked]
        return found

    show_findings(asyncio.run(look()), as_json=as_json)


def _machine() -> Iterator[Finding]:
    """Look at Python, SQLite, and the directories where services and users keep their state."""
    yield Finding("python", "ok", sys.version.split()[0])
    owners = packages_distributions()
    for name in PROGRAMS:
        if others := set(owners.get(name, ())) - {"postroom-server"}:
            remedy = "install postroom-server into an environment of its own"
            yield Finding("packages", "failed", f"{', '.join(others)} also contains a package {name!r}", remedy)
    linked = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        yield Finding("sqlite", "failed", f"{linked} is too old", "use a Python linked with SQLite 3.37 or newer")
    elif sqlite3.sqlite_version_info < TWO_CONNECTIONS_SQLITE:
        detail = f"{linked}: open outbox.db with nothing else while the daemon runs (SQLite's WAL-reset bug)"
        yield Finding("sqlite", "ok", detail)
    else:
        yield Finding("sqlite", "ok", linked)
    if os.getuid() and not os.environ.get("XDG_RUNTIME_DIR"):
        remedy = "log in through PAM (`loginctl enable-linger`), or set socket.path and POSTROOM_SOCKET"
        yield Finding("runtime directory", "warning", "XDG_RUNTIME_DIR is not set", remedy)
    # where `postroom up` keeps everything, else where services and users keep their state
    stack = os.environ.get("POSTROOM_STATE")
    state = Path(stack) if stack else state_home(os.environ, "set XDG_STATE_HOME")
    existing = next(path for path in (state, *state.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    room = f"{free // 1024**2} MiB free below {existing}"
    if free < CHECKPOINT_BYTES:
        yield Finding("disk", "failed", room, "free some space: sends are refused")
    elif free < LOW_DISK_BYTES:
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


async def _programs(socket: Path | None, url: str | None, token_file: Path | None) -> AsyncIterator[Finding]:
    try:
        async with AsyncClient(socket, patience=0, timeout=5) as daemon:
            theirs, health = await daemon.version(), await daemon.health()
            refusal = None  # why it would refuse a send now
            try:
                await daemon.ready()
            except TryAgain as error:
                refusal = str(error)
        if theirs.version != version("postroom-server"):
            detail = f"the daemon is of version {theirs.version}, this program of {version('postroom-server')}"
            yield Finding("daemon", "warning", detail, "restart the daemon")
        if refusal is not None:
            yield Finding("daemon", "failed", refusal)
            health.reasons = [reason for reason in health.reasons if reason != refusal]
        for finding in _judged("daemon", health, f"{theirs.version}, mesh {theirs.mesh}"):
            yield finding
    except PostroomError as error:
        yield Finding("daemon", "failed", str(error))
    if url is None:
        yield Finding("broker", "warning", "not checked: POSTROOM_BROKER_URL is not set", "set it, or --url")
        return
    try:
        async with BrokerClient(url, read_token(token_file), patience=0, timeout=5) as broker:
            answer = await broker.health()
            if answer.status != "unavailable":  # other programs have such a page too, and none of them asks for a token
                await broker.whoami()
            for finding in _judged("broker", answer, url):
                yield finding
    except (PostroomError, Fatal) as error:
        yield Finding("broker", "failed", str(error))


def _judged(subject: str, health: Health | BrokerHealth, address: str) -> Iterator[Finding]:
    if health.status == "ok":
        yield Finding(subject, "ok", address)
    for reason in health.reasons:
        yield Finding(subject, "warning", reason)


async def _servers() -> AsyncIterator[Finding]:
    """Yield a finding for each server that the environment names; none shows an address, which may hold a password.

    What is not named is not looked for: a machine that has only a daemon needs none of them.
    """
    asked = (
        ("postgres", "POSTROOM_DATABASE_URL", _postgres),
        ("redis", "POSTROOM_REDIS_URL", _redis),
        ("nats", "POSTROOM_NATS_URL", _nats),
    )
    remedies = {  # of an error that does not say itself what to do
        Exit.UNAVAILABLE: "start it (`postroom up` starts one of its own), or correct {}",
        Exit.CONFIG: "correct {}",
    }
    for subject, variable, ask in asked:
        url = os.environ.get(variable)
        if not url:
            continue
        try:
            yield Finding(subject, "ok", await ask(url))
        except (PostroomError, Fatal) as error:
            code = error.exit_code if isinstance(error, Fatal) else EXIT_OF.get(type(error).__name__, Exit.FAILED)
            yield Finding(subject, "failed", str(error), remedies.get(code, "").format(variable) or None)


async def _postgres(url: str) -> str:
    from postroom.chassis.postgres import check_server, connected, schema_version  # noqa: PLC0415

    async with connected(url) as connection:
        check_server(connection)
        if not await schema_version(connection, "broker"):
            raise Fatal(Exit.CONFIG, "the database has no tables of Postroom: `postroom broker migrate` makes them")
        version = connection.get_server_version()
    return f"version {version.major}.{version.micro} answers"


async def _redis(url: str) -> str:
    from redis.exceptions import RedisError  # noqa: PLC0415

    from broker.config import LimiterConfig  # noqa: PLC0415
    from broker.limiter import RedisWindow, open_redis, why_unusable  # noqa: PLC0415

    config = LimiterConfig(timeout_ms=_REDIS_MILLISECONDS)
    redis = open_redis(url, config)
    try:
        await RedisWindow(redis, config).probe()
    except (RedisError, OSError) as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error  # redis-py quotes its numbers
        other = f"Redis cannot be used: {why_failed(cause)}; check its URL, and that it takes writes"
        raise Fatal(Exit.UNAVAILABLE, why_unusable(error) or other) from error
    finally:
        await redis.aclose()
    return "it answers"


async def _nats(_: str) -> str:
    """Ask for JetStream, without which NATS is of no use here; `POSTROOM_NATS_…` are the settings of `nats`."""
    from postroom.chassis.config import load  # noqa: PLC0415
    from postroom.delivery.errors import mapped  # noqa: PLC0415
    from postroom.delivery.nats import connect  # noqa: PLC0415
    from postroom.delivery.settings import NatsSettings  # noqa: PLC0415

    settings = load(NatsSettings, None, prefix="POSTROOM_NATS_")
    connection = await connect(settings, name="postroom doctor", patience=PATIENCE, logged=False)
    try:
        with mapped("asking for JetStream"):
            await connection.jetstream().account_info()
    finally:
        await connection.close()
    return "it answers, with JetStream"
