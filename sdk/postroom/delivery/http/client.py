"""One call of the handler, everything that can go wrong with it, and how its answer is read.

A redirect is never followed, and no more of an answer is read than its limit: the status alone decides, the rest gives
the reason of a failure. Whatever a handler does, `call` returns an `Answer`, and `judge` reads it by the table of
docs/contract/delivery.md#delivery-35. A call without a connection is not judged: it was no attempt.
"""

import errno
import ssl
import time
from collections.abc import Mapping
from typing import Final, NamedTuple, cast
from urllib.parse import quote, urlsplit

import msgspec

from postroom._wire.connections import Pool
from postroom._wire.http import Garbled, Site, Unreachable, lines_of, why_unreachable
from postroom._wire.retry import error_text, read_retry_after
from postroom.chassis.config import read_secret, trusting
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.logs import clean
from postroom.claims import DONE, Dead, Outcome
from postroom.delivery.consumer import Attempts
from postroom.delivery.http.addresses import Guard, dial_to
from postroom.delivery.http.requests import signed
from postroom.delivery.message import IDEMPOTENCY_KEY, Delivery
from postroom.delivery.settings import HandlerSettings
from postroom.signatures import MIN_SECRET_BYTES

UNREACHABLE: Final = "handler_unreachable"  # the code of a call without a connection
UNTRUSTED: Final = "handler_untrusted"  # and of one whose connection could not be encrypted
NOBODY_THERE: Final = (UNREACHABLE, UNTRUSTED)
POISON: Final = "poison"  # the reason of a message that its handler refused with 422

_ALREADY_PROCESSED: Final = 409
_UNPROCESSABLE: Final = 422
_SUCCESS: Final = range(200, 300)
_IDLE_SECONDS: Final = 4.0  # shorter than servers keep an idle connection, so that a call rarely meets one being closed
_IN_A_TARGET: Final = "/%!$&'()*+,;=:@~?"  # in addition to letters and digits
_CONNECT_SHARE: Final = 0.75  # of the time for an answer, so that the error can say which of the two has run out
_REDIRECTS: Final = range(300, 400)


class Answer(NamedTuple):
    """The result of one call: a status, or None without an answer; `code` and `detail` say why it failed."""

    status: int | None
    code: str
    detail: str
    retry_after: float | None = None  # seconds, clamped

    @property
    def reached(self) -> bool:
        """Whether the handler was reached, and could have handled the message."""
        return self.code not in NOBODY_THERE

    @property
    def error(self) -> str:
        """The failure in words, as `last_error` keeps it."""
        return f"{self.code}: {self.detail}" if self.detail else self.code


def judge(answer: Answer, delivery: Delivery, attempt: int, attempts: Attempts) -> Outcome:
    """Turn the answer of a reached handler to attempt number `attempt` into what becomes of the message."""
    if answer.status is not None and (answer.status in _SUCCESS or answer.status == _ALREADY_PROCESSED):
        return DONE
    if answer.status == _UNPROCESSABLE:
        return Dead(POISON, answer.error, attempt)
    return attempts.failed(delivery, attempt, answer.error, answer.retry_after)


class _Problem(msgspec.Struct):
    """The part that is used of a handler's `application/problem+json`, or of FastAPI's errors."""

    detail: object = None


