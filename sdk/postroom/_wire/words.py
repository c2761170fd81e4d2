"""Counts, times and text that is none, as people read them, on a terminal, a page and in a log alike."""

import re
from datetime import UTC, datetime
from typing import Final

_MANY: Final = re.compile(r"(?<![aeiou])y$")  # the end of a word whose plural is `…ies`
_AROUND: Final = 30  # characters that are quoted before and after
_FEW, _MINUTE, _HOUR, _DAY = 10, 60, 3600, 86_400  # seconds


def counted(count: int, one: str, many: str | None = None) -> str:
    """Write a count with its noun: `1 delivery`, `2,000 deliveries`; `many` is an irregular plural."""
    return f"{count:,} {one if count == 1 else many or _MANY.sub('ie', one) + 's'}"


def span(seconds: float) -> str:
    """Write a duration or an age: `40 ms`, `3.2 s`, `12 min`, `5 h`, `9 d`."""
    for most, unit, name in (
        (1, 0.001, "ms"),
        (2 * _MINUTE, 1, "s"),
        (2 * _HOUR, _MINUTE, "min"),
        (2 * _DAY, _HOUR, "h"),
    ):
        if seconds < most:
            return f"{seconds / unit:.1f} {name}" if unit == 1 and seconds < _FEW else f"{seconds / unit:.0f} {name}"
    return f"{seconds / _DAY:.0f} d"


def ago(moment: datetime | None) -> str | None:
    """Write how long ago a moment was, as `span` does."""
    return None if moment is None else span(max(0.0, (datetime.now(UTC) - moment).total_seconds()))


def when(moment: datetime) -> str:
    """Write a moment: to the second, in UTC."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def not_text(error: UnicodeEncodeError) -> str:
    """Say where a text has half of a surrogate pair, as an argument of a command line does that is not UTF-8."""
    around = error.object[max(0, error.start - _AROUND) : error.end + _AROUND]
    return f"{around!r} is not UTF-8 text"
