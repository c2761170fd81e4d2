"""The promise of the second half: what a broker accepted has its effect once, whatever is killed on the way.

A handler that counts, an agent that answers, and another daemon's inbox, while NATS is killed, paused, purged and loses
its store, and while worker, consumer, agent and daemon are killed with -9.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pytest
from agents import Kept, kept
from aiohttp import web
from chain import QUEUE, Chain
from handlers import Call, CountingHandler, serving
from mailroom import TOPIC
from receiving import ids_in

from postroom import AsyncClient, new_id

WRITERS = 8
FAULTS = ("worker", "consumer", "agent", "reader", "killed", "paused", "purged EVENTS", "purged INBOX", "emptied")
PATIENCE = 120.0  # seconds, in which everything has to come to rest after the last fault


class Remembering:
    """A handler that knows what it has done, as any handler should: a second call for a key changes nothing."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by Idempotency-Key: what the event was called

    def __call__(self, call: Call) -> web.StreamResponse:
        if call.request.message_id in self.names:
            return web.Response(status=409)
        self.names[call.request.message_id] = call.request.event_type
        return web.Response(status=200)

    def effects(self, event_type: str) -> set[str]:
        return {key for key, name in self.names.items() if name == event_type}


class Accepted(NamedTuple):
    """What the broker says that it has accepted, broker's ids by the senders'."""

    events: dict[str, str]
    commands: dict[str, str]


class Load:
    """Programs that send an event or a command, wait until it is accepted, and send the next, `total` in all."""

    def __init__(self, socket: Path, total: int) -> None:
        self.sent: list[str] = []
        self._socket = socket
        self._total = total
        self._begun = 0
        self._progress = asyncio.Condition()

    async def write(self) -> None:
        async with AsyncClient(self._socket, patience=PATIENCE) as client:
            while self._begun < self._total:
                self._begun += 1
                name, to = new_id(), QUEUE if self._begun % 4 == 0 else TOPIC
                await client.send(to, f"message {self._begun}", client_message_id=name)
                assert (await client.wait(name, PATIENCE)).status == "done"
                async with self._progress:
                    self.sent.append(name)
                    self._progress.notify_all()

    async def reached(self, count: int) -> None:
        async with self._progress:
            await self._progress.wait_for(lambda: len(self.sent) >= min(count, self._total))


@pytest.fixture
async def handler() -> AsyncIterator[CountingHandler]:
    async with serving(Remembering()) as running:
        yield running


@pytest.fixture
async def chain(
    short_directory: Path, database_url: str, redis_url: str, handler: CountingHandler
) -> AsyncIterator[Chain]:
    chain = Chain(short_directory, database_url, redis_url, handler.url)
    try:
        await chain.open()
        yield chain
    finally:
        chain.close()


async def disturb(chain: Chain, load: Load, fault: str) -> None:
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
    load = Load(chain.room.socket, messages)
    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(load.write())
        for number, kind in enumerate(kinds, 1):
            await load.reached(messages * number // (faults + 1))
            chain.revive()
            await disturb(chain, load, kind)


async def accepted_by(database_url: str) -> Accepted:
    database = await asyncpg.connect(database_url)
    rows = await database.fetch(
        "SELECT client_message_id, broker_message_id::text, destination_kind FROM mesh.message_history"
    )
    await database.close()
    found: dict[str, dict[str, str]] = {"topic": {}, "queue": {}}
    for name, message_id, kind in rows:
        found[kind][name] = message_id
    return Accepted(found["topic"], found["queue"])


async def at_rest(chain: Chain, condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds, and keep every program running meanwhile."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                chain.revive()
                await asyncio.sleep(0.1)
    except TimeoutError:
        logs = "\n".join(f"--- {name}\n{program.log()[-3000:]}" for name, program in chain.programs.items())
        pytest.fail(f"not within {PATIENCE:.0f} s: {what}\n{logs}")


async def everything_has_its_effect_once(chain: Chain, handler: CountingHandler, database_url: str) -> None:
    accepted = await accepted_by(database_url)
    effects = handler.answer
    assert isinstance(effects, Remembering)
    events, commands = set(accepted.events.values()), set(accepted.commands.values())

    def agent() -> list[Kept]:
        return kept(chain.agent_state)

    await at_rest(chain, lambda: effects.effects("orders") >= events, "every event handled")
    await at_rest(chain, lambda: sum(each.role == "handled" for each in agent()) >= len(commands), "every command")
    await at_rest(chain, lambda: all(each.published for each in agent() if each.role == "emitted"), "every answer")
    await at_rest(chain, lambda: set(ids_in(chain.reader_state)) >= set(accepted.events), "every event in the inbox")

    assert effects.effects("orders") == events
    assert handler.most_at_once == 1
    assert Counter(each.envelope.id for each in agent() if each.role == "handled") == Counter(commands)
    answers = [each.envelope for each in agent() if each.role == "emitted"]
    assert Counter(each.causation_id for each in answers) == Counter(commands)
    assert effects.effects("command_counted") <= {each.id for each in answers}
    assert Counter(ids_in(chain.reader_state)) == Counter(accepted.events.keys())


@pytest.mark.timeout(600)
async def test_every_accepted_message_has_its_effect_once_whatever_is_killed(chain, handler, database_url):
    await run_under_faults(chain, messages=2500, faults=4 * len(FAULTS), seed=7)
    await everything_has_its_effect_once(chain, handler, database_url)


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_the_same_for_10_000_messages_and_many_more_kills(chain, handler, database_url):
    faults = int(os.environ.get("POSTROOM_SOAK_KILLS", "200"))
    await run_under_faults(chain, messages=10_000, faults=faults, seed=random.randrange(10**6))
    await everything_has_its_effect_once(chain, handler, database_url)
