"""A moment in a request: it has an offset, and its time in UTC is within Python's calendar.

The last hours before the year 10000 are within it only with an offset of zero or more, and the first of the year 1 with
one of zero or less. Python reads other such times, and fails where they are compared with those of a database.
"""

from datetime import UTC, datetime, timedelta
from typing import Annotated, Final, overload

import msgspec

Moment = Annotated[datetime, msgspec.Meta(tz=True)]

FIRST: Final = datetime.min.replace(tzinfo=UTC)
_LAST: Final = datetime.max.replace(tzinfo=UTC)
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def check_moments(**moments: datetime | None) -> None:
    """Raise `ValueError`, which msgspec reports as its own, where one of these fields is outside the calendar.

    One without an offset is for the decoder to refuse.
    """
    for name, moment in moments.items():
        if moment is not None and moment.tzinfo is not None and not FIRST <= moment <= _LAST:
            raise ValueError(f"Time outside the calendar in field `{name}`")


def check_finite(**moments: datetime | None) -> None:
    """Raise it also where a field is the first or last moment of the calendar, which Postgres stores as infinite."""
    check_moments(**moments)
    for name, moment in moments.items():
        if moment in {FIRST, _LAST}:
            raise ValueError(f"Time at an end of the calendar in field `{name}`")


def to_milliseconds(moment: datetime) -> int:
    """Turn a time with an offset into ms since the epoch, never early."""
    return -((EPOCH - moment) // timedelta(milliseconds=1))


@overload
def from_milliseconds(ms: int) -> datetime: ...
@overload
def from_milliseconds(ms: int | None) -> datetime | None: ...
def from_milliseconds(ms: int | None) -> datetime | None:
    """Turn ms since the epoch into a time in UTC; None stays None."""
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
