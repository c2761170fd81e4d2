"""Flows: what a right one offers, and the sentence that a wrong one is refused with."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from postroom.flow import Again, Flow, InvalidFlow, Spawn, check_flow, next_steps
from postroom.retry_policy import RetryPolicy


async def extract(_ctx: Any, _request: Any) -> Any:
    return _request


async def load(_ctx: Any, _request: Any) -> None:
    return None


async def one_argument(_ctx: Any) -> None:
    return None


async def yielding(_ctx: Any, request: Any) -> Any:
    yield request


def not_async(_ctx: Any, _request: Any) -> None:
    return None


def test_the_first_activity_begins_a_job_and_each_knows_its_legs() -> None:
    flow = Flow("nightly-export")
    asking = flow.activity(sends="queue:extract", timeout=60, asks=3)(extract)
    working = flow.activity(load)
    answered = asking.answered(one := _handler())

    check_flow(flow)
    assert answered is one
    assert flow.first is asking
    assert list(flow.activities) == ["extract", "load"]
    assert (asking.queue, asking.leg1, asking.leg2) == ("extract", extract, one)
    assert (working.queue, working.leg1, working.leg2) == (None, None, load)


def test_a_threshold_is_a_whole_number_from_0_up() -> None:
    assert (Flow("quorum", threshold=2).threshold, Flow("all").threshold) == (2, 0)
    for wrong in (-1, 1.5, True, 2**31):
        with pytest.raises(InvalidFlow, match="a whole number, 0 or more"):
            Flow("quorum", threshold=wrong)  # type: ignore[arg-type] # the same


def test_what_leg_2_returns_is_nothing_one_step_or_many() -> None:
    flow = Flow("nightly-export")
    one, two = flow.activity(extract), flow.activity(load)
    assert next_steps(flow, one, None) == ()
    assert next_steps(flow, one, two.spawn(1)) == (Spawn(two, 1),)
    assert next_steps(flow, one, (two.spawn(part) for part in (1, 2))) == (Spawn(two, 1), Spawn(two, 2))
    assert next_steps(flow, one, [one.again({"page": 2}), two.spawn()]) == (one.again({"page": 2}), Spawn(two, None))


def test_a_completion_is_registered_bare_or_with_a_retry_policy_of_its_own() -> None:
    bare, patient = Flow("bare"), Flow("patient")
    policy = RetryPolicy(max_attempts=2)
    assert bare.completed(load) is load
    assert patient.completed(retry_policy=policy)(load) is load
    assert (bare.completion, bare.completion_policy) == (load, None)
    assert (patient.completion, patient.completion_policy) == (load, policy)


def test_a_returned_value_that_cannot_be_shown_is_named_by_its_type() -> None:
    class Order:
        def __repr__(self) -> str:
            raise LookupError("no such order")

    flow = Flow("nightly-export")
    with pytest.raises(InvalidFlow, match="of type Order: return "):
        next_steps(flow, flow.activity(extract), Order())


@pytest.mark.parametrize("returned", ["load", {"load": 1}, 7, ["load"], [None], Spawn("load", 1), [Again("load", 1)]])  # type: ignore[arg-type] # the same
def test_what_is_no_step_is_refused_with_what_would_be_one(returned: Any) -> None:
    flow = Flow("nightly-export")
    with pytest.raises(InvalidFlow, match=r"return None, an activity\.spawn"):
        next_steps(flow, flow.activity(extract), returned)


def test_only_an_activity_of_the_flow_is_spawned_and_only_itself_is_entered_again() -> None:
    flow, other = Flow("nightly-export"), Flow("other")
    one, two, stranger = flow.activity(extract), flow.activity(load), other.activity(load)
    with pytest.raises(InvalidFlow, match="which is not an activity of 'nightly-export'"):
        next_steps(flow, one, stranger.spawn())
    with pytest.raises(InvalidFlow, match=r"return load\.spawn"):
        next_steps(flow, one, two.again())


def test_an_activity_that_is_called_says_how_it_is_spawned() -> None:
    with pytest.raises(InvalidFlow, match=r"return load\.spawn\(request\)"):
        Flow("nightly-export").activity(load)(None, {"part": 1})


def _handler() -> Any:
    async def answered(_ctx: Any, _answer: Any) -> None:
        return None

    return answered


def _answered_twice(flow: Flow) -> None:
    asking = flow.activity(sends="queue:a")(extract)
    asking.answered(load)
    asking.answered(load)


NEVER = RetryPolicy(max_attempts=0)


def _unanswered(flow: Flow) -> None:
    flow.activity(sends="queue:extract")(extract)
    check_flow(flow)


@pytest.mark.parametrize(
    ("sentence", "define"),
    [
        ("the flow cannot be called 'Nightly'", lambda _: Flow("Nightly")),
        ("reserved for writes of Spark", lambda _: Flow("spark-write")),
        ("the flow cannot be called 17", lambda _: Flow(17)),  # type: ignore[arg-type] # the same
        ("cannot be called 'A'", lambda flow: flow.activity(name="A")(extract)),
        ("sends to .extract.", lambda flow: flow.activity(sends="extract")(extract)),
        ("a request goes to queue:<name>", lambda flow: flow.activity(sends="topic:extract")(extract)),
        ("sends to 17: ", lambda flow: flow.activity(sends=17)(extract)),
        ("sends to 'queue:A'", lambda flow: flow.activity(sends="queue:A")(extract)),
        ("two activities 'extract'", lambda flow: (flow.activity(extract), flow.activity(extract))),
        ("another form: write `async def", lambda flow: flow.activity(not_async)),
        ("with return and without yield", lambda flow: flow.activity(yielding)),
        (r"must accept \(ctx, request\)", lambda flow: flow.activity(one_argument)),
        (r"must accept \(ctx, request\)", lambda flow: flow.activity(name="load")(partial(load, None))),
        ("answer, timeout and asks need sends", lambda flow: flow.activity(timeout=3)(extract)),
        ("more than 0", lambda flow: flow.activity(sends="queue:a", timeout=0)(extract)),
        ("more than 0", lambda flow: flow.activity(sends="queue:a", timeout="60")(extract)),
        ("from 1 to 1000", lambda flow: flow.activity(sends="queue:a", timeout=1, asks=2.5)(extract)),
        ("'extract' has the retry policy 3: give one", lambda flow: flow.activity(retry_policy=3)(extract)),
        (
            "max_attempts: Expected `int` >= 1",
            lambda flow: flow.activity(retry_policy=NEVER)(extract),
        ),
        (
            "max_attempts: Expected .* got `object`",
            lambda flow: flow.activity(retry_policy=RetryPolicy(max_attempts=object()))(extract),  # type: ignore[arg-type] # the same
        ),
        ("completion of .* an invalid retry policy", lambda flow: flow.completed(retry_policy=NEVER)(load)),
        ("has no timeout after which", lambda flow: flow.activity(sends="queue:a", asks=2)(extract)),
        ("from 1 to 1000", lambda flow: flow.activity(sends="queue:a", timeout=1, asks=0)(extract)),
        ("which is not an event's name", lambda flow: flow.activity(sends="queue:a", answer="a.b")(extract)),
        ("sends nothing, so that it gets no answer", lambda flow: flow.activity(extract).answered(load)),
        ("two handlers for its answer", _answered_twice),
        (r"must accept \(ctx, answer\)", lambda flow: flow.activity(sends="queue:a")(extract).answered(one_argument)),
        ("two completion handlers", lambda flow: (flow.completed(load), flow.completed(load))),
        ("is not a flow", lambda _: check_flow(extract)),
        (r"Activity\('extract'\) is not a flow", lambda flow: check_flow(flow.activity(extract))),
        ("has no activity", check_flow),
        (r"write one with @extract\.answered", _unanswered),
    ],
)
def test_a_wrong_flow_is_refused_with_what_to_change(sentence: str, define: Callable[[Flow], Any]) -> None:
    with pytest.raises(InvalidFlow, match=sentence):
        define(Flow("nightly-export"))
