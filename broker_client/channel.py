"""One HTTP exchange with the broker, and everything that can go wrong with it before an answer is understood.

A redirect is never followed, so the token goes to the configured address alone; an answer that is too large, too slow
or broken off raises `RequestFailed`. Neither the token nor a message's payload reaches a log or an error.
"""

from __future__ import annotations

import ssl
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import aiohttp

from broker_client.failures import Failure, RequestFailed
from broker_client.settings import BrokerClientSettings
from broker_client.token import TokenFile
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.logs import clean

_CHUNK: Final = 64 * 1024
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Reply(NamedTuple):
    """A complete answer of the broker, whatever its status, within the size limit."""

    status: int
    content: bytes
    retry_after: str | None
    date: str | None = None  # when it was made, by the clock of whoever answered; None for what a cache kept


class Channel:
    """The connections to the one broker; opened lazily inside the running event loop."""

    def __init__(self, settings: BrokerClientSettings) -> None:
        """Check the settings; raises `Fatal` (78) for an address or a CA file that cannot be used."""
        self.base = _checked_url(settings)
        self.token = TokenFile(settings.token_file)
        self._settings = settings
        self._ssl = _ssl_context(settings)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close every connection; safe to call twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Send one request and read its whole answer; raises `RequestFailed` where there is none."""
        token = self.token.read()
        try:
            return await self._exchange(method, path, body, token)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            sentence = f"cannot connect to {self.base}: {clean(str(error))}"
            raise RequestFailed.because(Failure.UNREACHABLE, sentence) from error
        except TimeoutError as error:
            sentence = f"{self.base} gave no whole answer within {self._settings.request_seconds:g} s"
            raise RequestFailed.because(Failure.TIMED_OUT, sentence) from error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            sentence = f"{self.base} broke the connection off: {clean(str(error))}"
            raise RequestFailed.because(Failure.BROKEN_OFF, sentence) from error
        except RequestFailed:
            raise
        except Exception as error:  # whatever a peer can make an HTTP library raise must not end the daemon
            sentence = f"{self.base} did not answer in HTTP ({type(error).__name__})"
            raise RequestFailed.because(Failure.GARBAGE, sentence) from error

    async def _exchange(self, method: str, path: str, body: bytes | None, token: str) -> Reply:
        headers = {"Authorization": f"Bearer {token}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        async with self._open().request(
            method, self.base + path, data=body, headers=headers, allow_redirects=False
        ) as response:
            head = response.headers
            date = None if "Age" in head else head.get("Date")
            return Reply(response.status, await self._read(response), head.get("Retry-After"), date)

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        limit = self._settings.max_answer_bytes
        content = bytearray()
        async for chunk in response.content.iter_chunked(_CHUNK):
            content += chunk
            if len(content) > limit:
                response.close()
                raise RequestFailed.because(Failure.GARBAGE, f"{self.base} sent more than {limit} bytes")
        return bytes(content)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(
                total=self._settings.request_seconds, connect=self._settings.connect_seconds
            )
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, ssl=self._ssl),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=timeout,
                headers={"Accept": "application/json", "Accept-Encoding": "identity"},
                auto_decompress=False,
                trust_env=False,
            )
        return self._session


def _checked_url(settings: BrokerClientSettings) -> str:
    try:
        parts = urlsplit(settings.url)
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:  # a port that is none
        usable = False
    if not usable or parts.username is not None or parts.query or parts.fragment:
        rule = "give the broker's address as https://host[:port], without user, query or fragment"
        raise Fatal(Exit.CONFIG, f"broker.url: {rule}")
    if parts.scheme == "http" and parts.hostname not in _LOOPBACK and not settings.allow_plaintext:
        advice = "would show the token to the network: use https, or set broker.allow_plaintext"
        raise Fatal(Exit.CONFIG, f"broker.url: http://{parts.hostname} {advice}")
    return settings.url.rstrip("/")


def _ssl_context(settings: BrokerClientSettings) -> ssl.SSLContext | bool:
    if settings.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:  # an unreadable file, or an ssl.SSLError for one that holds no certificate
        raise Fatal(Exit.CONFIG, f"broker.ca_file: cannot use {settings.ca_file}: {error}") from error
