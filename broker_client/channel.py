"""One HTTP exchange with the broker, and everything that can go wrong with it before an answer is understood.

A redirect is never followed, so the token goes to the configured address alone; an answer that is too large, too slow
or broken off raises `RequestFailed`. Neither the token nor a message's payload reaches a log or an error.
The token is in a file that is read again when it changes.
"""

import os
import stat
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, Self

from broker_client.settings import BrokerClientSettings
from postroom._wire.connections import Pool, url_dial
from postroom._wire.http import Garbled, Site, Unreachable, why_unreachable
from postroom.chassis.config import trusting
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.logs import clean
from postroom.chassis.ownership import read_regular
from postroom.errors import Unavailable

MAX_TOKEN_BYTES = 4096


class Failure(StrEnum):
    """Why there is no answer per message."""

    UNREACHABLE = "broker_unreachable"  # no connection: the request never left
    TIMED_OUT = "broker_timed_out"
    BROKEN_OFF = "broker_connection_lost"
    GARBAGE = "broker_answer_invalid"
    SERVER_ERROR = "broker_failed"  # 5xx
    NOT_PERMITTED = "broker_refused_token"  # 401, 403, 404, or no token to show
    NOT_NOW = "broker_rate_limited"  # 429
    OVERLOADED = "broker_overloaded"  # 503 with this code: it has as much at work as it takes
    REFUSED = "broker_refused_request"  # any other 4xx


class RequestFailed(Unavailable):
    """A request to the broker failed; whether it took effect there is not known.

    `failure` is what happened, `retry_after` the seconds that the broker asked for, already clamped. `by_proxy` is for
    an answer without a code of the broker's: a proxy may have given it after passing the request on.
    Passed on to a caller of the socket it is a 502, 503 or 504.
    """

    failure: Failure
    retry_after: float | None
    by_proxy: bool

    @classmethod
    def because(
        cls, failure: Failure, detail: str, retry_after: float | None = None, *, by_proxy: bool = False
    ) -> Self:
        """Build the error for `failure`; `detail` is one sentence without a token or a body."""
        error = cls.of(failure.value, detail, retryable=True, retry_after=retry_after)
        error.failure = failure
        error.retry_after = retry_after
        error.by_proxy = by_proxy
        return error


class TokenFile:
    """A token in a file that an operator, or systemd, may replace at any moment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None  # the version that `_token` was read from
        self._token = ""
        self._changes = 0

    def is_open(self) -> bool:
        """Return whether users other than its owner and group can read or write it."""
        try:
            return bool(self._path.stat().st_mode & stat.S_IRWXO)
        except OSError:  # `read` says what is wrong
            return False

    def changes(self) -> int:
        """Return how many different versions of the file have been read; raises as `read` does."""
        self.read()
        return self._changes

    def read(self) -> str:
        """Return the token as the file holds it now.

        Raises `RequestFailed` (`NOT_PERMITTED`) if the file is missing, empty, not a token, or open to every user.
        """
        try:
            if _version(self._path.stat()) != self._seen:
                content, status = read_regular(self._path)
                if status.st_mode & stat.S_IRWXO:
                    raise _unusable(f"the token file {self._path} is open to every user: chmod 600 it")
                token = content.strip()
                if not token or len(token) > MAX_TOKEN_BYTES or not all(0x21 <= byte <= 0x7E for byte in token):  # noqa: PLR2004 - visible ASCII
                    raise _unusable(f"the token file {self._path} has to hold one word of visible ASCII")
                self._token, self._seen = token.decode("ascii"), _version(status)
                self._changes += 1
        except OSError as error:
            raise _unusable(f"cannot read the token file {self._path} ({error.strerror})") from error
        return self._token


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_mtime_ns, status.st_size


def _unusable(sentence: str) -> RequestFailed:
    return RequestFailed.because(Failure.NOT_PERMITTED, sentence)


class Reply(NamedTuple):
    """A complete answer of the broker, whatever its status, within the size limit."""

    status: int
    content: bytes
    retry_after: str | None
    date: str | None = None  # when it was made, by the answering server's clock; None for what a cache kept


class Channel:
    """The connections to the one broker; opened lazily inside the running event loop."""

    def __init__(self, settings: BrokerClientSettings) -> None:
        """Check the settings; raises `Fatal` (78) for what cannot be used, and for a token that others can read."""
        try:
            site = Site.of(settings.url)
        except ValueError:
            rule = "give the broker's address as https://host[:port], without user, query or fragment"
            raise Fatal(Exit.CONFIG, f"broker.url (POSTROOM_DAEMON_BROKER_URL): {rule}") from None
        if site.is_exposed and not settings.allow_plaintext:
            advice = "would expose the token to the network: use https, or set broker.allow_plaintext"
            raise Fatal(Exit.CONFIG, f"broker.url: http://{site.host} {advice}")
        self.base = settings.url.rstrip("/")
        self.token = TokenFile(settings.token_file)
        if self.token.is_open():
            advice = "chmod 600 it, and give the member a new token (`postroom member rotate-token`)"
            raise Fatal(Exit.CONFIG, f"broker.token_file {settings.token_file} is open to every user: {advice}")
        self._settings = settings
        self._path, self._always = site.prefix, site.lines("postroom-daemon")
        self._pool = Pool(url_dial(self.base, trusting(settings.ca_file, "broker.ca_file")))

    async def close(self) -> None:
        """Close every connection; safe to call twice."""
        await self._pool.close()

    async def request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        """Send one request and read its whole answer; raises `RequestFailed` if there is no answer."""
        framing = "" if body is None else f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._always}Authorization: Bearer {self.token.read()}\r\n"
        try:
            answer, content = await self._pool.exchange(
                f"{head}{framing}\r\n".encode() + (body or b""),
                seconds=self._settings.request_seconds,
                connecting=self._settings.connect_seconds,
                limit=self._settings.max_answer_bytes,
                repeatable=False,  # a failed try may have taken effect: whether to repeat it, only the relay decides
            )
        except Unreachable as error:
            late = f"no answer within {self._settings.connect_seconds:g} s"
            why = why_unreachable(error.__cause__, "broker.ca_file")
            sentence = f"cannot connect to {self.base}: {clean(why) or late}"
            raise RequestFailed.because(Failure.UNREACHABLE, sentence) from error
        except TimeoutError as error:
            sentence = f"{self.base} did not answer completely within {self._settings.request_seconds:g} s"
            raise RequestFailed.because(Failure.TIMED_OUT, sentence) from error
        except Garbled as error:
            raise RequestFailed.because(Failure.GARBAGE, f"{self.base} did not answer in HTTP: {error}") from error
        except OSError as error:
            sentence = f"{self.base} closed the connection: {clean(str(error))}"
            raise RequestFailed.because(Failure.BROKEN_OFF, sentence) from error
        date = answer.field(b"Date") if answer.field(b"Age") is None else None
        return Reply(answer.status, content, answer.field(b"Retry-After"), date)
