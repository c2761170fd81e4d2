"""Minted ids are ULIDs, each greater than the one before, whatever the clock does."""

from __future__ import annotations

import ulid

from broker.store import MessageIds

NOW = 1_795_000_000_123  # ms since the epoch


def test_an_id_is_a_ulid_of_the_millisecond_it_was_minted_in() -> None:
    (minted,) = MessageIds(clock=lambda: NOW).mint(1)

    assert ulid.from_uuid(minted).timestamp().int == NOW


def test_ids_ascend_within_a_batch_and_from_batch_to_batch() -> None:
    ids = MessageIds(clock=lambda: NOW)
    minted = [*ids.mint(500), *ids.mint(500)]

    assert minted == sorted(set(minted))


def test_a_clock_that_goes_back_breaks_no_order() -> None:
    times = iter([NOW, NOW - 60_000, NOW + 1])
    ids = MessageIds(clock=lambda: next(times))
    minted = [*ids.mint(3), *ids.mint(3), *ids.mint(3)]

    assert minted == sorted(set(minted))


def test_randomness_at_its_end_runs_over_into_the_next_millisecond() -> None:
    minted = MessageIds(clock=lambda: NOW, randomness=lambda size: b"\xff" * size).mint(2)

    assert [ulid.from_uuid(one).timestamp().int for one in minted] == [NOW, NOW + 1]
