"""The promise of the second half: what a broker accepted has its effect once, whatever is killed on the way.

A handler that counts, an agent that answers, and another daemon's inbox, while NATS is killed, paused, purged and loses
its store, and while worker, consumer, agent and daemon are killed with -9.
"""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from support.chain import Chain
from support.effects import Senders, everything_has_its_effect_once

WRITERS = 8
FAULTS = ("worker", "consumer", "agent", "reader", "killed", "paused", "purged EVENTS", "purged INBOX", "emptied")


async def disturb(chain: Chain, load: Senders, fault: str) -> None:
    """Let one thing go wrong; it is over when this returns."""
    match fault.split():
        case ["killed"]:
            chain.kill_nats()
        case ["emptied"]:
            chain.kill_nats(forget=True)
        case ["paused"]:
            sent = len(load.sent)
            await chain.pause_nats(lambda: load.reached(sent + 50))
        case ["purged", stream]:
            await chain.purge(stream)
        case _:
            chain.restart(fault)


async def run_under_faults(chain: Chain, *, messages: int, faults: int, seed: int) -> None:
    """Send `messages` while `faults` things go wrong, evenly spread over them; each kind as often as the others."""
    chance = random.Random(seed)
    kinds = [FAULTS[number % len(FAULTS)] for number in range(faults)]
    chance.shuffle(kinds)
    load = Senders(chain.room.socket, messages)
    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(load.write())
        for number, kind in enumerate(kinds, 1):
            await load.reached(messages * number // (faults + 1))
            chain.revive()
            await disturb(chain, load, kind)


@pytest.mark.timeout(600)
async def test_every_accepted_message_has_its_effect_once_whatever_is_killed(chain, handler, database_url):
    await run_under_faults(chain, messages=1250, faults=2 * len(FAULTS), seed=7)
    await everything_has_its_effect_once(chain, handler, database_url)


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_the_same_for_10_000_messages_and_many_more_kills(chain, handler, database_url):
    faults = int(os.environ.get("POSTROOM_SOAK_KILLS", "200"))
    await run_under_faults(chain, messages=10_000, faults=faults, seed=random.randrange(10**6))
    await everything_has_its_effect_once(chain, handler, database_url)