class HandlerClient:
    """The connections to one handler; opened lazily inside the running event loop."""

    def __init__(self, settings: HandlerSettings, *, secret: bytes | None = None, guard: Guard | None = None) -> None:
        """Check the settings; raises `Fatal` (78) for an address or a file that cannot be used.

        Signs with `secret` rather than what `secret_file` holds; connects only to addresses that `guard` lets through.
        """
        self._settings = settings
        site, target = _place_of(settings.url)
        self.name = settings.url.partition("?")[0]  # a query may hold a secret
        self.format = settings.format
        self._secret = secret
        if secret is None and (file := settings.secret_file) is not None:
            self._secret = read_secret(file, "handler.secret_file")
            if len(self._secret) < MIN_SECRET_BYTES:
                raise Fatal(Exit.CONFIG, f"handler.secret_file {file} has fewer than {MIN_SECRET_BYTES} bytes")
        self._guard = guard
        dial = dial_to(site, trusting(settings.ca_file, "handler.ca_file"), guard)
        self._pool = Pool(dial, idle_seconds=_IDLE_SECONDS)
        self._head = f"POST {target} HTTP/1.1\r\n{site.lines('postroom-consumer')}"
        # The time until a request is sent, with the look-up of the name.
        self._connect_seconds = min(settings.connect_seconds, _CONNECT_SHARE * settings.timeout_seconds)

    async def close(self) -> None:
        """Close every connection; safe to call twice."""
        await self._pool.close()

    async def call(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Post one request, signed where there is a secret, and return its result."""
        try:
            if self._secret is not None:
                headers = {**headers, **signed(self._secret, headers[IDEMPOTENCY_KEY], body, int(time.time()))}
            return await self._exchange(body, headers)
        except Unreachable as error:  # nothing was sent
            return self._unreached(error)
        except TimeoutError:
            detail = f"{self.name} gave no answer within {self._settings.timeout_seconds:g} s"
            return Answer(None, "handler_timed_out", detail)
        except OSError as error:
            return Answer(None, "handler_connection_lost", clean(str(error)))
        except Exception as error:  # noqa: BLE001 - anything that a peer can make the event loop raise is a failed call
            why = clean(str(error) if isinstance(error, Garbled) else error_text(error))
            return Answer(None, "handler_answer_invalid", f"{self.name} did not answer in HTTP: {why}")

    def _unreached(self, error: Unreachable) -> Answer:
        """Return why there was no connection; an address that the guard refuses will not become allowed by waiting."""
        cause = cast(OSError, error.__cause__)
        authorities = "handler.ca_file" if self._guard is None else "the system of the worker"
        why = clean(why_unreachable(cause, authorities)) or f"none within {self._connect_seconds:g} s"
        if isinstance(cause, ssl.SSLError):  # its certificate, or ours
            return Answer(None, UNTRUSTED, f"no safe connection to {self.name}: {why}")
        refused = self._guard is not None and cause.errno == errno.EACCES
        code = "address_not_allowed" if refused else UNREACHABLE
        return Answer(None, code, f"no connection to {self.name}: {why}")

    async def _exchange(self, body: bytes, headers: Mapping[str, str]) -> Answer:
        head = f"{self._head}{lines_of(headers.items())}Content-Length: {len(body)}\r\n\r\n"
        answer, content = await self._pool.exchange(
            head.encode() + body,
            seconds=self._settings.timeout_seconds,
            connecting=self._connect_seconds,
            limit=self._settings.max_answer_bytes,
            repeatable=False,  # a call that broke off may have had its effect, and counts as an attempt
            cut=True,  # an answer that is longer, or breaks off, still has its status
        )
        if answer.status in _SUCCESS:
            return Answer(answer.status, "", "")
        return Answer(
            answer.status,
            f"http_{answer.status}",
            _reason(answer.status, content),
            read_retry_after(answer.field(b"Retry-After"), int(time.time() * 1000)),
        )


def _place_of(url: str) -> tuple[Site, str]:
    try:
        parts = urlsplit(url)
        if parts.username is None and not parts.fragment:
            target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
            return Site.of(f"{parts.scheme}://{parts.netloc}"), quote(target, safe=_IN_A_TARGET)
    except ValueError:  # an invalid port, or an invalid name
        pass
    rule = "give the handler's address as http[s]://host[:port]/path, without user or fragment"
    raise Fatal(Exit.CONFIG, f"handler.url: {rule}")


def _reason(status: int, content: bytes) -> str:
    if status in _REDIRECTS:
        return "a redirect, which is never followed: configure the address that it leads to"
    try:
        detail = msgspec.json.decode(content, type=_Problem).detail
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        detail = content.decode("utf-8", "replace")
    return clean(detail if isinstance(detail, str) else msgspec.json.encode(detail).decode()) if detail else ""
