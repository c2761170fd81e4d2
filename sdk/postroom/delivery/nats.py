"""The connection to JetStream: tries for ever unless configured otherwise, reconnects by itself, and logs it.

No message can stop its reader. nats-py parses messages in its one read loop: a header block or a subject that it cannot
read raises there and ends the loop, and with it every subscription, while the connection looks alive. A server stores
such messages from any publisher. So what nats-py could not read is rewritten before it gets there: the message arrives
like any other, with its body unchanged, and `UNREADABLE` has its headers in base64 (`UNREADABLE_SUBJECT` its subject).
What becomes of it is decided where messages are handled (`postroom.delivery.consumer`).

This relies on private names of nats-py (`_ps`, `_process_…`, the state of its parser, attributes of a JetStream
context), which are used in this file only. Therefore its version has an upper bound, and a test sends what is rewritten
here through a real server.
"""

import asyncio
import os
import re
import ssl
from base64 import b64encode
from collections import deque
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from weakref import WeakSet

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error, ProtocolError
from nats.js import JetStreamContext
from nats.protocol.parser import (
    AWAITING_CONTROL_LINE,
    AWAITING_MSG_PAYLOAD,
    CRLF_SIZE,
    PERMISSIONS_ERR,
    STALE_CONNECTION,
    Parser,
)

from postroom._wire.http import why_unreachable
from postroom.chassis.config import read_secret, show_certificate, trusting
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import give_up
from postroom.delivery.errors import NATS_ERRORS, from_nats, is_refusal
from postroom.delivery.settings import NatsSettings

_log = structlog.get_logger(__name__)

CLOCK_SKEW: Final = timedelta(minutes=10)  # by which the clocks of Postgres and NATS may differ
FROM_A_STREAM: Final = "$JS.ACK."  # how the reply subject of a message from a stream begins: there it is acknowledged

_SCHEMES: Final = {"nats", "tls", "ws", "wss"}
_BUFFER: Final = 8 * 1024 * 1024  # bytes that may wait for an unreachable server
MOST_HEADER_BYTES: Final = 15 * 1024  # of a message, in addition to what `most_payload` leaves for its payload
_AROUND_BYTES: Final = 1024  # of what is put around a payload, and of headers that publishing adds
USUAL_PAYLOAD: Final = 8 * 1024 * 1024 - MOST_HEADER_BYTES - _AROUND_BYTES  # with the `max_payload` of docs/install.md
_DENIALS: Final = 1024  # that are remembered: there may be one for each message of a batch
_UNREACHABLE: Final = "NATS is unreachable"
_CLOSE_SECONDS: Final = 3.0
_PINGS: Final = 2  # unanswered ones after which the server counts as unreachable

UNREADABLE: Final = "Postroom-Unreadable-Headers"  # base64 of a block that holds no headers, or control characters
UNREADABLE_SUBJECT: Final = "Postroom-Unreadable-Subject"  # base64 of a subject that is not UTF-8

_SEED: Final = re.compile("SU[A-Z2-7]{56}")  # of a user's key
_BEGIN: Final = "-----BEGIN "  # of a .creds file
_CREDENTIALS: Final = re.compile(
    rf"{_BEGIN}NATS USER JWT-+\s+([!-~]+)\s.*-BEGIN USER NKEY SEED-+\s+({_SEED.pattern})\s", re.DOTALL
)
_LINES: Final = rb"\r\n(?:[^:\x00-\x1f\x7f]+:[^\x00-\x08\n-\x1f\x7f]*\r\n)*\r\n"
_STORED_BLOCK: Final = re.compile(rb"NATS/1\.0" + _LINES)
_SERVER_BLOCK: Final = re.compile(rb"NATS/1\.0(?: +\d\d\d[^\r\n]*)?" + _LINES)  # a status is the server's to say
_STORED: Final = FROM_A_STREAM.encode()
_MESSAGES: Final = (b"MSG ", b"HMSG ")
_END: Final = b"\r\n"


