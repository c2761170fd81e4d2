"""How old a row may become (docs/contract/send.md#send-70), and what kept features do."""

from __future__ import annotations

import os

import pytest

from broker_client.features import HOUR, KeptFeatures, assumed_max_age_hours, max_age_hours
from postroom._wire.accept import DedupeFeature, Features
from postroom.chassis.exits import Exit, Fatal


def features(days: int | None = 7, mode: str = "retention_scoped", version: int = 1, *, fingerprint: bool = True):
    dedupe = DedupeFeature(version=version, mode=mode, request_fingerprint=fingerprint, dedupe_retention_days=days)
    return Features(mesh="demo", member="alice", max_batch=1000, client_message_id_dedupe=dedupe)


PERMANENT = features(None, "permanent")


@pytest.mark.parametrize(
    ("days", "hours"),
    [(7, 144), (8, 168), (9, 192), (10, 216), (11, 264 - 27), (30, 648), (365, 8760 - 876)],
)
def test_the_margin_is_a_day_or_a_tenth_whichever_is_more(days, hours):
    assert max_age_hours(features(days), None) == hours


def test_an_age_stays_one_that_a_row_can_have_whatever_the_broker_promises():
    assert max_age_hours(features(2**63), None) * HOUR < 2**63


@pytest.mark.parametrize(("override", "hours"), [(None, 168), (1, 1), (720, 720)])
def test_a_broker_that_never_forgets_allows_a_week_or_an_override_up_to_thirty_days(override, hours):
    assert max_age_hours(PERMANENT, override) == hours


@pytest.mark.parametrize(("days", "override"), [(7, 1), (7, 144), (30, 648), (30, 649), (30, 696)])
def test_an_override_may_use_the_margin_up_but_for_a_day(days, override):
    assert max_age_hours(features(days), override) == override


@pytest.mark.parametrize(
    ("shown", "override"),
    [(features(7), 145), (features(7), 168), (features(30), 697), (features(30), 720), (PERMANENT, 721)],
)
def test_an_override_within_a_day_of_the_window_stops_the_daemon_and_says_what_to_do(shown, override):
    with pytest.raises(Fatal, match=r"relay\.max_age_hours is \d+.*set it to \d+ or less, or omit it") as caught:
        max_age_hours(shown, override)
    assert caught.value.exit_code is Exit.CONFIG


@pytest.mark.parametrize(
    ("shown", "advice"),
    [
        (Features(mesh="demo", member="alice", max_batch=1), "upgrade the broker"),
        (features(version=0), "upgrade the broker"),
        (features(version=2), "upgrade the broker"),
        (features(30, "exactly_once"), "in a way that this daemon does not know .exactly_once.: upgrade the daemon"),
        (features(fingerprint=False), "upgrade the broker"),
        (features(6), "raise its dedupe retention"),
        (features(0), "raise its dedupe retention"),
        (features(-7), "raise its dedupe retention"),
        (features(None), "raise its dedupe retention"),
    ],
)
def test_a_broker_that_cannot_recognise_a_repeated_id_long_enough_stops_the_daemon(shown, advice):
    with pytest.raises(Fatal, match=advice) as caught:
        max_age_hours(shown, None)
    assert caught.value.exit_code is Exit.CONFIG


def test_until_the_broker_can_be_asked_the_kept_features_count_else_the_defaults():
    assert assumed_max_age_hours(features(30), None) == 648
    assert assumed_max_age_hours(None, None) == 144


def test_until_the_broker_can_be_asked_an_override_is_believed():
    assert assumed_max_age_hours(None, 700) == 700


def test_features_are_kept_on_disk(tmp_path):
    kept = KeptFeatures(tmp_path)
    assert kept.load() is None
    kept.save(features(30))
    assert KeptFeatures(tmp_path).load() == features(30)
    kept.save(PERMANENT)
    assert KeptFeatures(tmp_path).load() == PERMANENT


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"mesh": "demo", "member": "a", "max_batch": 1}'])
def test_a_damaged_file_of_features_counts_as_none(tmp_path, content):
    KeptFeatures(tmp_path).save(features(30))
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    assert KeptFeatures(tmp_path).load() is None


def test_a_fifo_in_the_place_of_the_file_holds_up_no_start(tmp_path):
    KeptFeatures(tmp_path).save(features(30))
    (file,) = tmp_path.iterdir()
    file.unlink()
    os.mkfifo(file)
    assert KeptFeatures(tmp_path).load() is None


def test_features_that_cannot_be_kept_stop_nothing(tmp_path):
    kept = KeptFeatures(tmp_path / "absent")
    kept.save(features(30))
    assert kept.load() is None
