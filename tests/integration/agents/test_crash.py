"""The agent is killed (-9) before and after each commit, publish, mark and ack: each effect once, nothing missing.

Among the points is the one where acknowledging a known message would lose what it emitted: killed after the commit and
before the publish (docs/contract/delivery.md#delivery-57).
"""

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.agents import Counting, Tally, attempted, emitted, kept, place_orders, running_agent, settled
from support.jetstream import Context

from embedded.processes import tethered
from postroom.delivery.agents.replay import verify
from postroom.delivery.agents.turns import Turns

TESTS = Path(__file__).parents[2]
MAX_DELIVER = 5  # of the crashing agent
ORDERS_PER_RUN = 12  # in four groups: enough for each of the points to be reached
IN_A_GROUP = (1, 2, 3, 4, 6, 7, 12)  # the ends of groups of three orders, and of six messages, and what is between
POINTS = [
    *((f"{when} {what}", call) for when in ("before", "after") for what in ("commit", "mark") for call in range(1, 5)),
    *((f"{when} {what}", call) for when in ("before", "after") for what in ("publish", "ack") for call in IN_A_GROUP),
]
Run = Callable[[str, int], Awaitable[int]]


@pytest.fixture
async def run(context: Context, nats_url: str, tmp_path: Path) -> AsyncIterator[Run]:
    """Run the agent until it is killed at a point; returns how its process ended."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = tethered([sys.executable, "-m", "support.crashing_agent"])
    process = await asyncio.create_subprocess_exec(
        *command, env=environment, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    async def one(point: str, call: int) -> int:
        order = {"url": nats_url, "context": context.name, "directory": str(tmp_path), "point": point, "call": call}
        stdin.write(json.dumps(order).encode() + b"\n")
        return int(await stdout.readline())

    yield one
    stdin.close()
    await process.wait()


async def crash_at(points: list[tuple[str, int]], context: Context, run: Run) -> int:
    """Kill the agent at each point, with new orders before each, then let it finish; returns the number of orders."""
    for number, (point, call) in enumerate(points):
        await place_orders(context, [f"order-{number}-{index}" for index in range(ORDERS_PER_RUN)])
        assert await run(point, call) == -signal.SIGKILL, point
    assert await run("none", 0) == 0
    return len(points) * ORDERS_PER_RUN


async def check_everything_happened_once(orders: int, context: Context, directory: Path) -> None:
    events = kept(directory)
    handled = [event.envelope.id for event in events if event.role == "handled"]
    assert (len(handled), len(set(handled))) == (orders, orders)
    assert all(event.published for event in events if event.role == "emitted")
    counts = await emitted(context)
    assert set(counts) == {event.envelope.id for event in events if event.role == "emitted"}
    assert (len(counts), set(counts.values())) == (2 * orders, {1})
    verified = await verify(directory / "events.db")
    assert (verified.first_difference, verified.head.position) == (None, 3 * orders)
    assert await context.letters() == []


async def test_each_effect_happens_once_whatever_point_the_agent_is_killed_at(
    context: Context, run: Run, tmp_path: Path
):
    assert len(POINTS) == 44
    orders = await crash_at(POINTS, context, run)
    await check_everything_happened_once(orders, context, tmp_path)
    async with running_agent(context, tmp_path, ack_wait_seconds=0.3) as running:
        assert running.runtime.state == Tally(orders, 2 * orders)
        assert not Counting.runs


@pytest.mark.parametrize(
    ("point", "runs"),
    [
        ("before commit", 1),  # nothing is stored: it is delivered again and handled
        ("before ack", 0),  # it is stored: it is delivered again and only acknowledged
        ("before publish", 0),  # it is stored, and what it emitted is still to be published
    ],
)
async def test_after_a_crash_a_message_goes_on_from_the_step_that_was_not_done(
    context: Context, run: Run, tmp_path: Path, point: str, runs: int
):
    await place_orders(context, ["order-1"])
    assert await run(point, 1) == -signal.SIGKILL
    async with running_agent(context, tmp_path, ack_wait_seconds=0.3) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)
    assert Counting.runs["order-1"] == runs
    assert sorted((await emitted(context)).values()) == [1, 1]


async def test_killed_at_every_step_of_burying_each_message_has_one_letter(context: Context, run: Run):
    points = [f"{when} {what}" for what in ("keep", "publish", "mark", "ack") for when in ("before", "after")]
    poison = [f"poison-{number}" for number in range(len(points))]
    for message_id, point in zip(poison, points, strict=True):
        headers = {"Nats-Msg-Id": message_id}
        await context.js.publish(context.subject, b'{"total":2,"poison":true}', headers=headers)
        assert await run(point, 1) == -signal.SIGKILL, point
    assert await run("none", 0) == 0
    assert sorted(letter.message_id or "" for letter in await context.letters()) == poison


async def test_kills_use_up_no_attempts_of_messages_that_were_only_in_hand(context: Context, run: Run, tmp_path: Path):
    orders = [f"order-{index}" for index in range(ORDERS_PER_RUN)]
    await place_orders(context, orders)
    for _ in range(MAX_DELIVER + 2):
        assert await run("before commit", 1) == -signal.SIGKILL
    assert await run("none", 0) == 0
    await check_everything_happened_once(len(orders), context, tmp_path)
    assert attempted(tmp_path) == {}


@pytest.mark.parametrize(("deadly", "code"), [("kill", -signal.SIGKILL), ("exit", 7)])
async def test_a_message_that_ends_its_agent_each_time_is_buried_alone(
    context: Context, run: Run, tmp_path: Path, deadly: str, code: int
):
    before, after = ([f"order-{name}-{index}" for index in range(4)] for name in ("before", "after"))
    await place_orders(context, before)
    await context.publish(["deadly"], b'{"deadly":"%s"}' % deadly.encode())
    await place_orders(context, after)
    for _ in range(MAX_DELIVER):
        assert await run("none", 0) == code
    assert await run("none", 0) == 0
    (letter,) = await context.letters()
    assert (letter.message_id, letter.reason, letter.attempts) == ("deadly", "max_deliver", MAX_DELIVER)
    assert letter.last_error == "ack_timeout"
    handled = [event.envelope.id for event in kept(tmp_path) if event.role == "handled"]
    assert sorted(handled) == sorted(before + after)


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_the_same_at_many_more_points(context: Context, run: Run, tmp_path: Path):
    chance: Any = random.Random(7)
    kills = int(os.environ.get("POSTROOM_SOAK_KILLS", "1000"))
    orders = await crash_at(chance.choices(POINTS, k=kills), context, run)
    await check_everything_happened_once(orders, context, tmp_path)


async def test_what_a_killed_agent_had_forked_keeps_no_turn(tmp_path: Path):
    script = """
import asyncio, os, signal, sys
from pathlib import Path
from postroom.delivery.agents.turns import Turns

async def main():
    turns = Turns(Path(sys.argv[1]))
    async with turns.turn():
        if child := os.fork():
            print(child, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child = int(await process.stdout.readline())
    try:
        turns = Turns(tmp_path)
        async with asyncio.timeout(60), turns.turn():
            pass
        turns.close()
    finally:
        os.kill(child, signal.SIGKILL)
        await process.communicate()
    assert process.returncode == -signal.SIGKILL
