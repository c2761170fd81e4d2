"""What JetStream tells of the calls that others make to it: it notes each on a subject of its own, for whoever listens.

It tells it once, to those that are connected: what happened while nobody listened is not known, and has to be assumed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Final

import msgspec
import structlog
from nats.aio.msg import Msg

_log = structlog.get_logger(__name__)

SUBJECT: Final = "$JS.EVENT.ADVISORY.API"

# What takes messages out of a stream by hand, or may: the words of the call before the stream's name.
_TAKING: Final = (("STREAM", "PURGE"), ("STREAM", "MSG", "DELETE"), ("STREAM", "UPDATE"), ("STREAM", "RESTORE"))


class _Call(msgspec.Struct):
    subject: str = ""


_decode: Final = msgspec.json.Decoder(_Call).decode


class Audit:
    """Which streams somebody took messages out of, as heard on one connection; `noticed` is called at each."""

    def __init__(self, noticed: Callable[[], None]) -> None:
        self.hears = False  # whether anything was heard at all: calls of one's own are told of too
        self.before: set[tuple[str, datetime]] = set()  # the streams that were there before, by name and creation
        self._noticed = noticed
        self._streams: set[str] = set()

    async def hear(self, message: Msg) -> None:
        """Take in one note."""
        self.hears = True
        try:
            call = _decode(message.data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            _log.warning("advisory_unreadable", subject=message.subject)  # no server wrote that
            return
        words = call.subject.partition(".API.")[2].split(".")
        if tuple(words[:-1]) in _TAKING:
            self._streams.add(words[-1])
            self._noticed()

    def take(self, stream: str) -> bool:
        """Tell whether messages were taken out of `stream` since this was last asked."""
        heard = stream in self._streams
        self._streams.discard(stream)
        return heard
