"""An operator's replay of all letters in a process that kills itself, `kill -9`, before one of its statements.

    python replay_process.py NATS POSTGRES CONTEXT NUMBER

Where it has fewer than NUMBER statements it lives on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
from typing import Any

import asyncpg

from postroom._wire.dead_letters import LetterFilter
from postroom.delivery.dead_letters.operations import TOGETHER, LetterOperations
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

_left = itertools.count(-int(sys.argv[4]) + 1)
_replaying = False


def _die() -> None:
    if _replaying and next(_left) == 0:
        os.kill(os.getpid(), signal.SIGKILL)


class Mortal(asyncpg.Connection):
    """A connection, and the end of its process."""

    async def execute(self, *words: Any, **options: Any) -> str:
        _die()
        return await super().execute(*words, **options)

    async def fetch(self, *words: Any, **options: Any) -> list[asyncpg.Record]:
        _die()
        return await super().fetch(*words, **options)


async def main(nats: str, postgres: str, context: str) -> None:
    global _replaying  # noqa: PLW0603 - what comes before is no part of it
    client = await connect(NatsSettings(url=nats), name="test", patience=20)
    connection = await asyncpg.connect(postgres, connection_class=Mortal)
    letters = LetterOperations(connection, client.jetstream(), context, actor="ann")
    found = await letters.find(LetterFilter())
    _replaying = True
    for begin in range(0, len(found), TOGETHER):
        await letters.settle("replay", found[begin : begin + TOGETHER], why="a test")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4]))
