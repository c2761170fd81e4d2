"""The digits: the progressions of docs/contract/jobs.md#jobs-34, the ceilings, and what holds of every ledger."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledgers import mark, seed_guid

from postroom._wire.digits import (
    CHILDREN_SPAWNED,
    COMPLETION_DONE,
    JOB_CLOSED,
    LEG1_COMPLETE,
    MOST,
    WORK_DONE,
    decode_activity,
    decode_guid,
    explain,
    kind_of,
    parse,
    render,
)
from postroom.errors import InvalidMessage
from postroom.ledger.errors import Overflow, Reaction
from postroom.ledger.operations import enter_leg1, enter_leg2

MARKERS = (LEG1_COMPLETE, WORK_DONE, CHILDREN_SPAWNED, COMPLETION_DONE)
POSSIBLE = {
    "activity": ["000000000000000", "999000000000000", "002100000000000", "001110000000001", "001111199999999"],
    "message": ["000000000000001", "000010000000001", "000011012345678", "000111000000002", "000111199999999"],
}


def marking(marker: int) -> Callable[[int], int]:
    return lambda ledger: mark(ledger, marker)


def progression(ledger: int, *moves: Callable[[int], int]) -> list[str]:
    states = [render(ledger)]
    for move in moves:
        ledger = move(ledger)
        states.append(render(ledger))
    return states


def test_leg_1_is_entered_completed_and_replayed() -> None:
    assert progression(0, enter_leg1, marking(LEG1_COMPLETE), enter_leg1) == [
        "000000000000000",
        "001000000000000",
        "001100000000000",
        "002100000000000",
    ]


def test_leg_2_is_entered_and_step_1_done() -> None:
    activity = parse("001100000000000")
    assert progression(activity, enter_leg2, marking(WORK_DONE)) == [
        "001100000000000",
        "001100000000001",
        "001110000000001",
    ]
    guid = seed_guid(enter_leg2(activity))
    assert progression(guid, marking(WORK_DONE)) == ["000000000000001", "000010000000001"]


def test_steps_2_and_3_set_their_digits() -> None:
    """With children the snapshot stays 0; without any it says who closed the job."""
    worked = parse("000010000000001")
    assert progression(worked, marking(CHILDREN_SPAWNED)) == ["000010000000001", "000011000000001"]
    closing = progression(worked, marking(CHILDREN_SPAWNED), marking(JOB_CLOSED), marking(COMPLETION_DONE))
    assert closing[2:] == ["000111000000001", "000111100000001"]
    whole = progression(parse("001110000000001"), marking(CHILDREN_SPAWNED), marking(COMPLETION_DONE))
    assert whole == ["001110000000001", "001111000000001", "001111100000001"]


def test_the_tenth_attempt_and_the_tenth_entry_are_ordinary() -> None:
    assert progression(parse("009000000000000"), enter_leg1)[-1] == "010000000000000"
    assert progression(parse("099100000000000"), enter_leg1)[-1] == "100100000000000"
    tenth = enter_leg2(parse("001111000000009"))
    assert render(tenth) == "001111000000010"
    assert render(mark(mark(tenth, WORK_DONE), CHILDREN_SPAWNED)) == "001111000000010"
    assert render(seed_guid(tenth)) == "000000000000010"


def test_a_new_guid_takes_the_ordinal_and_no_marker() -> None:
    assert render(seed_guid(parse("003111112345678"))) == "000000012345678"


@pytest.mark.parametrize(("last", "enter"), [("999011100000007", enter_leg1), ("001111199999999", enter_leg2)])
def test_a_full_counter_raises_what_escalates(last: str, enter: Callable[[int], int]) -> None:
    with pytest.raises(Overflow, match=last) as full:
        enter(parse(last))
    assert full.value.reaction is Reaction.ESCALATE


def test_the_last_attempt_and_the_last_entry_are_allowed() -> None:
    assert render(enter_leg1(parse("998000000000000"))) == "999000000000000"
    assert render(enter_leg2(parse("001100099999998"))) == "001100099999999"


ledgers = st.builds(
    lambda attempts, flags, entries: (
        attempts * 10**12 + sum(m for m, flag in zip(MARKERS, flags, strict=True) if flag) + entries
    ),
    st.integers(0, 999),
    st.tuples(*[st.booleans()] * 4),
    st.integers(0, 99_999_999),
)
moves = st.lists(st.sampled_from([enter_leg1, enter_leg2, *map(marking, MARKERS)]), max_size=30)


@given(ledgers, moves)
def test_a_ledger_only_grows_within_15_digits_and_its_markers_are_0_or_1(
    ledger: int, steps: list[Callable[[int], int]]
) -> None:
    for step in steps:
        try:
            moved = step(ledger)
        except Overflow:
            continue
        assert ledger <= moved <= MOST
        assert parse(render(moved)) == moved
        ledger = moved


@given(ledgers, st.sampled_from(MARKERS))
def test_a_marker_touches_no_other_digit_and_is_set_once(ledger: int, marker: int) -> None:
    marked = mark(ledger, marker)
    assert marked - ledger in {0, marker}
    assert mark(marked, marker) == marked


@given(ledgers)
def test_an_activity_reads_as_what_it_was_made_of(ledger: int) -> None:
    read = decode_activity(ledger)
    flags = (read.leg1_complete, read.work_done, read.children_spawned, read.completion_done)
    made = sum(marker for marker, flag in zip(MARKERS, flags, strict=True) if flag)
    assert read.leg1_attempts * 10**12 + made + read.leg2_entries == ledger


@pytest.mark.parametrize("text", [*POSSIBLE["activity"], *POSSIBLE["message"]])
def test_each_digit_of_a_ledger_is_explained_once_and_in_order(text: str) -> None:
    assert "".join(meaning.digits for meaning in explain(text)) == text


@pytest.mark.parametrize("kind", POSSIBLE)
def test_whose_a_ledger_is_stands_in_its_digits(kind: str) -> None:
    assert {kind_of(text) for text in POSSIBLE[kind]} == {kind}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("001000000000001", "leg 2 was entered, but leg 1 is not complete"),
        ("001010000000000", "leg 2 was entered, but leg 1 is not complete"),
        ("001101000000001", "the children are spawned, but the work is not done"),
        ("001110100000001", "the completion tasks are done, but the children are not spawned"),
        ("000010000000000", "the ledger of a message has the number of an entry into leg 2, at least 1"),
        ("000001000000001", "the children are spawned, but the work is not done"),
        ("000110000000001", "step 2 closes the job, but it is not done"),
        ("000011100000001", "the completion tasks are done, but this message did not close the job"),
    ],
)
def test_digits_that_no_ledger_has_are_refused_with_what_contradicts_what(text: str, problem: str) -> None:
    with pytest.raises(InvalidMessage, match=problem) as refused:
        explain(text)
    assert refused.value.code == "invalid_ledger"


@pytest.mark.parametrize(
    ("ledger", "done", "dimension"),
    [
        ("000000000000001", False, 0),
        ("000010000000003", False, 2),
        ("000011000000003", True, 2),
        ("000111000000003", False, 2),
        ("000111100000003", True, 2),
    ],
)
def test_a_guid_says_whether_a_step_is_left_and_which_cycle_it_is(ledger: str, done: object, dimension: int) -> None:
    guid = decode_guid(parse(ledger))
    assert (guid.done, guid.dimension) == (done, dimension)


def test_the_ledgers_of_an_activity_and_of_a_message_are_told_apart() -> None:
    assert [meaning.text for meaning in explain("012100000000001")] == [
        "leg 1 was attempted 12 times (at most 999)",
        "leg 1 is complete: its request, if it sends one, is in the outbox",
        "step 1, the work, is not complete",
        "step 2, the children, is not complete",
        "step 3, the job's completion tasks, is not complete here: it is for the activity that closes the job",
        "leg 2 was entered once (at most 99999999)",
    ]
    assert [meaning.text for meaning in explain("000111000000007")] == [
        "nothing: this is the ledger of a leg-2 message",
        "this message closed the job",
        "step 1, the work, is complete",
        "step 2, the children, is complete",
        "step 3, the job's completion tasks, is not complete",
        "this message was entry 7 of its activity, so its dimension is 6",
    ]
    assert explain("000011000000001")[4].text == "step 3, the job's completion tasks, is not for this message"
    assert explain("000000000000000")[1].text == "leg 1 is not complete: nothing is sent"
    assert explain("000000000000000")[0].text == "leg 1 was attempted 0 times (at most 999)"


@pytest.mark.parametrize("text", ["", "1", "00000000000000x", "0000000000000000", "000200000000000", "\u0660" * 15])
def test_what_is_no_ledger_is_refused(text: str) -> None:
    with pytest.raises(InvalidMessage, match="15 digits") as refused:
        explain(text)
    assert refused.value.code == "invalid_ledger"


@pytest.mark.parametrize("number", [-1, MOST + 1])
def test_a_number_that_is_no_ledger_is_not_rendered(number: int) -> None:
    with pytest.raises(InvalidMessage):
        render(number)
