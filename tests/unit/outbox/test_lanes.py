import sqlite3
from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from outbox.model import DUE, HELD, WAITING
from outbox.transaction import Space, Transaction
from postroom._wire.ids import new_ids
from postroom._wire.moment import to_milliseconds

MOMENTS = st.datetimes(datetime(1970, 1, 1), datetime(9999, 12, 31), timezones=st.just(UTC))  # noqa: DTZ001 - with UTC


def test_due_rows_are_claimed_by_priority() -> None:
    assert sorted(DUE, key=DUE.__getitem__) == ["now", "next", "low"]


def test_a_row_waits_until_its_time_and_no_longer() -> None:
    db = sqlite3.connect(":memory:")
    transaction = Transaction(db, now=1000, dated=1000, new_ids=new_ids, space=Space(0, 0, 0), salt=b"", max_bytes=1)
    assert transaction.lane("low", 1001) == WAITING
    assert transaction.lane("low", 1000) == DUE["low"]
    db.close()


def test_every_lane_has_its_own_number() -> None:
    assert len({*DUE.values(), WAITING, HELD}) == 5


@given(MOMENTS)
def test_a_moment_in_milliseconds_is_never_early_and_less_than_one_late(moment: datetime) -> None:
    late = timedelta(milliseconds=to_milliseconds(moment)) - (moment - datetime(1970, 1, 1, tzinfo=UTC))
    assert timedelta(0) <= late < timedelta(milliseconds=1)
