"""The state hash of a running agent: it depends on the messages, not on how or how often they came."""

import asyncio
import os
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from support.agents import Counting, opened
from support.jetstream import Context

from postroom.chassis.exits import Fatal
from postroom.claims import Done, Outcome
from postroom.delivery.agents.replay import replay, verify
from postroom.delivery.message import Delivery

START = datetime(2026, 11, 21, tzinfo=UTC)


class Settled:
    """Settles deliveries as the consumer core does, and remembers the outcomes."""

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []

    async def __call__(self, delivery: Delivery, outcome: Outcome) -> None:
        del delivery
        self.outcomes.append(outcome)


def deliveries(context: Context, count: int) -> list[Delivery]:
    return [
        Delivery(
            context.subject, b'{"total":%d}' % number, {}, f"order-{number}", context.events, number, 1,
            published_at=START + timedelta(milliseconds=number),
        )
        for number in range(1, count + 1)
    ]  # fmt: skip


async def run(context: Context, directory: Path, batches: Sequence[Sequence[Delivery]]) -> tuple[str, Any]:
    """Give an agent with a store of its own these batches, all at once; return its state hash and its state."""
    runtime = await opened(context, directory)
    settled = Settled()
    handling = [asyncio.create_task(runtime.handle(batch, settled)) for batch in batches]
    await asyncio.sleep(0)  # each has handed its batch over
    task = asyncio.create_task(runtime.run())
    await asyncio.gather(*handling)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    found = runtime.state_hash, runtime.state
    await runtime.close()
    assert {type(outcome) for outcome in settled.outcomes} == {Done}
    return found


async def test_the_same_log_has_the_same_hash_however_it_was_pulled_and_redelivered(context: Context, tmp_path: Path):
    messages = deliveries(context, 60)
    plain = await run(context, tmp_path / "plain", [messages])
    for seed in range(5):
        chance = random.Random(seed)
        shuffled = chance.sample([*messages, *chance.choices(messages, k=40)], 100)  # 40 redeliveries among them
        cuts = sorted(chance.sample(range(1, 100), 9))
        batches = [shuffled[start:end] for start, end in zip([0, *cuts], [*cuts, 100], strict=True)]
        assert await run(context, tmp_path / str(seed), batches) == plain


async def test_a_replay_has_the_same_hash_and_the_same_state_and_publishes_nothing(context: Context, tmp_path: Path):
    state_hash, state = await run(context, tmp_path, [deliveries(context, 20)])
    before = (await context.js.stream_info(context.events)).state.last_seq
    owner, memory = await replay(Counting, tmp_path / "events.db")
    assert (memory.state_hash.hex(), memory.state, owner.agent) == (state_hash, state, "counting")
    assert (await context.js.stream_info(context.events)).state.last_seq == before


@pytest.mark.parametrize("number", [1, 7, 20])
async def test_one_changed_byte_of_the_file_is_found_at_its_position(context: Context, tmp_path: Path, number: int):
    await run(context, tmp_path, [deliveries(context, 20)])
    file = tmp_path / "events.db"
    content = file.read_bytes()
    needle = b'"id":"order-%d"' % number
    assert content.count(needle) == 1
    file.write_bytes(content.replace(needle, needle.replace(b"order", b"Order")))
    verified = await verify(file)
    assert verified.first_difference == 3 * number - 2
    with pytest.raises(Fatal, match="was altered at position"):
        await run(context, tmp_path, [])


async def test_an_untouched_store_is_sound(context: Context, tmp_path: Path):
    state_hash, _ = await run(context, tmp_path, [deliveries(context, 5)])
    verified = await verify(tmp_path / "events.db")
    assert (verified.first_difference, verified.head.position, verified.head.state_hash.hex()) == (None, 15, state_hash)


async def test_what_is_no_file_is_said_to_be_missing(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("events.db", "pipe", "."):
        with pytest.raises(Fatal, match="there is no event store"):
            await verify(tmp_path / name)
