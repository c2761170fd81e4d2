"""Halving finds the one message that makes every batch with it fail."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker_client.posts import MOST_SUSPECTS, Suspects
from outbox.model import ClaimedRow


def rows(count: int, first: int = 0) -> list[ClaimedRow]:
    return [ClaimedRow(f"row-{n}", f"id-{n}", b"", b"", "topic:a", 0, 0) for n in range(first, first + count)]


def test_without_suspects_a_claim_is_one_batch():
    assert Suspects().divide(rows(500)) == [rows(500)]
    assert Suspects().divide([]) == []


def test_a_batch_that_failed_is_posted_in_halves():
    suspects = Suspects()
    suspects.failed(rows(500), answered=0)
    assert [len(batch) for batch in suspects.divide(rows(500))] == [250, 250]


def test_rows_beyond_suspicion_come_first_and_in_a_batch_of_their_own():
    suspects = Suspects()
    suspects.failed(rows(4), answered=0)
    assert suspects.divide(rows(10)) == [rows(6, 4), rows(2), rows(2, 2)]


def test_among_suspects_those_that_failed_longest_ago_come_first():
    suspects = Suspects()
    for n in (2, 0, 1):
        suspects.failed(rows(1, n), answered=0)
    assert suspects.divide(rows(3)) == [rows(1, 2), rows(1, 0), rows(1, 1)]


def test_what_was_answered_is_cleared():
    suspects = Suspects()
    suspects.failed(rows(10), answered=0)
    suspects.clear(rows(10))
    assert suspects.divide(rows(10)) == [rows(10)]
    assert len(suspects._rows) == 0


def test_a_batch_is_to_blame_only_where_the_broker_answered_others_since_it_failed():
    suspects = Suspects()
    assert not suspects.failed(rows(2), answered=5)
    assert not suspects.failed(rows(2), answered=5)
    assert suspects.failed(rows(2), answered=6)
    assert not suspects.failed(rows(3), answered=7)


def test_a_single_message_that_is_to_blame_stays_so_until_it_is_answered():
    suspects = Suspects()
    suspects.failed(rows(1), answered=5)
    assert suspects.failed(rows(1), answered=6)
    assert suspects.failed(rows(1), answered=6)
    suspects.clear(rows(1))
    assert not suspects.failed(rows(1), answered=6)


def test_a_long_outage_makes_no_endless_list_of_suspects():
    suspects = Suspects()
    for n in range(0, 3 * MOST_SUSPECTS, 500):
        suspects.failed(rows(500, n), answered=0)
    assert len(suspects._rows) == MOST_SUSPECTS
    assert suspects.divide(rows(500)) == [rows(500)]
    assert len(suspects.divide(rows(500, 3 * MOST_SUSPECTS - 500))) == 2


@given(st.integers(1, 600), st.sets(st.integers(0, 599), max_size=4))
def test_halving_ends_with_exactly_the_bad_messages_alone(count, bad):
    bad_ids = {f"row-{n}" for n in bad if n < count}
    suspects, answered, posts = Suspects(), 0, 0
    waiting = rows(count)
    alone: set[str] = set()
    while waiting:
        batches, waiting = suspects.divide(waiting), []
        for batch in batches:
            posts += 1
            if not bad_ids & {row.row_id for row in batch}:
                answered += 1
                suspects.clear(batch)
            elif len(batch) == 1:
                alone.add(batch[0].row_id)
            else:
                suspects.failed(batch, answered)
                waiting += batch
    assert alone == bad_ids
    assert posts <= 1 + 2 * (len(bad_ids) + 1) * 10
