"""Connecting to JetStream: tries for ever unless told otherwise, comes back by itself, and logs what happens to it."""

from __future__ import annotations

import asyncio
import ssl
import stat
from pathlib import Path
from typing import Any, Final

import structlog
from nats.aio.client import Client

from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.errors import from_nats, is_refusal
from postroom.delivery.nats_client import NatsClient
from postroom.delivery.settings import NatsSettings

_log = structlog.get_logger(__name__)

_BUFFER: Final = 8 * 1024 * 1024  # bytes that may wait for a server that is away
_PINGS: Final = 2  # unanswered ones after which the server counts as gone


async def connect(
    settings: NatsSettings, *, name: str, patience: float | None = None, reconnect: bool = True, logged: bool = True
) -> Client:
    """Connect as `name`; endlessly, or for `patience` seconds, after which it raises `Unavailable` or `NotPermitted`.

    Afterwards the connection comes back by itself for as long as it is not closed. The caller closes it. Without
    `reconnect` there is one try, and a connection that breaks stays closed: what was sent is then a beginning of it.
    What happens to it goes to the log unless `logged` is False: a person at a terminal reads the exception.
    Raises `Fatal` (78) where a file that the settings name cannot be read.
    """
    client = NatsClient(logged=logged)
    events = _Events(name, client, logged=logged)
    trust = _trust(settings)
    try:
        async with asyncio.timeout(patience):
            await client.connect(
                [url.strip() for url in settings.url.split(",")],
                name=name,
                tls=trust,
                connect_timeout=settings.connect_seconds,  # type: ignore[arg-type] # any number of seconds
                reconnect_time_wait=settings.reconnect_seconds,  # type: ignore[arg-type]
                allow_reconnect=reconnect,
                max_reconnect_attempts=-1,
                ping_interval=settings.ping_seconds,  # type: ignore[arg-type]
                max_outstanding_pings=_PINGS,
                pending_size=_BUFFER,
                error_cb=events.failed,
                disconnected_cb=events.disconnected,
                reconnected_cb=events.reconnected,
                **_credentials(settings.credentials_file),
            )
    except Fatal:
        raise
    except asyncio.CancelledError:
        await client.close()
        raise
    except Exception as error:
        await client.close()
        raise from_nats(events.last or error, "connecting to NATS") from error
    return client


def end_if_cancelled() -> None:
    """Raise `CancelledError` where the current task was cancelled and goes on.

    The client of NATS may swallow a cancellation in the midst of a request. So whatever only a cancellation ends asks
    here after its requests: it would go on for ever.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class _Events:
    """What a connection tells of itself, into the log."""

    def __init__(self, name: str, client: Client, *, logged: bool) -> None:
        self._log = _log.bind(connection=name)
        self._logged = logged
        self._client = client
        self.last: Exception | None = None

    async def failed(self, error: Exception) -> None:
        if self._logged and str(error) != str(self.last):  # an outage repeats one error at every try
            self._log.warning("nats_error", error=str(error) or type(error).__name__)
        if not is_refusal(self.last):  # a server that refuses a user may also just hang up on the next try
            self.last = error

    async def disconnected(self) -> None:
        if self._logged and not self._client.is_closed:
            self._log.warning("nats_disconnected")

    async def reconnected(self) -> None:
        self.last = None
        if self._logged:
            self._log.info("nats_reconnected")


def _credentials(file: Path | None) -> dict[str, Any]:
    """Return the options that make nats-py read `file` at each connection; raises `Fatal` where it is unusable now."""
    if file is None:
        return {}
    if ":" not in _secret(file):
        return {"token": lambda: _secret(file)}
    return {"user": lambda: _secret(file).partition(":")[0], "password": lambda: _secret(file).partition(":")[2]}


def _secret(file: Path) -> str:
    try:
        mode, text = file.stat().st_mode, file.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Fatal(Exit.CONFIG, f"cannot read the NATS credentials {file}: {error}") from error
    if mode & stat.S_IRWXO:
        raise Fatal(Exit.CONFIG, f"the NATS credentials {file} are open to every user: chmod 600 it")
    if not text or not text.isprintable():
        raise Fatal(Exit.CONFIG, f"{file} has no NATS credentials: one line, `user:password` or a token, is expected")
    return text


def _trust(settings: NatsSettings) -> ssl.SSLContext | None:
    if settings.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise Fatal(Exit.CONFIG, f"cannot read the authorities in {settings.ca_file}: {error}") from error
