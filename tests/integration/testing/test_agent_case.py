"""An agent under test: its real runtime and store, without JetStream."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from uuid import uuid4

import pytest

from postroom import InvalidMessage
from postroom.agent import Agent, Command, Emit, Envelope, InvalidAgent
from postroom.delivery.agents.replay import verify
from postroom.testing import AgentCase, FakeClient, handler_request
from postroom.worker.config import load_agent_config

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


class Sales(NamedTuple):
    orders: int = 0
    total: int = 0


class Pricing(Agent[Sales]):
    """Prices orders, and has every tenth checked."""

    subjects = ("cmd.{tenant}.{workspace}.pricing.>", "{tenant}.event.order_placed.v1")

    def initial_state(self) -> Sales:
        return Sales()

    async def receive(self, envelope: Envelope) -> list[Any]:
        if envelope.payload["order"] < 0:
            raise ValueError(f"there is no order {envelope.payload['order']}, at attempt {self.attempt}")
        effects: list[Any] = [Emit("order_priced", {"order": envelope.payload["order"], "total": 42})]
        if self.state.orders == 9:
            effects.append(Command("checking", payload=envelope.payload))
        return effects

    def apply(self, state: Sales, event: Envelope) -> Sales:
        if event.type != "order_priced":
            return state
        return Sales(state.orders + 1, state.total + event.payload["total"])


async def test_a_message_is_handled_and_what_it_emits_is_there() -> None:
    async with AgentCase(Pricing) as case:
        received = await case.receive({"order": 17}, message_id="m-1")
        assert (received.outcome, received.error) == ("done", None)
        (priced,) = received.emitted
        assert (priced.type, priced.payload, priced.causation_id) == (
            "order_priced",
            {"order": 17, "total": 42},
            "m-1",
        )
        for number in range(8):
            await case.receive({"order": number}, subject="demo.event.order_placed.v1")
        assert [each.type for each in (await case.receive({"order": 10})).emitted] == ["order_priced", "run"]
        assert case.state == Sales(10, 420)


async def test_messages_at_once_each_have_what_was_emitted_for_them() -> None:
    async with AgentCase(Pricing) as case:
        received = await asyncio.gather(*(case.receive({"order": order}) for order in range(4)))
        assert [[each.payload["order"] for each in one.emitted] for one in received] == [[0], [1], [2], [3]]


async def test_an_id_may_be_a_uuid_as_that_of_an_event_is() -> None:
    id_ = uuid4()
    async with AgentCase(Pricing) as case:
        (priced,) = (await case.receive({"order": 17}, message_id=id_)).emitted
        assert priced.causation_id == str(id_)
    request = handler_request({}, event="order_paid", message_id=id_, correlation_id=id_, causation_id=id_)
    read = json.loads(request.body)
    assert (request.message_id, read["correlation_id"], read["causation_id"]) == (str(id_),) * 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"form": "cloudevent"}, "no form 'cloudevent': use postroom, cloudevents, cloudevents-binary"),
        ({"occurred_at": datetime(2026, 1, 31)}, "a time with its offset"),  # noqa: DTZ001 - which is the fault
        ({"attempt": 0}, "attempt must be a whole number"),
        ({"attempt": "1"}, "attempt must be a whole number"),
        ({"version": "1"}, "the version '1' is not a number"),
        ({"version": True}, "the version True is not a number"),
        ({"message_id": "a b"}, "visible ASCII"),
        ({"subject": "shop orders"}, "is not one of <context>.event"),
    ],
    ids=str,
)
def test_a_request_that_no_consumer_makes_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        handler_request({}, **{"event": "order_paid", **given})


async def test_a_message_that_comes_again_is_not_handled_again() -> None:
    async with AgentCase(Pricing) as case:
        await case.receive({"order": 17}, message_id="m-1")
        await case.restart()
        again = await case.receive({"order": 17}, message_id="m-1")
        assert (again.outcome, again.emitted, case.state) == ("done", [], Sales(1, 42))


async def test_one_that_fails_is_tried_again_and_dead_in_the_end() -> None:
    async with AgentCase(Pricing, max_deliver=2) as case:
        first = await case.receive({"order": -1}, message_id="m-1")
        last = await case.receive({"order": -1}, message_id="m-1")
        assert (first.outcome, first.error) == ("later", "ValueError: there is no order -1, at attempt 1")
        assert (last.outcome, last.error) == ("dead", "max_deliver: ValueError: there is no order -1, at attempt 2")
        assert case.state == Sales()


async def test_a_message_is_tried_as_often_as_in_production() -> None:
    async with AgentCase(Pricing) as case:
        outcomes = [(await case.receive({"order": -1}, message_id="m-1")).outcome for _ in range(5)]
    assert outcomes == ["later"] * 4 + ["dead"]
    assert load_agent_config(
        None, tenant="demo", environ={"POSTROOM_AGENT_NATS_URL": "nats://here"}
    ).max_deliver == len(outcomes)


async def test_the_senders_retry_policy_is_followed() -> None:
    async with AgentCase(Pricing) as case:
        received = await case.receive({"order": -1, "retry_policy": {"max_attempts": 1}})
    assert received.outcome == "dead"


async def test_a_wrong_version_of_an_entity_is_a_conflict_and_another_tenant_is_refused() -> None:
    async with AgentCase(Pricing) as case:
        await case.receive({"order": 1}, entity_id="order-1", expected_version=0)
        conflict = await case.receive({"order": 1}, entity_id="order-1", expected_version=0)
        assert [each.type for each in conflict.emitted] == ["pricing_conflict"]
        refused = await case.receive({"order": 1}, headers={"Postroom-Tenant": "somebody"})
        assert (refused.outcome, [each.type for each in refused.emitted]) == ("dead", ["pricing_security"])
        assert case.state == Sales(1, 42)


async def test_the_store_is_a_real_one_that_lasts_where_it_has_a_directory(tmp_path: Path) -> None:
    async with AgentCase(Pricing, directory=tmp_path) as case:
        await case.receive({"order": 17})
        before = case.state_hash
    async with AgentCase(Pricing, directory=tmp_path) as case:
        assert (case.state, case.state_hash) == (Sales(1, 42), before)
    verified = await verify(tmp_path / "events.db")
    assert (verified.head.position, verified.first_difference) == (2, None)


class Billing(Agent):
    """Bills what programs send it."""

    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    async def receive(self, envelope: Envelope) -> Emit:
        sent = envelope.payload["message"]
        return Emit("order_billed", {"of": json.loads(sent["body"])["order"], "for": envelope.actor})


async def test_what_a_program_sent_comes_as_a_worker_publishes_it() -> None:
    post = FakeClient()
    post.send("queue:billing", {"order": 17}, traceparent=TRACE)
    post.send("queue:pricing", {"order": 17})
    async with AgentCase(Billing) as case:
        received = await case.receive(post.sent[0], message_id="m-1")
        assert received.outcome == "done", received.error
        (billed,) = received.emitted
        assert (billed.payload, billed.causation_id) == ({"of": 17, "for": "alice"}, "m-1")
        assert billed.trace_id == "a" * 32
        with pytest.raises(InvalidMessage, match=r"billing handles cmd\.demo\.default\.billing\.>"):
            await case.receive(post.sent[1])


class Marking(Agent[tuple[Any, ...]]):
    """Changes the message that it is given, and emits it."""

    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    def initial_state(self) -> tuple[Any, ...]:
        return ()

    async def receive(self, envelope: Envelope) -> Emit:
        envelope.payload["lines"].append("delivery")
        return Emit("order_marked", envelope.payload)

    def apply(self, state: tuple[Any, ...], event: Envelope) -> tuple[Any, ...]:
        return (*state, tuple(event.payload["lines"]))


async def test_what_receive_changes_of_its_message_is_in_no_state() -> None:
    async with AgentCase(Marking) as case:
        await case.receive({"lines": ["goods"]})
        assert case.state == (("goods",), ("goods", "delivery"))


class Forgetful(Agent[list[int]]):
    """Changes the state that it is given, and counts in a place of its own."""

    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)
    seen: ClassVar[list[int]] = []

    def initial_state(self) -> list[int]:
        return []

    async def receive(self, envelope: Envelope) -> None:
        del envelope

    def apply(self, state: list[int], event: Envelope) -> list[int]:
        self.seen.append(event.payload)
        return [*state, len(self.seen)]


async def test_an_apply_that_is_not_pure_is_found_at_the_end_and_at_a_restart() -> None:
    Forgetful.seen.clear()
    with pytest.raises(AssertionError, match=r"Forgetful.apply is not pure: its state was \[1\], .* give \[2\]"):
        async with AgentCase(Forgetful) as case:
            await case.receive(1)
    async with AgentCase(Pricing) as case:
        await case.restart()


async def test_what_is_no_agent_and_a_subject_that_it_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidAgent, match="derive a class"):
        AgentCase(int)  # type: ignore[arg-type]
    async with AgentCase(Pricing) as case:
        with pytest.raises(InvalidMessage, match=r"pricing handles cmd.demo.default.pricing.>"):
            await case.receive(1, subject="demo.event.something_else.v1")
    with pytest.raises(RuntimeError, match="async with AgentCase"):
        _ = case.state


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"max_deliver": 0}, "max_deliver"),
        ({"max_deliver": "3"}, "max_deliver"),
        ({"tenant": "Demo"}, "a name: a lower-case letter"),
        ({"tenant": "cmd"}, "not `cmd`"),
        ({"workspace": "a.b"}, "a name: a lower-case letter"),
    ],
    ids=str,
)
def test_what_the_config_of_an_agent_refuses_is_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        AgentCase(Pricing, **given)


async def test_a_payload_that_is_not_json_is_refused_in_a_test_as_where_it_is_emitted() -> None:
    async with AgentCase(Pricing) as case:
        for payload in ({"order": object()}, {"order": float("nan")}):
            with pytest.raises(InvalidMessage, match="the payload cannot be written as JSON"):
                await case.receive(payload)
            with pytest.raises(InvalidMessage, match="the payload cannot be written as JSON"):
                handler_request(payload, event="order_paid")
