"""A story is put together of parts: who knows an id is asked for it, and steps come in order."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom._wire.ids import ulid_number, ulid_of
from postroom._wire.message import TRACEPARENT
from postroom._wire.spark import SparkTask
from postroom._wire.trace import Step, Story, Wait, compose, follow_trace
from postroom.errors import InvalidMessage, NotFound, Unavailable

JOB, WRITE = UUID("4a6cf2be-7727-581b-b816-e8f9f7968d1c"), "01M7YHRGJAJP0ZGS7BNAJPXDK2"
T0 = datetime(2026, 1, 31, tzinfo=UTC)


def step(id_: str, what: str = "x", parent: str | None = None, seconds: float | None = None, **ids: str) -> Step:
    at = None if seconds is None else T0 + timedelta(seconds=seconds)
    return Step(id=id_, what=what, thing=id_, outcome="done", parent=parent, at=at, ids=ids)


def story(*steps: Step, waits: tuple[str, ...] = ()) -> Story:
    found = {one: Wait(step=one, why="") for one in waits}
    return compose({each.id: each for each in steps}, found)


def test_steps_come_by_time_and_a_parent_before_its_children() -> None:
    found = story(step("late", parent="root", seconds=9), step("root", seconds=1), step("timeless", parent="root"))
    assert [each.id for each in found.steps] == ["root", "timeless", "late"]


def test_steps_that_lead_back_to_themselves_are_all_told() -> None:
    found = story(step("a", parent="b", seconds=1), step("b", parent="a", seconds=2))
    assert sorted(each.id for each in found.steps) == ["a", "b"]


def test_of_waits_that_follow_from_each_other_the_last_is_told() -> None:
    found = story(step("a"), step("b", parent="a"), step("c", parent="b"), step("d", parent="a"), waits=("a", "c", "d"))
    assert [wait.step for wait in found.waits] == ["c", "d"]


@pytest.mark.parametrize(
    ("key", "row"), [("4711:a", "the row 4711:a"), ("~0af1", "a row whose key is hashed")], ids=["readable", "hashed"]
)
def test_a_message_that_spark_wrote_begins_with_its_row(key: str, row: str) -> None:
    name = f"f2e9b47b905df4bc:{key}"
    kept = step("row", "kept", seconds=0, client_message_id=name)
    accepted = step("message", "accepted", seconds=1, client_message_id=name)
    for steps, parents in (((kept, accepted), ["row", "spark"]), ((accepted,), ["spark"])):
        told = story(*steps)
        written = told.steps[0]
        assert (written.what, written.thing, written.place) == ("written", name, "Spark")
        assert written.reason == f"{row} of the writes with the namespace's hash f2e9b47b905df4bc"
        assert [each.parent for each in told.steps[1:]][::-1] == [
            {"row": "row", "spark": written.id}[parent] for parent in parents
        ]


@pytest.mark.parametrize(
    ("task", "said", "parent"),
    [
        (SparkTask("job", JOB.int, 7), f"the partition 7 of the job {JOB}", f"job:{JOB}"),
        (SparkTask("write", ulid_number(WRITE), 0), f"the partition 0 of write-{WRITE}", None),
        (
            SparkTask("stream", 0x2E9B47B905DF4BC << 64 | 12, 3),
            "the partition 3 of stream-02e9b47b905df4bc-batch-12",
            None,
        ),
    ],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_the_traceparent_of_a_row_names_what_wrote_it_and_the_partition(
    task: SparkTask, said: str, parent: str | None
) -> None:
    accepted = step("message", "accepted", client_message_id="f2e9b47b905df4bc:17", traceparent=task.traceparent)
    written = story(accepted).steps[0]
    assert (written.reason, written.parent) == (f"the row 17, by {said}", parent)


@given(st.sampled_from(["job", "write", "stream"]), st.integers(1, 2**128 - 1), st.integers(0, 2**31 - 1))
def test_what_a_task_of_spark_says_is_a_traceparent_and_is_read_again(kind: Any, number: int, partition: int) -> None:
    task = SparkTask(kind, number, partition)
    assert TRACEPARENT.fullmatch(task.traceparent)
    assert SparkTask.read(task.traceparent) == task
    assert ulid_number(ulid_of(number)) == number


def test_a_traceparent_of_somebody_else_is_no_task_of_spark() -> None:
    for other in (None, "", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"):
        assert SparkTask.read(other) is None


def test_a_message_with_an_id_of_another_kind_has_no_row_of_spark() -> None:
    assert len(story(step("row", "kept", client_message_id="order:17")).steps) == 1


def test_what_the_daemon_says_of_its_row_is_newer_than_what_it_reported() -> None:
    async def broker(_id: str, _sender: str | None) -> Story:
        return story(step("row:1", "kept", client_message_id="k"), waits=("row:1",))

    async def daemon(_id: str, _sender: str | None) -> Story:
        return story(step("row:1", "kept", seconds=5, client_message_id="k"))

    found = asyncio.run(follow_trace("k", broker=broker, daemon=daemon))
    assert (found.waits, found.steps[0].at) == ([], T0 + timedelta(seconds=5))


async def test_a_row_leads_to_the_broker_and_a_message_to_the_row() -> None:
    row = step("row", "kept", seconds=0, client_message_id="k")
    message = step("message", "accepted", seconds=1, client_message_id="k", sender="alice")
    asked: list[tuple[str, str | None]] = []

    async def broker(id_: str, _sender: str | None) -> Story:
        if id_ not in ("k", "message"):
            raise NotFound.of("trace_not_found", "no")
        return story(message)

    async def daemon(id_: str, sender: str | None) -> Story:
        asked.append((id_, sender))
        if id_ not in ("k", "row"):
            raise NotFound.of("row_not_found", "no")
        return story(row)

    for id_ in ("k", "row", "message"):
        found = await follow_trace(id_, broker=broker, daemon=daemon)
        assert [(each.id, each.parent) for each in found.steps] == [("row", None), ("message", "row")], id_
        assert asked[-1] == ("k", "alice")  # so that its inbox is looked at too


async def test_who_cannot_be_asked_is_named_and_an_unknown_id_is_not_found() -> None:
    asked: list[str] = []

    async def away(id_: str, _sender: str | None) -> Story:
        asked.append(id_)
        raise Unavailable.of("broker_unreachable", "the broker is away")

    async def unknown(_id: str, _sender: str | None) -> Story:
        raise NotFound.of("row_not_found", "no")

    async def known(_id: str, _sender: str | None) -> Story:
        return story(step("row", "kept", client_message_id="k"))

    found = await follow_trace("row", broker=away, daemon=known)
    assert [problem.code for problem in found.unread] == ["broker_unreachable"]
    assert len(asked) == 1  # whoever is away takes long to say so
    with pytest.raises(Unavailable):
        await follow_trace("k", broker=away, daemon=unknown)
    with pytest.raises(NotFound):
        await follow_trace("k", broker=unknown, daemon=None)


async def test_an_id_that_no_row_can_have_is_refused_by_the_daemon_where_no_broker_is_asked() -> None:
    async def daemon(_id: str, _sender: str | None) -> Story:
        raise InvalidMessage.of("invalid_client_message_id", "id is not an id")

    with pytest.raises(InvalidMessage):
        await follow_trace("a/b", broker=None, daemon=daemon)
