"""A publisher that kills itself: `python crashing_publisher.py DATABASE_URL NATS_URL CONTEXT EVENTS BATCH`.

Each line of standard input is a point: the call to die at (`Link.publish`), `before` or `after` it, and the how many-th
call it is. For each there is a fresh process (forked, since starting Python costs more than the test), which emits
EVENTS events and publishes, BATCH at once, until all are published or it is dead. The answer to each line is `killed`
or `drained`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from itertools import count
from random import Random
from typing import Any

import msgspec

from postroom.chassis.postgres import open_rooms
from postroom.delivery import ROOM
from postroom.delivery.nats import NatsClient
from postroom.delivery.publication.link import Link, Streams
from postroom.delivery.publication.postgres import PostgresClaim, sources_of
from postroom.delivery.publication.publisher import Publisher
from postroom.delivery.publication.record import Record
from postroom.delivery.settings import NatsSettings, PublisherSettings, RecordSettings

EMIT = (
    "SELECT count(postroom.emit($1, 'order', 'order-' || n % 3, 'order_placed', '{}')) "
    "FROM generate_series(1, $2::integer) AS n"
)
SETTINGS = PublisherSettings(ack_seconds=5, first_seconds=0.01, most_seconds=0.05)
CLASSES = {kind.__name__: kind for kind in (Link, NatsClient, PostgresClaim, Publisher, Record, Streams)}


def die_at(call: str, when: str, nth: int) -> None:
    kind, name = call.split(".")
    original = getattr(CLASSES[kind], name)
    calls = count(1)

    @functools.wraps(original)
    async def dying(*arguments: Any, **named: Any) -> Any:
        mine = next(calls) == nth
        if mine and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(*arguments, **named)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(CLASSES[kind], name, dying)


async def publish(database_url: str, nats_url: str, context: str, events_each: str, batch: str) -> None:
    pool = await open_rooms(database_url, ROOM, name="crashing-publisher", connections=3)
    await pool.execute(EMIT, context, int(events_each))
    events, *_ = await sources_of(pool)
    record = Record([events], RecordSettings())
    nats = NatsSettings(url=nats_url)
    settings = msgspec.structs.replace(SETTINGS, batch=int(batch))
    publisher = Publisher(events, settings, nats, name="crashing", opened=record.compare, rng=Random(1))
    while (await events.backlog()).count:
        if not await publisher.step():
            await asyncio.sleep(0.002)
    await publisher.stop()
    await pool.close()


def main() -> None:
    for line in sys.stdin:
        call, when, nth = line.split()
        child = os.fork()
        if not child:
            die_at(call, when, int(nth))
            asyncio.run(publish(*sys.argv[1:]))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        sys.stdout.write("killed\n" if os.WIFSIGNALED(status) else f"drained {status}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
