from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from postroom._wire.retry import clamp_retry_after, read_retry_after

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
NOW_MS = int(NOW.timestamp() * 1000)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120),
        (" 120 ", 120),
        ("1.5", 1.5),
        ("0", 1),
        ("-1", 1),
        ("31536000", 900),
        ("9" * 400, None),
        (None, None),
        ("", None),
        ("soon", None),
        ("1_0", None),
        ("nan", None),
        ("inf", None),
        ("Fri, 99 Nov 2026 12:00:00 GMT", None),
        ("Fri, 21 Nov 99999 12:00:00 GMT", None),
    ],
)
def test_retry_after_in_seconds_is_clamped_and_garbage_is_ignored(header, seconds):
    assert read_retry_after(header, NOW_MS) == seconds


@pytest.mark.parametrize(
    ("ahead", "seconds"),
    [
        (timedelta(seconds=90), 90),
        (timedelta(days=365), 900),
        (timedelta(seconds=-5), 1),
        (timedelta(days=-36500), 1),
    ],
)
def test_retry_after_as_an_http_date_is_clamped(ahead, seconds):
    assert read_retry_after(format_datetime(NOW + ahead, usegmt=True), NOW_MS) == seconds


def test_a_date_without_a_zone_is_utc():
    assert read_retry_after("Sat, 21 Nov 2026 12:01:00", NOW_MS) == 60


@pytest.mark.parametrize(("asked", "seconds"), [(0, 1), (1, 1), (899, 899), (900, 900), (901, 900)])
def test_the_clamp_is_one_second_to_a_quarter_of_an_hour(asked, seconds):
    assert clamp_retry_after(asked) == seconds
