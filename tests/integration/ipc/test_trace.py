"""`GET /v1/trace/{id}` of a daemon: of each fate of a row, what became of it and why it waits."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outbox.model import Post, Settlement, Verdict
from postroom._wire.sends import RelayStatus

TO = {"to": "topic:orders", "body": "x"}


async def told(room: Any, name: str) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Return the steps by what they are, and the waits."""
    reply = await room.request("GET", f"/v1/trace/{name}")
    assert reply.status == 200, reply.json
    return {step["what"]: step for step in reply.json["steps"]}, reply.json["waits"]


async def settle(room: Any, name: str, verdict: Verdict, **rest: Any) -> None:
    assert (await room.send(TO, idempotency_key=name)).status == 202
    (row,) = await room.outbox.claim()
    await room.outbox.settle([Settlement(row.row_id, verdict, **rest)])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        ("topic_not_found: no", "refused in B2: topic_not_found: no"),
        ("invalid_message: no", "refused in B1: invalid_message: no"),
        ("idempotency_key_reused: no", "refused in B0: idempotency_key_reused: no"),
        ("http_403: no", "http_403: no"),
    ],
)
async def test_a_refusal_says_in_which_phase_and_what_helps(room: Any, error: str, reason: str) -> None:
    await settle(room, "k", Verdict.DEAD, last_error=error, answered=True)
    steps, (wait,) = await told(room, "k")
    assert (steps["posted"]["outcome"], steps["posted"]["reason"]) == ("dead", reason)
    *create, requeue = wait["help"].split(" && ")
    assert [words.split()[:4] for words in create] == (
        [["postroom", "topic", "create", "orders"]] if error.startswith("topic_not_found") else []
    )
    assert requeue == f"postroom outbox requeue {steps['kept']['thing']} --reason 'its cause is repaired'"


async def test_what_was_accepted_waits_for_nothing(room: Any) -> None:
    await settle(room, "k", Verdict.DONE, broker_message_id="m", history_id=1, duplicate=True)
    steps, waits = await told(room, "k")
    assert waits == []
    assert {step["outcome"] for step in steps.values()} == {"done"}
    assert steps["posted"]["reason"] == "the broker had accepted it before"


async def test_what_was_not_answered_may_have_been_accepted(room: Any) -> None:
    await settle(room, "k", Verdict.RETRY, last_error="timed_out: no answer", wait_ms=60_000, answered=False)
    steps, (wait,) = await told(room, "k")
    assert "may have accepted it" in steps["posted"]["reason"]
    assert wait["help"] == f"postroom outbox flush {steps['kept']['thing']} --reason 'it can go now'"


async def test_every_post_is_told_with_its_answer_its_broker_and_its_time(room: Any) -> None:
    assert (await room.send(TO, idempotency_key="k")).status == 202
    (row,) = await room.outbox.claim()
    for number, code in enumerate(("broker_unreachable", "rate_limited", "rate_limited")):
        settlement = Settlement(row.row_id, Verdict.RETRY, last_error=f"{code}: later", answered=True)
        await room.outbox.settle([settlement], Post(number * 1000, 20, "https://broker"))
        story = (await room.request("GET", "/v1/trace/k")).json
        last = {step["what"]: step for step in story["steps"]}["posted"]
        assert (last["outcome"], last["ids"]["broker"], last["ids"]["seconds"]) == ("waiting", "https://broker", "0.02")
        assert "help" not in story["waits"][0]  # it is due
        await room.outbox.claim()
    tried = [step for step in story["steps"] if step["what"] == "tried"]
    assert [(step["reason"], step["attempt"], step["outcome"]) for step in tried] == [
        ("broker_unreachable", 1, "ended")
    ]
    assert last["at"] == "1970-01-01T00:00:02Z"
    await room.outbox.settle([Settlement(row.row_id, Verdict.DONE, broker_message_id="m", history_id=1)])
    story = (await room.request("GET", "/v1/trace/k")).json
    posts = [(step["what"], step["outcome"], step.get("reason"), step.get("attempt")) for step in story["steps"][1:]]
    assert posts == [
        ("tried", "ended", "broker_unreachable", 1),
        ("tried", "ended", "rate_limited", 2),
        ("posted", "done", None, 4),
    ]


async def test_what_is_rate_limited_waits_and_no_command_makes_it_faster(room: Any) -> None:
    await settle(room, "k", Verdict.RETRY, last_error="rate_limited: later", wait_ms=60_000, answered=True)
    _, (wait,) = await told(room, "k")
    assert wait["why"].endswith("Z: rate_limited: later")
    assert "help" not in wait


async def test_what_is_too_old_has_expired(room: Any) -> None:
    assert (await room.send(TO, idempotency_key="k")).status == 202
    await room.outbox.expire(2**50)
    steps, (wait,) = await told(room, "k")
    assert steps["expired"]["outcome"] == "dead"
    assert wait["help"].startswith(f"postroom outbox requeue {steps['kept']['thing']} --reason ")


@pytest.mark.parametrize(
    ("relay", "help_"),
    [
        (RelayStatus(state="paused"), "postroom relay resume --reason 'it was paused'"),
        (
            RelayStatus(state="relaying", paused_destinations=["topic:orders"]),
            "postroom relay resume topic:orders --reason 'it was paused'",
        ),
        (RelayStatus(state="waiting", reason="the broker is unreachable"), "postroom doctor"),
        (RelayStatus(state="relaying"), None),
    ],
)
async def test_a_row_that_is_due_waits_for_what_the_relay_does(
    room: Any, relay: RelayStatus, help_: str | None
) -> None:
    room.relay.now = relay
    assert (await room.send(TO, idempotency_key="k")).status == 202
    steps, (wait,) = await told(room, "k")
    assert steps.keys() == {"kept"}
    assert wait.get("help") == help_


async def test_a_row_that_is_not_to_be_posted_yet_says_until_when(room: Any) -> None:
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    assert (await room.send({**TO, "not_before": later}, idempotency_key="k")).status == 202
    assert "its sender wants it posted at" in (await told(room, "k"))[1][0]["why"]


async def test_a_row_that_is_being_posted_says_so(room: Any) -> None:
    assert (await room.send(TO, idempotency_key="k")).status == 202
    await room.outbox.claim()
    steps, (wait,) = await told(room, "k")
    assert (steps["posted"]["outcome"], wait["why"]) == ("running", "it is being posted to the broker")


async def test_an_unknown_id_is_a_404(room: Any) -> None:
    assert (await room.request("GET", "/v1/trace/k")).status == 404
