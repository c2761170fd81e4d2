"""One call of the handler, everything that can go wrong with it, and how its answer is read.

A redirect is never followed, and no more of an answer is read than its limit: the status alone decides, the rest gives
the reason of a failure. Whatever a handler does, `call` returns an `Answer`, and `judge` reads it by the table of
docs/contract/delivery.md#delivery-35:

| the handler says                                  | the message is                                            |
|---------------------------------------------------|-----------------------------------------------------------|
| 2xx, 409                                          | processed                                                 |
| 422                                               | dead                                                      |
| 5xx, 408, 425, 429, no answer in time, none at all | waiting for its next attempt (`Retry-After` is honoured)  |
| any other 4xx, a redirect                         | the same, so that a wrong deployment buries no stream     |
| nothing: no connection came about                 | waiting, and this was no attempt                          |

After the last attempt what would be waiting is dead too, with the reason `max_deliver`.
"""

from __future__ import annotations

import errno
import ssl
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import msgspec

from postroom._wire.retry import read_retry_after
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.logs import clean
from postroom.delivery.consumer import DONE, Attempts, Dead, Delivery, Outcome
from postroom.delivery.http.addresses import Guard
from postroom.delivery.http.requests import IDEMPOTENCY_KEY, signed
from postroom.delivery.settings import HandlerSettings
from postroom.signatures import MIN_SECRET_BYTES

UNREACHABLE: Final = "handler_unreachable"  # the code of a call that found nobody
UNTRUSTED: Final = "handler_untrusted"  # and of one whose connection could not be encrypted as it should be
NOBODY_THERE: Final = (UNREACHABLE, UNTRUSTED)
POISON: Final = "poison"  # the reason of a message that its handler refused with 422

_ALREADY_PROCESSED: Final = 409
_UNPROCESSABLE: Final = 422
_SUCCESS: Final = range(200, 300)
_CHUNK: Final = 64 * 1024
_IDLE_SECONDS: Final = 4.0  # shorter than servers keep an idle connection, so that a call rarely meets one being closed
_CONNECT_SHARE: Final = 0.75  # of the time for an answer, so that a call knows which of the two has run out
_REDIRECTS: Final = range(300, 400)


class Answer(NamedTuple):
    """What one call came to: a status, or none where no answer came; `code` and `detail` say why it failed."""

    status: int | None
    code: str
    detail: str
    retry_after: float | None = None  # seconds, clamped

    @property
    def reached(self) -> bool:
        """Whether there was anybody who could have handled the message."""
        return self.code not in NOBODY_THERE

    @property
    def error(self) -> str:
        """The failure in words, as `last_error` keeps it."""
        return f"{self.code}: {self.detail}" if self.detail else self.code


def judge(answer: Answer, delivery: Delivery, attempt: int, attempts: Attempts) -> Outcome:
    """Turn the answer to attempt number `attempt` into what becomes of the message; somebody was reached."""
    if answer.status is not None and (answer.status in _SUCCESS or answer.status == _ALREADY_PROCESSED):
        return DONE
    if answer.status == _UNPROCESSABLE:
        return Dead(POISON, answer.error, attempt)
    return attempts.failed(delivery, attempt, answer.error, answer.retry_after)


class _Problem(msgspec.Struct):
    """What is of use in a handler's `application/problem+json`, or in FastAPI's errors."""

    detail: object = None


