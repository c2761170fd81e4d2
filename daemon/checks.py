"""`postroom daemon check`: tries everything that the config names, without disturbing a daemon that runs.

Nothing is changed: no directory is made, no lock taken, no row read.
"""

import os
import socket
import stat
from collections.abc import AsyncIterator, Iterator

from broker_client import BrokerLink, RequestFailed, max_age_hours
from daemon.config import DaemonConfig, socket_path, state_directory, token_file
from ipc.peers import LocalToken
from postroom.chassis.exits import Fatal, Finding
from postroom.chassis.listener import refuse_path
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.errors import PostroomError


async def check(config: DaemonConfig) -> AsyncIterator[Finding]:
    """Yield a finding about each thing that the daemon needs, the broker and NATS last."""
    for finding in (*_state(config), *_socket(config), *_secrets(config)):
        yield finding
    yield await _broker(config)
    if config.nats is not None:
        yield await _nats(config.nats)


def _state(config: DaemonConfig) -> Iterator[Finding]:
    directory = state_directory(config)
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        yield Finding("state directory", "failed", f"{existing} is not a directory", "set another state_directory")
    elif not os.access(existing, os.W_OK | os.X_OK):
        remedy = "give it to the daemon's user, or set another state_directory"
        yield Finding("state directory", "failed", f"{existing} can't be written", remedy)
    elif existing == directory and stat.S_IMODE(directory.stat().st_mode) & 0o077:
        yield Finding("state directory", "warning", f"{directory} is open to other users", f"chmod 700 {directory}")
    else:
        yield Finding("state directory", "ok", str(directory))


def _socket(config: DaemonConfig) -> Iterator[Finding]:
    path = socket_path(config)
    try:
        refuse_path(path)
    except Fatal as fatal:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(str(path))
            yield Finding("socket", "ok", f"a daemon answers on {path}")
        except OSError:
            yield Finding("socket", "failed", str(fatal))
    else:
        yield Finding("socket", "ok", f"{path} is free: no daemon answers there")


def _secrets(config: DaemonConfig) -> Iterator[Finding]:
    file = config.broker.token_file
    try:
        mode = file.stat().st_mode
        readable = os.access(file, os.R_OK)
    except OSError as error:
        yield Finding("broker.token_file", "failed", f"{file}: {error.strerror}", "put the member's token there")
    else:
        if not stat.S_ISREG(mode):
            yield Finding("broker.token_file", "failed", f"{file} is not a regular file", "put the token into one")
        elif not readable:
            yield Finding("broker.token_file", "failed", f"{file} can't be read", "give it to the daemon's user")
        elif mode & stat.S_IRWXO:
            yield Finding("broker.token_file", "failed", f"{file} is open to every user", f"chmod 600 {file}")
        elif mode & stat.S_IRWXG:
            yield Finding("broker.token_file", "warning", f"{file} is open to its group", f"chmod 600 {file}")
        else:
            yield Finding("broker.token_file", "ok", str(file))
    if config.tcp.port is not None:
        try:
            LocalToken(token_file(config))
        except Fatal as fatal:
            yield Finding("tcp.token_file", "failed", str(fatal))


async def _broker(config: DaemonConfig) -> Finding:
    try:
        async with BrokerLink(config.broker) as link:
            features = await link.features()
        if features.mesh != config.mesh:
            detail = f"the token is for {features.member} in mesh {features.mesh}, not in {config.mesh}"
            return Finding("broker", "failed", detail, "set mesh and broker.token_file so that they match")
        hours = max_age_hours(features, config.relay.max_age_hours)
    except Fatal as fatal:
        return Finding("broker", "failed", str(fatal))
    except RequestFailed as error:
        remedy = "start it, or set broker.url and broker.token_file; until then the daemon accepts and stores messages"
        return Finding("broker", "failed", str(error), remedy)
    return Finding("broker", "ok", f"{config.broker.url} as {features.member}; rows become dead after {hours} h")


async def _nats(settings: NatsSettings) -> Finding:
    remedy = "start it, or set nats.url and nats.credentials_file; until then nothing arrives in the inbox"
    try:
        connection = await connect(settings, name="postroom daemon check", patience=settings.connect_seconds)
    except (PostroomError, Fatal) as error:
        return Finding("nats", "failed", str(error), remedy)
    await connection.close()
    return Finding("nats", "ok", "it answers")
