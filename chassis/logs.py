"""Logs: one JSON line an event on standard error, as journald likes it; tokens and bodies never.

Events are snake_case words; what happened to which message goes into fields (`client_message_id`, `row_id`).
"""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from typing import Any, Final, TextIO, cast

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

_FORBIDDEN: Final = frozenset({"authorization", "body", "body_base64", "payload", "secret", "token"})


def configure(level: str = "info") -> None:
    """Send structlog and the standard library's logging to standard error as JSON lines."""
    number = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(level=max(number, logging.WARNING), stream=sys.stderr, format="%(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            drop_secrets,
            structlog.processors.JSONRenderer(serializer=_dump),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )


class _StandardError:
    """Standard error, but a line that cannot be written is lost: a full disk under the log may stop nothing else."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


def drop_secrets(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Remove every field that could hold a token or a body, whoever logged it."""
    return {key: value for key, value in event.items() if key not in _FORBIDDEN}


def _dump(event: Any, **_: Any) -> str:
    try:
        return msgspec.json.encode(event, enc_hook=str).decode()
    except UnicodeEncodeError:  # half a character, in some error's text: it stays an escape
        return json.dumps(event, default=str, separators=(",", ":"))
