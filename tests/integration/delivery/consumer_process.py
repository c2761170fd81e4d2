"""A consumer in a process of its own that kills itself, `kill -9`, at one named point of handling one message.

    python consumer_process.py URL CONTEXT POINT VICTIM EFFECTS

It handles every message by appending its id to the file EFFECTS, once per id (the file is its memory); the message
VICTIM and every tenth are poison. At POINT of the VICTIM it dies: before or after `handle`, `letter` or `ack`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

from support.jetstream import DURABLE, QUICK

from postroom._wire.dead_letters import DeadLetter
from postroom.claims import DONE, Dead, Outcome
from postroom.delivery.consumer import Consumer, Settle
from postroom.delivery.dead_letters import StreamLetters
from postroom.delivery.message import Delivery
from postroom.delivery.nats import connect
from postroom.delivery.settings import ConsumerSettings, NatsSettings
from postroom.delivery.streams import stream_name


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Effects:
    """A handler whose effect is a line in a file; a poison message has none."""

    def __init__(self, file: Path, point: str, victim: str) -> None:
        self._file = file
        self._point = point
        self._victim = victim

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        for delivery in batch:
            await self._one(delivery, settle)

    async def _one(self, delivery: Delivery, settle: Settle) -> None:
        first = delivery.message_id == self._victim and delivery.attempt == 1
        if first and self._point == "before handle":
            die()
        outcome = self._effect(delivery)
        if first and self._point == "after handle":
            die()
        await settle(delivery, outcome)

    def _effect(self, delivery: Delivery) -> Outcome:
        message_id = delivery.message_id or ""
        if int(message_id) % 10 == 0:
            return Dead("unprocessable", "it ends in a nought")
        with self._file.open("a+") as file:
            file.seek(0)
            if message_id not in file.read().split():
                file.write(f"{message_id}\n")
        return DONE


async def main(url: str, context: str, point: str, victim: str, effects: str) -> None:
    connection = await connect(NatsSettings(url=url), name="victim")
    js = connection.jetstream()
    settings = ConsumerSettings(
        stream=stream_name(context, "events"), durable=DURABLE, ack_wait_seconds=0.5, batch=5, backoff=QUICK
    )
    letters = StreamLetters(js, context)
    consumer = Consumer(js, settings, Effects(Path(effects), point, victim), letters, rng=Random(1))
    keep, answer = letters.keep, consumer._answer

    async def keep_and_die(letter: DeadLetter) -> None:
        first = letter.message_id == victim and letter.attempts == 1
        if first and point == "before letter":
            die()
        await keep(letter)
        if first and point == "after letter":
            die()

    async def answer_and_die(held, text: bytes) -> bool:
        first = held.delivery.message_id == victim and held.delivery.attempt == 1
        if first and point == "before ack":
            die()
        sent = await answer(held, text)
        if first and point == "after ack":
            await connection.flush()
            die()
        return sent

    letters.keep = keep_and_die  # type: ignore[method-assign]
    consumer._answer = answer_and_die  # type: ignore[method-assign]
    await consumer.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