async def connect(
    settings: NatsSettings,
    *,
    name: str,
    patience: float | None = None,
    reconnect: bool = True,
    logged: bool = True,
    client: "NatsClient | None" = None,
) -> "NatsClient":
    """Connect as `name`; endlessly, or for `patience` seconds, after which it raises `Unavailable` or `NotPermitted`.

    Afterwards the connection comes back by itself until the caller closes it. Without `reconnect` each server is tried
    twice, and a connection that breaks stays closed: the server then has a beginning of what was sent.
    Outages are logged unless `logged` is False: a person at a terminal reads the exception. A caller that waits
    endlessly passes a `client`, of which `trouble_of` says meanwhile why it is not connected.
    Raises `Fatal` (78) as `usable` does.
    """
    options = usable(settings)
    client = client or NatsClient(logged=logged)
    events = _Events(name, client, logged=logged)
    try:
        async with asyncio.timeout(patience):
            await client.connect(
                name=name,
                connect_timeout=settings.connect_seconds,  # type: ignore[arg-type] # any number of seconds
                reconnect_time_wait=settings.reconnect_seconds,  # type: ignore[arg-type]
                allow_reconnect=reconnect,
                # nats-py applies it to the first connection too, whatever `allow_reconnect` is; -1 sets no limit.
                max_reconnect_attempts=-1 if reconnect else 1,
                ping_interval=settings.ping_seconds,  # type: ignore[arg-type]
                max_outstanding_pings=_PINGS,
                pending_size=_BUFFER,
                inbox_prefix=settings.inbox_prefix,
                error_cb=events.failed,
                disconnected_cb=events.disconnected,
                reconnected_cb=events.reconnected,
                **options,
            )
            end_if_cancelled()
    except asyncio.CancelledError:
        await client.close()
        raise
    except Exception as error:
        await client.close()
        raise from_nats(client.failure or error, "connecting to NATS") from error
    return client


def usable(settings: NatsSettings) -> dict[str, Any]:
    """Return nats-py's options for them; raises `Fatal` (78) where they name no servers, or an unusable file."""
    tls = trusting(settings.ca_file, "nats.ca_file")
    if settings.cert_file is not None and settings.key_file is not None:
        tls = tls or ssl.create_default_context()
        show_certificate(tls, settings.cert_file, settings.key_file, "nats.cert_file", "nats.key_file")
    return {"servers": _servers(settings.url), "tls": tls, **_credentials(settings.credentials_file)}


def _servers(urls: str) -> list[str]:
    """Take the list apart; nats-py would end in an assertion at an address that it cannot read."""
    servers = [url.strip() for url in urls.split(",")]
    for url in servers:
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            valid = parts.scheme in _SCHEMES and parts.hostname and parts.port != 0
        except ValueError:  # such as a port that is not a number
            valid = False
        if not valid:
            raise Fatal(Exit.CONFIG, "nats.url is not a list of NATS servers: write nats://host:port,tls://host:port,…")
    return servers


