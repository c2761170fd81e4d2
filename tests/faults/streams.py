"""What NATS holds is lost, and what nobody can handle lies in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import asyncpg
import nats
from aiohttp import web
from nats.aio.client import Client
from support.chain import Chain
from support.effects import PATIENCE, Remembering, Senders, at_rest, everything_has_its_effect_once
from support.handlers import Call, CountingHandler, serving
from support.mailroom import MESH, TOPIC
from support.waiting import until_so

from faults.campaign import Missed, Run, goal
from postroom import AsyncClient, new_id
from postroom._wire.message import SendRequest

_SENDERS: Final = 8
_SPOILT: Final = "spoilt_thing"  # the events that the handler refuses
_FAULTS: Final = ("deleted", "purged EVENTS", "purged INBOX", "purged DLQ", "cut off", "restored from a copy")
_UNREAD: Final = 20  # messages
_FEW_AT_ONCE: Final[dict[str, object]] = {"CONSUMER_MAX_ACK_PENDING": 5}  # more would reach a stopped reader's socket
_CUT_SECONDS: Final = 3.0
_SPOILT_A_FAULT: Final = 10
_CONTROL_PATIENCE: Final = 20.0  # seconds, far more than anything takes that is not lost
_REBUILT: Final = 100_000  # events
_REBUILT_WITHIN: Final = 60.0  # seconds

_CURSED: Final = "cursed_thing"  # the events that it fails at, whenever they come
_BULK: Final = "bulk_thing"
_JUNK: Final = "no JSON"
_POISON: Final = (_SPOILT, _CURSED, _JUNK)
_ROUNDS: Final = 100
_RATE: Final = 250  # good messages a second: fewer than a chain on two busy cores carries
_GOOD_WITHIN: Final = 5.0  # seconds

_EMIT: Final = (
    "SELECT postroom.emit($1, 'thing', number::text, $2, '{\"n\": 1}') FROM generate_series(1, $3::integer) AS number"
)
_UNPUBLISHED: Final = "SELECT count(*) FROM postroom.outbox_events WHERE event_type = $1 AND published_at IS NULL"
_UNBURIED: Final = """
SELECT count(*) FROM postroom.outbox_events AS event
WHERE event_type = $1 AND NOT EXISTS (
  SELECT 1 FROM postroom.dead_letters
  WHERE convert_from(letter, 'UTF8')::json ->> 'message_id' IN (event.id::text, event.id || '/' || event.epoch)
)
"""
_SETTLED_AGAIN: Final = """
SELECT count(*) FROM unnest($1::text[], $2::timestamptz[]) AS call (message_id, at)
JOIN postroom.inbox_messages USING (message_id) WHERE processed_at < call.at
"""


class Spoiling(Remembering):
    """A handler that refuses what is spoilt, and forever fails at what is cursed."""

    def __call__(self, call: Call) -> web.StreamResponse:
        if call.request.event_type == _SPOILT:
            return web.Response(status=422, text="spoilt")
        if call.request.event_type == _CURSED:
            return web.Response(status=500, text="cursed")
        return super().__call__(call)


@asynccontextmanager
async def _chain(run: Run, consumer: dict[str, object] | None = None) -> AsyncIterator[tuple[Chain, CountingHandler]]:
    async with serving(Spoiling()) as handler:
        chain = Chain(run.place(), await run.servers.database(), run.servers.redis_url, handler.url)
        try:
            await chain.open(consumer=consumer)
            await chain.reader_ready()
            await until_so(partial(_is_there, chain.agent_state / "events.db"), PATIENCE)
            yield chain, handler
        finally:
            chain.close()


async def _is_there(file: Path) -> bool:
    return file.exists()


@goal("F9", "NATS store deleted, purged, cut off, restored from a copy", without="the record", alone=True)
async def lost_streams(run: Run) -> None:
    """Lose what NATS had, again and again: all has its effect, and nothing settled comes again."""
    async with _chain(run, _FEW_AT_ONCE) as (chain, handler):
        if run.without:
            chain.programs["worker"].become("faults.without", run.without, "postroom.worker", "run")
            chain.restart("worker")
        database = await asyncpg.connect(chain.room.database_url)
        senders = Senders(chain.room.socket, run.size.load)
        last, *kinds = [_FAULTS[number % len(_FAULTS)] for number in range(run.size.trials)]
        run.chance.shuffle(kinds)
        kinds.append(last)  # a store that is lost last: nothing is published after it that takes the lost numbers
        async with asyncio.TaskGroup() as group:
            for _ in range(_SENDERS):
                group.create_task(senders.write())
            for number, kind in enumerate(kinds, 1):
                await senders.reached(run.size.load * number // len(kinds) - _UNREAD)
                chain.revive()
                await _lose(run, chain, senders, kind, database)
                run.struck[kind] += 1
                run.trials += 1
        await _reckon(run, chain, handler, database)
        if not run.without:
            await _rebuild(run, chain, database)
        await database.close()


async def _lose(
    run: Run, chain: Chain, senders: Senders, kind: str, database: asyncpg.Connection[asyncpg.Record]
) -> None:
    """Let one loss happen, of messages too that are published and that nobody has read yet."""
    readers = [chain.programs[name].pid for name in ("consumer", "agent", "reader")]
    for pid in readers:
        os.kill(pid, signal.SIGSTOP)
    try:
        await database.execute(_EMIT, MESH, _SPOILT, _SPOILT_A_FAULT)
        await senders.reached(len(senders.sent) + _UNREAD)
        await until_so(partial(_is_zero, database, _UNPUBLISHED, _SPOILT), PATIENCE)
        await _strike(run, chain, senders, kind)
    finally:
        for pid in readers:
            os.kill(pid, signal.SIGCONT)


async def _is_zero(database: asyncpg.Connection[asyncpg.Record], query: str, *parameters: object) -> bool:
    return not await database.fetchval(query, *parameters)


async def _strike(run: Run, chain: Chain, senders: Senders, kind: str) -> None:
    match kind.split():
        case ["deleted"]:
            chain.kill_nats(forget=True)
        case ["purged", stream]:
            await chain.purge(stream)
        case ["cut", _]:
            chain.end_nats()
            await asyncio.sleep(_CUT_SECONDS)
            chain.nats.start()
        case _:
            copy = run.place() / "copy"
            chain.kill_nats(copy=copy)
            await senders.reached(len(senders.sent) + _UNREAD)
            chain.kill_nats(restore=copy)


async def _reckon(
    run: Run, chain: Chain, handler: CountingHandler, database: asyncpg.Connection[asyncpg.Record]
) -> None:
    patience = _CONTROL_PATIENCE if run.without else PATIENCE
    try:
        await until_so(partial(_is_zero, database, _UNBURIED, _SPOILT), patience)
    except TimeoutError:
        unburied = await database.fetchval(_UNBURIED, _SPOILT)
        raise Missed(f"{unburied} messages that nobody could handle are in no dead letter") from None
    try:
        await everything_has_its_effect_once(chain, handler, chain.room.database_url, patience=patience)
    except AssertionError as error:
        raise Missed(str(error).splitlines()[0]) from error
    letters = await database.fetchval("SELECT count(*) FROM postroom.dead_letters")
    await _until_in_stream(chain, "DLQ", letters, patience)
    assert isinstance(handler.answer, Spoiling)
    again = handler.answer.again
    settled = await database.fetchval(_SETTLED_AGAIN, list(again), list(again.values()))
    run.check(not settled, f"{settled} messages came again that were settled")
    run.figures.append(f"{letters} letters")


async def _rebuild(run: Run, chain: Chain, database: asyncpg.Connection[asyncpg.Record]) -> None:
    """Let a worker alone fill an empty store again."""
    events = max(1, round(_REBUILT * run.scale))
    for name in ("consumer", "agent", "reader"):
        chain.programs[name].kill()
    await database.execute(_EMIT, MESH, _BULK, events)
    await until_so(partial(_is_zero, database, _UNPUBLISHED, _BULK), PATIENCE)
    chain.kill_nats(forget=True)
    began = time.monotonic()
    await _until_in_stream(chain, "EVENTS", events, 2 * _REBUILT_WITHIN)
    seconds = time.monotonic() - began
    run.figures.append(f"{events:,} rebuilt in {seconds:.0f} s")
    run.check(seconds <= _REBUILT_WITHIN, f"{events:,} events were rebuilt in {seconds:.0f} s")


async def _until_in_stream(chain: Chain, kind: str, count: int, patience: float) -> None:
    connection = await _connect(chain)
    held = 0

    async def there() -> bool:
        nonlocal held
        try:
            held = (await connection.jetstream().stream_info(f"{MESH.upper()}_{kind}")).state.messages
        except nats.errors.Error:  # it is not declared yet
            return False
        return held >= count

    try:
        await until_so(there, patience)
    except TimeoutError:
        raise Missed(f"the stream {kind} has {held:,} of {count:,} messages after {patience:.0f} s") from None
    finally:
        await connection.close()


@goal("F10", "poison among ten times as many good messages", alone=True)
async def poison(run: Run) -> None:
    """Mix in what nobody can handle: all of it is in the dead letters, and no good message waits long for it."""
    async with _chain(run, {"CONSUMER_MAX_DELIVER": 3}) as (chain, handler):
        assert isinstance(handler.answer, Spoiling)
        connection = await _connect(chain)
        database = await asyncpg.connect(chain.room.database_url)
        await _until_in_stream(chain, "EVENTS", 0, PATIENCE)
        junk = 0
        sent: dict[str, float] = {}
        async with AsyncClient(chain.room.socket, patience=PATIENCE) as client:
            for number in range(_ROUNDS):
                good = _share(run.size.load, number)
                bad = _share(run.size.trials, number)
                began = time.monotonic()
                names = {new_id(): None for _ in range(good)}
                sends = [SendRequest(to=TOPIC, body="good", client_message_id=name) for name in names]
                async with aclosing(client.send_many(sends)) as results:
                    async for each in results:
                        if each.result is None:
                            raise Missed(f"a good message was refused: {each.problem}")
                sent |= dict.fromkeys(names, began)
                kinds = [run.chance.choice(_POISON) for _ in range(bad)]
                for kind in set(kinds) - {_JUNK}:
                    await database.execute(_EMIT, MESH, kind, kinds.count(kind))
                for _ in range(kinds.count(_JUNK)):
                    junk += 1
                    headers = {"Nats-Msg-Id": f"junk-{junk}"}
                    await connection.jetstream().publish(f"{MESH}.event.junk.v1", b"{no json", headers=headers)
                for kind in kinds:
                    run.struck[kind] += 1
                run.trials += bad
                await asyncio.sleep(max(0.0, began + good / _RATE - time.monotonic()))
        await _all_buried(run, database)
        await _all_in_time(run, chain, handler.answer, sent)
        await database.close()
        await connection.close()


async def _all_buried(run: Run, database: asyncpg.Connection[asyncpg.Record]) -> None:
    missing = "SELECT greatest(0, $1 - count(*)) FROM postroom.dead_letters"
    with contextlib.suppress(TimeoutError):
        await until_so(partial(_is_zero, database, missing, run.trials), PATIENCE)
    letters = await database.fetchval("SELECT count(*) FROM postroom.dead_letters")
    run.check(letters == run.trials, f"{run.trials:,} poisonous messages became {letters:,} letters")


async def _all_in_time(run: Run, chain: Chain, handler: Spoiling, sent: dict[str, float]) -> None:
    database = await asyncpg.connect(chain.room.database_url)
    rows = await database.fetch("SELECT client_message_id, broker_message_id::text FROM mesh.message_history")
    await database.close()
    ids = {name: message_id for name, message_id in rows if name in sent}
    run.check(len(ids) == len(sent), f"{len(sent) - len(ids):,} good messages were not accepted")
    await at_rest(chain, lambda: handler.times.keys() >= set(ids.values()), "every good message handled", PATIENCE)
    slowest = max(handler.times[ids[name]] - began for name, began in sent.items())
    run.figures.append(f"{len(sent):,} good ones, the slowest after {slowest:.1f} s")
    run.check(slowest <= _GOOD_WITHIN, f"a good message was handled after {slowest:.1f} s")


def _share(total: int, number: int) -> int:
    """Return how many of a total fall into one round."""
    return total * (number + 1) // _ROUNDS - total * number // _ROUNDS


async def _connect(chain: Chain) -> Client:
    async def hush(_error: Exception) -> None:
        """Say nothing: NATS is expected to be gone now and then."""

    return await nats.connect(chain.nats.url, error_cb=hush)
