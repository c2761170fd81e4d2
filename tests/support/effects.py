"""What a chain is tried with: programs that send, a handler that remembers, and the reckoning of every effect."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import asyncpg
from aiohttp import web

from postroom import AsyncClient, new_id
from support.agents import Kept, kept
from support.chain import QUEUE, Chain
from support.handlers import Call, CountingHandler
from support.mailroom import TOPIC
from support.receiving import ids_in

PATIENCE = 120.0  # seconds, in which everything has to come to rest after the last fault


class Remembering:
    """A handler that knows what it has done, as any handler should: a second call for a key changes nothing."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by Idempotency-Key: what the event was called
        self.times: dict[str, float] = {}  # when it was done, on the monotonic clock
        self.again: dict[str, datetime] = {}  # when one last came that was done before

    def __call__(self, call: Call) -> web.StreamResponse:
        if call.request.message_id in self.names:
            self.again[call.request.message_id] = datetime.now(UTC)
            return web.Response(status=409)
        self.names[call.request.message_id] = call.request.event_type
        self.times[call.request.message_id] = time.monotonic()
        return web.Response(status=200)

    def effects(self, event_type: str) -> set[str]:
        return {key for key, name in self.names.items() if name == event_type}


class Accepted(NamedTuple):
    """What the broker says that it has accepted, broker's ids by the senders'."""

    events: dict[str, str]
    commands: dict[str, str]


class Senders:
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

    def stop(self) -> None:
        """Let nobody begin another message."""
        self._total = self._begun


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


async def at_rest(chain: Chain, condition: Callable[[], bool], what: str, patience: float) -> None:
    """Wait until `condition` holds, and keep every program running meanwhile."""
    try:
        async with asyncio.timeout(patience):
            while not condition():
                chain.revive()
                await asyncio.sleep(0.1)
    except TimeoutError:
        logs = "\n".join(f"--- {name}\n{program.log()[-3000:]}" for name, program in chain.programs.items())
        raise AssertionError(f"not within {patience:.0f} s: {what}\n{logs}") from None


async def everything_has_its_effect_once(
    chain: Chain, handler: CountingHandler, database_url: str, *, patience: float = PATIENCE
) -> None:
    """Wait until what was accepted has its effects, and fail where one has not, or has it twice."""
    accepted = await accepted_by(database_url)
    effects = handler.answer
    assert isinstance(effects, Remembering)
    events, commands = set(accepted.events.values()), set(accepted.commands.values())

    def agent() -> list[Kept]:
        return kept(chain.agent_state)

    await at_rest(chain, lambda: effects.effects("orders") >= events, "every event handled", patience)
    await at_rest(
        chain, lambda: sum(each.role == "handled" for each in agent()) >= len(commands), "every command", patience
    )
    await at_rest(
        chain, lambda: all(each.published for each in agent() if each.role == "emitted"), "every answer", patience
    )
    await at_rest(
        chain, lambda: set(ids_in(chain.reader_state)) >= set(accepted.events), "every event in the inbox", patience
    )

    assert effects.effects("orders") == events
    assert handler.most_at_once == 1
    assert Counter(each.envelope.id for each in agent() if each.role == "handled") == Counter(commands)
    answers = [each.envelope for each in agent() if each.role == "emitted"]
    assert Counter(each.causation_id for each in answers) == Counter(commands)
    assert effects.effects("command_counted") <= {each.id for each in answers}
    assert Counter(ids_in(chain.reader_state)) == Counter(accepted.events.keys())