def end_if_cancelled() -> None:
    """Raise `CancelledError` where the current task was cancelled but still runs.

    nats-py may swallow a cancellation, while it closes what is left of a try to connect as during a request. A loop
    that only a cancellation ends would then run for ever, so it calls this after its requests.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


class _Events:
    def __init__(self, name: str, client: "NatsClient", *, logged: bool) -> None:
        self._log = _log.bind(connection=name)
        self._logged = logged
        self._client = client

    async def failed(self, error: Exception) -> None:
        if not self._client.is_closed:
            end_if_cancelled()  # else nats-py would try for ever
        is_told = is_refusal(self._client.failure) or isinstance(self._client.failure, ssl.SSLError)
        if is_told and isinstance(error, (BrokenPipeError, ConnectionResetError)):
            return  # a server that refuses a user, or asks for a certificate, may also just hang up on the next try
        raised = not self._client.is_connected and not self._client.options["allow_reconnect"]  # to the caller
        repeated = str(error) == str(self._client.failure)  # an outage repeats one error at every try
        if self._logged and not raised and not repeated:
            why = why_unreachable(error, "nats.ca_file") if isinstance(error, OSError) else str(error)
            self._log.warning("nats_error", error=why or type(error).__name__)
        self._client.failure = error

    async def disconnected(self) -> None:
        if self._client.is_closed:
            return
        self._client.failure = None
        if self._logged:
            self._log.warning("nats_disconnected")

    async def reconnected(self) -> None:
        self._client.failure = None
        if self._logged:
            self._log.info("nats_reconnected")


def _credentials(file: Path | None) -> dict[str, Any]:
    """Return the options that make nats-py read `file` at each connection; raises `Fatal` where it is unusable now."""
    if file is None:
        return {}
    secret = _secret(file)
    if _key_in(secret) is not None:
        _signer(file, secret)
        return {"user_credentials": str(file)}
    if ":" not in secret:
        return {"token": lambda: _secret(file)}
    return {"user": lambda: _secret(file).partition(":")[0], "password": lambda: _secret(file).partition(":")[2]}


def _secret(file: Path) -> str:
    text = read_secret(file, "the NATS credentials").decode("utf-8", "replace").strip()
    is_line = text and text.isascii() and text.isprintable() and not text.startswith(_BEGIN)
    if not is_line and _key_in(text) is None:
        expected = "one line, `user:password`, a token or an nkey's seed, or a .creds file"
        raise Fatal(Exit.CONFIG, f"{file} has no NATS credentials: give it {expected}")
    return text


def _key_in(secret: str) -> tuple[str, str | None] | None:
    """Return the seed of a key, and the token (a JWT) that names its user where NATS does not know the key itself."""
    if (both := _CREDENTIALS.search(secret)) is not None:
        return both[2], both[1]
    return (secret, None) if _SEED.fullmatch(secret) else None


def _signer(file: Path, secret: str) -> tuple[Any, str | None]:
    """Return the keys and the token; raises `Fatal` where there are none, or nothing to sign with."""
    try:
        import nkeys  # noqa: PLC0415 - the extra of the same name
    except ImportError as error:
        sentence = f"{file} has a key, and the package that signs with it is missing"
        raise Fatal(Exit.CONFIG, f"{sentence}: install it with `pip install 'postroom[nkeys]'`") from error
    if (found := _key_in(secret)) is None:
        raise Fatal(Exit.CONFIG, f"{file} has no key any more: put it back, or restart this program")
    seed, token = found
    return nkeys.from_seed(bytearray(seed, "ascii")), token


_clients: Final = WeakSet["NatsClient"]()  # of this process


def _leave_to_parent() -> None:
    """Give up the connections in a forked child: to one that outlives its killed parent NATS goes on to deliver."""
    for client in _clients:
        writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001 - nats-py has no other way to it
        if writer is not None and not writer.transport.is_closing():
            give_up(writer.get_extra_info("socket").fileno())


os.register_at_fork(after_in_child=_leave_to_parent)


class NatsClient(Client):
    """A client whose messages always have readable headers and a subject in UTF-8."""

    def __init__(self, *, logged: bool = True) -> None:
        """Log what could not be read if `logged`."""
        super().__init__()
        self._ps = _Parser(self)
        self._logged = logged
        self.denials = 0  # how often the server did not let this user do something
        self._denied = deque[str](maxlen=_DENIALS)  # the last of them, in its words
        self.failure: Exception | None = None  # what kept it from connecting last; None once it has
        _clients.add(self)

    async def close(self) -> None:
        """Close it; what is still to be sent has a few seconds, since a server that hangs must not block a program."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await super().close()
        except TimeoutError:
            if (writer := getattr(self._transport, "_io_writer", None)) is not None:
                writer.transport.abort()

    def denied(self, subject: str, since: int) -> Error | None:
        """Return what the server said where it did not let this user publish to `subject` after `since` denials.

        One that ends with a dot is any below it.
        """
        begins = f' publish to "{subject.lower()}' + ("" if subject.endswith(".") else '"')
        last = islice(reversed(self._denied), self.denials - since)
        said = next((said for said in last if begins in said), None)
        return None if said is None else Error(f"nats: {said}")

    async def request(self, subject: str, *arguments: Any, **options: Any) -> Msg:
        """Ask; where no answer came since the server does not let this user ask, or hear answers, raise what it said.

        It says so of a subject, not of a request, which nats-py lets run out of time.
        """
        try:
            return await super().request(subject, *arguments, **options)
        except TimeoutError as error:
            inbox = bytes(self._resp_sub_prefix or b"").decode()
            ends = f' publish to "{subject.lower()}"', f' subscription to "{inbox.lower()}*"'
            if denied := next((said for said in self._denied if said.endswith(ends)), None):
                raise Error(f"nats: {denied}") from error
            raise

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:  # noqa: FBT001, FBT002
        """Use TLS where the URL or a setting asks for it: nats-py would give its password to a server without."""
        scheme = "" if self._current_server is None else self._current_server.uri.scheme
        if scheme == "tls" or (scheme == "nats" and "tls" in self.options):
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    async def _process_connect_init(self) -> None:
        """Close what a failed try leaves, which nats-py forgets, and raise what it goes on after.

        Any other error, as for credentials that cannot be read, would end its only task that connects again.
        """
        self._denied.clear()
        try:
            await super()._process_connect_init()
        except Exception as error:
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]
            if isinstance(error, NATS_ERRORS):
                raise
            raise Error(str(error)) from error

    def _setup_nkeys_connect(self) -> None:
        self._signature_cb = self._sign

    def _sign(self, nonce: str) -> bytes:
        """Sign as the user in the file as it is by now: nats-py stays with the first, or hangs in a file cut short."""
        file = Path(str(self._user_credentials))
        key, token = _signer(file, _secret(file))
        self._public_nkey = key.public_key.decode()
        self._user_jwt_cb = None if token is None else lambda: bytearray(token, "ascii")
        return b64encode(key.sign(nonce.encode()))

    def _connect_command(self) -> bytes:
        """Let the end of a TLS connection close it: nats-py's protocol keeps it open, of which asyncio warns."""
        if (writer := getattr(self._transport, "_io_writer", None)) is not None:
            protocol = writer.transport.get_protocol()
            if protocol is None:
                raise ConnectionResetError("it hung up")
            protocol._over_ssl = True  # noqa: SLF001
        return super()._connect_command()

    async def _process_err(self, err_msg: str) -> None:
        """Connect again where the server ends the connection, such as for a new password: nats-py would close it."""
        if PERMISSIONS_ERR in err_msg:
            self._denied.append(err_msg.strip("'"))
            self.denials += 1
        if not self.is_connected or PERMISSIONS_ERR in err_msg or STALE_CONNECTION in err_msg:
            await super()._process_err(err_msg)
            return
        error = Error("nats: " + err_msg.strip("'"))
        await self._error_cb(error)
        await self._process_op_err(error)

    async def _process_pong(self) -> None:
        """Take the answer to a flush that was given up, which would end nats-py's reader."""
        if self._pongs and self._pongs[0].done():
            self._pongs[0] = asyncio.get_running_loop().create_future()
        await super()._process_pong()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        rewritten = b""
        block = _STORED_BLOCK if reply.startswith(_STORED) else _SERVER_BLOCK
        if headers and (block.fullmatch(headers) is None or not _is_text(headers)):
            rewritten, headers = _line(UNREADABLE, headers), None
        if not _is_text(subject):
            rewritten += _line(UNREADABLE_SUBJECT, subject)
            subject = subject.decode("utf-8", "backslashreplace").encode()
        if rewritten:
            if self._logged:
                _log.warning("message_unreadable", subject=subject.decode(), headers=headers is None)
            headers = (headers or b"NATS/1.0\r\n\r\n").removesuffix(_END) + rewritten + _END
        try:
            await super()._process_msg(sid, subject, reply, data, headers)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - raised here, it would end the reader; a stream delivers the message again
            _log.exception("message_skipped", subject=subject.decode())


