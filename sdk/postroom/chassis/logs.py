"""Logs: one JSON line an event on standard error, for journald, without tokens and bodies.

On a terminal an event is `key=value`, in colours unless `NO_COLOR` is set, and an exception's trace has lines of its
own.

Events are snake_case words; what happened to which message goes into fields (`client_message_id`, `row_id`). What a
library logs becomes such a line too, `library_message`, with the library's logger. Their number is limited for each
library, since an unstable server can make one log the same a thousand times a second.

`clean` makes a peer's text fit for a log line, a column or an error.
"""

import json
import logging
import os
import re
import select
import sys
from contextlib import suppress
from typing import Any, Final, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from postroom.chassis.config import MASK
from postroom.chassis.exits import replace_closed_streams

_FORBIDDEN: Final = frozenset({"authorization", "body", "body_base64", "payload", "secret", "token"})
_SECRETS: Final = (
    (re.compile(r"(?i)(authorization['\"]?\s*[:=,]\s*)[^\r\n]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)\b((?:bearer|basic)\s+)[^\s'\",;]+"), rf"\1{MASK}"),
    (re.compile(r"(?i)((?:token|api_key|password|passwd|secret)['\"]?\s*[:=]\s*)[^\s&,;)]+"), rf"\1{MASK}"),
    # a scheme has an end here: looked for at each of a hundred thousand words, an endless one takes minutes
    (re.compile(r"(\b[a-z][a-z0-9+.-]{0,30}://[^\s:/@]*:)[^\s/@]+@"), rf"\1{MASK}@"),
)
_LINES: Final = 20  # of one library
_PERIOD: Final = 10.0  # seconds
MAX_WORDS: Final = 500  # characters kept
_MOST_TEXT: Final = 16_000  # characters of a field: journald cuts a line at 48 KiB
_PATIENCE: Final = 1000  # ms with a reader of the log that stands still
_AT_ONCE: Final = select.PIPE_BUF  # bytes that a pipe with room for any takes whole
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # all but a line's end


def configure(level: str = "info") -> None:
    """Send structlog, the standard library's logging and its warnings to standard error, in the form that fits it."""
    replace_closed_streams()
    number = logging.getLevelNamesMapping()[level.upper()]
    renderers: list[Processor] = [structlog.processors.JSONRenderer(serializer=_dump)]
    if sys.stderr.isatty():
        colors = not os.environ.get("NO_COLOR")
        trace = structlog.dev.plain_traceback  # the trace is text by now, and masked
        console = structlog.dev.ConsoleRenderer(colors=colors, sort_keys=False, exception_formatter=trace)
        renderers = [escape_controls, console]
    stream = _StandardError()
    structlog.configure(
        processors=[
            stream.tell,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            drop_secrets,
            *renderers,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, stream)),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=max(number, logging.WARNING), handlers=[LibraryHandler()], force=True)
    # Its warning, with a traceback, is of an outage of Postgres, which every use of the pool meets and reports.
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    logging.captureWarnings(capture=True)


class LibraryHandler(logging.Handler):
    """Writes what libraries log as lines of ours."""

    def __init__(self) -> None:
        super().__init__()
        self._log = structlog.get_logger("library")
        self._periods: dict[str, tuple[float, int]] = {}  # since when (seconds since the epoch), and how many lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, unless the library has reached its limit; the next one says how many were left out."""
        library = record.name.partition(".")[0]
        began, lines = self._periods.get(library, (record.created, 0))
        left_out = 0
        if not 0 <= record.created - began <= _PERIOD:  # also where the clock was set back
            left_out = max(0, lines - _LINES)
            began, lines = record.created, 0
        self._periods[library] = began, lines + 1
        if lines >= _LINES:
            return
        more: dict[str, Any] = {"left_out": left_out} if left_out else {}
        if record.exc_info and record.exc_info[0] is not None:
            more["exc_info"] = record.exc_info
        try:
            message = record.getMessage()
        except Exception:  # noqa: BLE001 - a library's mistake in its own log must not harm the program
            message = str(record.msg)
        self._log.log(record.levelno, "library_message", logger=record.name, message=message, **more)


class _StandardError:
    """Standard error, whatever users' code redirects, but a line that cannot be written is lost.

    A full disk under the log must stop nothing else, and neither must a handler that closes it, or a reader that stands
    still: it is waited for once, and its lines are lost until it reads again.
    """

    def __init__(self) -> None:
        self.lost = 0  # lines since the last one that was written
        self._stream = sys.stderr
        self._line = ""
        self._rest = b""  # of a line that was written in part
        self._patience = _PATIENCE

    def write(self, text: str) -> None:
        self._line += text

    def flush(self) -> None:
        line, self._line = self._line.encode(errors="backslashreplace"), ""
        self._rest = self._put(self._rest)
        left = line if self._rest else self._put(line)
        if left == line:
            self.lost += 1
        else:
            self._rest, self.lost = left, 0

    def tell(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        """Have the next line say how many were lost."""
        return {**event, "lines_lost": self.lost} if self.lost else event

    def _put(self, data: bytes) -> bytes:
        """Write what is taken at once, or soon, and return the rest."""
        with suppress(OSError, ValueError):
            descriptor, taken = self._stream.fileno(), select.poll()
            taken.register(descriptor, select.POLLOUT)
            while data:
                if not taken.poll(self._patience):
                    self._patience = 0
                    break
                data = data[os.write(descriptor, data[:_AT_ONCE]) :]
                self._patience = _PATIENCE
        return data


def escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Keep a peer's text from steering the terminal: control characters but line feeds become escapes."""
    return {
        key: _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), value)
        if isinstance(value, str)
        else value
        for key, value in event.items()
    }


def drop_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove every field that could hold a token or a body, and mask in the others what looks like a token."""
    return {
        key: mask(value) if isinstance(value, str) else value for key, value in event.items() if key not in _FORBIDDEN
    }


def mask(text: str) -> str:
    """Return `text` without the tokens and passwords that can be recognised by what precedes them.

    One that is too long for a line has only its ends. The first is cut once nothing secret is in it, and the last
    begins with a line: neither has a part of a token.
    """
    if len(text) > _MOST_TEXT:
        half = _MOST_TEXT // 2
        end = text[-half:].partition("\n")[2]
        left_out = len(text) - half - len(end)
        return f"{mask(text[:_MOST_TEXT])[:half]} … {left_out} characters left out …\n{mask(end)}"
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def _dump(event: Any, **_: Any) -> str:
    try:
        return msgspec.json.encode(event, enc_hook=str).decode()
    except UnicodeEncodeError:  # a lone surrogate in some error's text: it stays an escape
        return json.dumps(event, default=str, separators=(",", ":"))


def clean(text: str) -> str:
    """Return `text` without control characters and lone surrogates, and not longer than `MAX_WORDS`."""
    return _UNPRINTABLE.sub(" ", text[: 2 * MAX_WORDS])[:MAX_WORDS].strip()
