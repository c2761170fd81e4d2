"""An agent and the messages that no client would write: each is stored or buried, and the rest go on."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.agents import Counting, attempted, kept, place_orders, running_agent, settled
from support.hostile import WAYS, Chunks, byte_writer, chunks, quiet_logs
from support.jetstream import Context

from postroom.agent import Agent, Emit, Envelope

GOOD = [f"good-{number}" for number in range(20)]


@pytest.fixture(params=WAYS)
def messages(request: pytest.FixtureRequest) -> Iterator[Chunks]:
    with quiet_logs():
        yield chunks(request.param, seed=4)


async def test_whatever_arrives_is_stored_or_buried(context: Context, nats_url: str, tmp_path: Path, messages: Chunks):
    async with running_agent(context, tmp_path, max_deliver=2) as running, byte_writer(nats_url) as raw:
        for chunk in messages:
            await raw.publish(context.subject, chunk)
            await settled(context)
        await place_orders(context, GOOD)
        await settled(context)
        counters = running.consumers[0].counters
        assert running.consumers[0].trouble is None
    stored = {event.envelope.id for event in kept(tmp_path) if event.role in {"handled", "conflict", "refused"}}
    print(f"{counters.done} done, {counters.dead_lettered} buried, {len(stored)} stored")  # noqa: T201
    assert set(GOOD) <= stored
    last = max(letter.sequence for letter in await context.letters())
    letters = Counter(letter.sequence for letter in await context.letters())
    assert max(letters.values()) == 1 <= last
    twice = max(5, counters.dead_lettered // 100)  # two that have the same id are one message, and have one letter
    assert counters.dead_lettered - twice <= len(letters) <= counters.dead_lettered
    assert set(Counting.runs) >= set(GOOD)
    assert attempted(tmp_path).keys() <= {letter.message_id for letter in await context.letters()}
    async with running_agent(context, tmp_path) as again:  # its store can be read back
        assert again.runtime.position == len(kept(tmp_path))


@pytest.mark.parametrize("where", ["correlation", "entity"])
async def test_a_message_whose_effects_would_have_more_headers_than_nats_takes_is_buried(
    context: Context, tmp_path: Path, where: str
):
    class Naming(Agent):
        name = "counting"
        subjects = Counting.subjects

        async def receive(self, envelope: Envelope) -> list[Emit]:
            return [Emit("order_counted", entity_id=envelope.payload["entity"])]

    entity, correlation = ("e" * 70_000, "c") if where == "entity" else ("e", "c" * 65_400)
    headers = {"Nats-Msg-Id": "large", "X-Correlation-Id": correlation}
    await context.js.publish(context.subject, json.dumps({"entity": entity}).encode(), headers=headers)
    await context.publish(["small"], b'{"entity":"order-1"}')
    async with running_agent(context, tmp_path, Naming, max_deliver=2):
        await settled(context)
    (letter,) = await context.letters()
    assert letter.message_id == "large"
    assert "the headers of 'order_counted' have" in str(letter.last_error)
    assert len([event for event in kept(tmp_path) if event.role == "emitted"]) == 1