class _Parser(Parser):
    """nats-py's parser, except that it splits a message's line into words as the server does.

    Its own patterns end a subject at each byte that is white space to them, such as a vertical tab, which the server
    allows; then they do not recognise the line.
    """

    async def parse(self, data: bytes = b"") -> None:
        """Hand on what is complete and keep the rest; a `ProtocolError` makes the client reconnect."""
        buffer = self.buf
        buffer.extend(data)
        while buffer and buffer is self.buf:  # a reset replaces it
            if self.state == AWAITING_MSG_PAYLOAD:
                if len(buffer) < self.needed + CRLF_SIZE:
                    return
                await self._hand_on(buffer)
                continue
            length = buffer.find(_END)
            if length < 0:
                return
            if buffer.startswith(_MESSAGES):
                self._begin(bytes(buffer[:length]).split(b" "))
                del buffer[: length + CRLF_SIZE]
            else:
                rest = bytes(buffer[length + CRLF_SIZE :])
                del buffer[length + CRLF_SIZE :]
                await super().parse()
                if buffer:
                    raise ProtocolError("nats: unknown protocol")
                buffer.extend(rest)

    def _begin(self, words: list[bytes]) -> None:
        sizes = 2 if words[0] == b"HMSG" else 1  # of the headers, and of both
        try:
            _, subject, sid, *reply = words[:-sizes]
            self.msg_arg = {"subject": subject, "sid": int(sid), "reply": reply[0] if reply else b""}
            self.header_needed, self.needed = int(words[-2]) if sizes > 1 else 0, int(words[-1])
        except ValueError as error:
            raise ProtocolError("nats: malformed MSG") from error
        self.state = AWAITING_MSG_PAYLOAD

    async def _hand_on(self, buffer: bytearray) -> None:
        headers, body = bytes(buffer[: self.header_needed]), bytes(buffer[self.header_needed : self.needed])
        del buffer[: self.needed + CRLF_SIZE]
        self.header_needed, self.state = 0, AWAITING_CONTROL_LINE
        message = self.msg_arg
        await self.nc._process_msg(message["sid"], message["subject"], message["reply"], body, headers)  # noqa: SLF001