class HandlerClient:
    """The connections to one handler; opened lazily inside the running event loop."""

    def __init__(
        self,
        settings: HandlerSettings,
        *,
        secret: bytes | None = None,
        guard: Guard | None = None,
    ) -> None:
        """Check the settings; raises `Fatal` (78) for an address or a file that cannot be used.

        Signs with `secret` rather than what `secret_file` holds; connects only to addresses that `guard` lets through.
        """
        self._settings = settings
        self._url = _checked_url(settings.url)
        self.name = self._url.partition("?")[0]  # a query may hold a secret
        self.format = settings.format
        self._secret = secret or read_secret(settings.secret_file)
        self._guard = guard
        self._ssl = _ssl_context(settings.ca_file)
        self._session: aiohttp.ClientSession | None = None
        self._connect_seconds = min(settings.connect_seconds, _CONNECT_SHARE * settings.timeout_seconds)

    async def close(self) -> None:
        """Close every connection; safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post one request, signed where there is a secret, and return what came of it."""
        try:
            if self._secret is not None:
                headers = {**headers, **signed(self._secret, headers[IDEMPOTENCY_KEY], body, int(time.time()))}
            return await self._exchange(body, headers)
        except aiohttp.ClientSSLError as error:  # its certificate, or ours: nothing was sent
            return Answer(None, UNTRUSTED, f"no safe connection to {self.name}: {clean(str(error))}")
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            return Answer(None, self._code_of(error), f"no connection to {self.name}: {clean(str(error))}")
        except TimeoutError:
            detail = f"{self.name} gave no answer within {self._settings.timeout_seconds:g} s"
            return Answer(None, "handler_timed_out", detail)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            return Answer(None, "handler_connection_lost", clean(str(error)))
        except Exception as error:  # noqa: BLE001 - whatever a peer can make an HTTP library raise is a failed call
            return Answer(
                None, "handler_answer_invalid", f"{self.name} did not answer in HTTP ({type(error).__name__})"
            )

    def _code_of(self, error: aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError) -> str:
        """Tell an address that the guard refuses, which no waiting changes, from one where nobody is."""
        refused = isinstance(error, aiohttp.ClientConnectorError) and error.os_error.errno == errno.EACCES
        return "address_not_allowed" if refused and self._guard is not None else UNREACHABLE

    async def _exchange(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        async with self._open().post(self._url, data=body, headers=headers, allow_redirects=False) as response:
            content = await self._read(response)
            if response.status in _SUCCESS:
                return Answer(response.status, "", "")
            return Answer(
                response.status,
                f"http_{response.status}",
                _reason(response.status, content),
                read_retry_after(response.headers.get("Retry-After"), int(time.time() * 1000)),
            )

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Read the answer up to its limit; one that is longer, or breaks off, has still said its status."""
        content = bytearray()
        with suppress(aiohttp.ClientError, OSError, TimeoutError):
            async for chunk in response.content.iter_chunked(_CHUNK):
                content += chunk
                if len(content) > self._settings.max_answer_bytes:
                    response.close()
                    break
        return bytes(content[: self._settings.max_answer_bytes])

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=self._connector(),
                cookie_jar=aiohttp.DummyCookieJar(),
                # `connect` is all that comes before a request is sent, the look-up of a name too.
                timeout=aiohttp.ClientTimeout(total=self._settings.timeout_seconds, connect=self._connect_seconds),
                headers={
                    "User-Agent": "postroom-consumer",
                    "Accept": "application/json",
                    "Accept-Encoding": "identity",
                },
                auto_decompress=False,
                trust_env=False,
            )
        return self._session

    def _connector(self) -> aiohttp.TCPConnector:
        guarded: dict[str, Any] = {}
        if self._guard is not None:
            guarded = {"resolver": self._guard.resolver, "socket_factory": self._guard.open_socket}
        return aiohttp.TCPConnector(limit=0, ssl=self._ssl, keepalive_timeout=_IDLE_SECONDS, **guarded)


def read_secret(file: Path | None) -> bytes | None:
    """Return the secret that `file` holds, without the white space around it; None where there is no file.

    Raises `Fatal` (78) for a file that is missing, too short or open to everybody.
    """
    if file is None:
        return None
    try:
        if file.stat().st_mode & stat.S_IRWXO:
            raise Fatal(Exit.CONFIG, f"handler.secret_file {file} is open to every user: chmod 600 it, and change it")
        secret = file.read_bytes().strip()
    except OSError as error:
        raise Fatal(Exit.CONFIG, f"cannot read handler.secret_file {file}: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise Fatal(Exit.CONFIG, f"handler.secret_file {file} has fewer than {MIN_SECRET_BYTES} bytes")
    return secret


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:  # a port that is none
        usable = False
    if not usable or parts.username is not None or parts.fragment:
        rule = "give the handler's address as http[s]://host[:port]/path, without user or fragment"
        raise Fatal(Exit.CONFIG, f"handler.url: {rule}")
    return url


def _ssl_context(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:  # an unreadable file, or an ssl.SSLError for one that holds no certificate
        raise Fatal(Exit.CONFIG, f"handler.ca_file: cannot use {ca_file}: {error}") from error


def _reason(status: int, content: bytes) -> str:
    if status in _REDIRECTS:
        return "a redirect, which is never followed: configure the address that it leads to"
    try:
        detail = msgspec.json.decode(content, type=_Problem).detail
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        detail = content.decode("utf-8", "replace")
    return clean(detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()) if detail else ""
