"""The logical clock: the time of a message that says none (docs/contract/delivery.md#delivery-60).

It is one microsecond later than the latest time of any event in the store, so it depends on the log alone: a replay, or
another run of the same messages, gives the same times.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from postroom.agent import EPOCH

_MICROSECOND: Final = timedelta(microseconds=1)
_LATEST: Final = (datetime.max.replace(tzinfo=EPOCH.tzinfo) - EPOCH) // _MICROSECOND


def to_microseconds(moment: datetime) -> int:
    """Turn a time with an offset into µs since the epoch."""
    return (moment - EPOCH) // _MICROSECOND


def after(clock: int) -> datetime:
    """Return the moment after `clock` (µs since the epoch); at the end of time it stands still."""
    return EPOCH + min(clock + 1, _LATEST) * _MICROSECOND


def later(moment: datetime, ticks: int) -> datetime:
    """Return the time of an effect: so many µs after its cause, the same at every run."""
    return EPOCH + min(to_microseconds(moment) + ticks, _LATEST) * _MICROSECOND
