"""How long to wait: exponential backoff with full jitter, and a peer's `Retry-After` that is not taken on trust."""

from __future__ import annotations

import math
from datetime import UTC
from email.utils import parsedate_to_datetime
from random import Random
from typing import Final

RETRY_AFTER_LEAST: Final = 1.0  # second
RETRY_AFTER_MOST: Final = 15 * 60.0  # seconds
_LARGEST_POWER: Final = 40  # beyond it, doubling is past every limit and only costs precision


def full_jitter(failures: int, rng: Random, *, first: float, most: float) -> float:
    """Draw the seconds to wait after `failures` failures (1 or more): 0 to `first`, doubled each time up to `most`."""
    return rng.uniform(0, min(most, first * 2 ** min(max(failures - 1, 0), _LARGEST_POWER)))


def clamp_retry_after(seconds: float) -> float:
    """Bring what a peer asked for into 1 s … 15 min."""
    return min(max(seconds, RETRY_AFTER_LEAST), RETRY_AFTER_MOST)


def read_retry_after(header: str | None, now_ms: int) -> float | None:
    """Read a `Retry-After` header, seconds or an HTTP date (RFC 9110 §10.2.3), clamped; None where it says nothing."""
    if header is None:
        return None
    text = header.strip()
    seconds = _seconds(text)
    if seconds is None and (moment := read_date(text)) is not None:
        seconds = (moment - now_ms) / 1000
    return None if seconds is None else clamp_retry_after(seconds)


def read_date(header: str | None) -> int | None:
    """Read an HTTP date (RFC 9110 §5.6.7) as ms since the epoch; None where it is none."""
    if header is None:
        return None
    try:
        moment = parsedate_to_datetime(header)
        return round((moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).timestamp() * 1000)
    except (ValueError, TypeError, OverflowError, IndexError):
        return None


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None