def trouble_of(client: Client) -> str | None:
    """Return why a client is not connected, as a sentence; None where it is."""
    if client.is_connected:
        return None
    failure = client.failure if isinstance(client, NatsClient) else None
    return _UNREACHABLE if failure is None else str(from_nats(failure, _UNREACHABLE))


def connection_of(js: JetStreamContext) -> Client:
    """Return the connection of a context."""
    connection: Client = js._nc  # noqa: SLF001
    return connection


def most_payload(js: JetStreamContext) -> int:
    """Return how many bytes a message's payload may have, with headers of `MOST_HEADER_BYTES`."""
    return connection_of(js).max_payload - MOST_HEADER_BYTES - _AROUND_BYTES


def api_subject(js: JetStreamContext, request: str) -> str:
    """Return the subject of a request to JetStream's API, such as `STREAM.LIST`."""
    return f"{js._prefix}.{request}"  # noqa: SLF001


async def ask_api(js: JetStreamContext, request: str, body: bytes) -> dict[str, Any]:
    """Ask JetStream's API; raises nats-py's errors."""
    answer: dict[str, Any] = await js._api_request(api_subject(js, request), body, timeout=js._timeout)  # noqa: SLF001
    return answer


def _is_text(octets: bytes) -> bool:
    try:
        octets.decode()
    except UnicodeDecodeError:
        return False
    return True


def _line(name: str, octets: bytes) -> bytes:
    return f"{name}: ".encode() + b64encode(octets) + _END
