"""Runs the counting agent, each time in a process of its own that kills itself at a named point.

One process imports everything, then forks: a line of JSON on its input is one run, a line on its output how it ended.
The points are those of the runtime's own collaborators; nothing in the runtime knows of them.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from postroom.agent import Emit, Envelope, fill_subjects
from postroom.chassis import logs
from postroom.claims import Outcome
from postroom.delivery.agents.outgoing import into_jetstream
from postroom.delivery.agents.runtime import AgentRuntime, open_consumers
from postroom.delivery.consumer import Consumer, Settle
from postroom.delivery.message import Delivery
from postroom.delivery.nats import NatsClient, connect
from postroom.delivery.publication.link import _Batch
from postroom.delivery.settings import AgentSettings, ConsumerSettings, NatsSettings
from support.agents import ATTEMPTS, Counting, settled
from support.jetstream import QUICK, Context

ACK_WAIT = 0.3  # seconds
SETTINGS = AgentSettings(group_messages=3, retry_seconds=0.05)


class Deadly(Counting):
    """Ends its process in `receive`, where the order says how."""

    async def receive(self, envelope: Envelope) -> list[Emit]:
        match envelope.payload.get("deadly"):
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)  # `sys.exit` is an error like any other
        return await super().receive(envelope)


class Crash:
    """Kills the process before or after call number `call` of `point`; never where `point` is "none"."""

    def __init__(self, point: str, call: int) -> None:
        self._when, _, self._point = point.partition(" ")
        self._left = call

    def wrap(self, point: str, work: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def wrapped(*arguments: Any, **named: Any) -> Any:
            self.now("before", point)
            result = await work(*arguments, **named)
            self.now("after", point)
            return result

        return wrapped

    def now(self, when: str, point: str) -> None:
        if (when, point) == (self._when, self._point):
            self._left -= 1
            if not self._left:
                os.kill(os.getpid(), signal.SIGKILL)


class Handler:
    """The runtime, whose settling crashes; an ack has left the process before "after" it."""

    def __init__(self, runtime: AgentRuntime, crash: Crash, flush: Callable[[], Awaitable[None]]) -> None:
        self._runtime = runtime
        self._crash = crash
        self._flush = flush

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        async def acked(delivery: Delivery, outcome: Outcome) -> None:
            await settle(delivery, outcome)
            await self._flush()

        await self._runtime.handle(batch, self._crash.wrap("ack", acked))


def crash_publishes(crash: Crash) -> None:
    """Crash before a message leaves, or once JetStream has acknowledged it."""
    send, answer = NatsClient.publish, _Batch.answer

    async def publish(client: NatsClient, subject: str, *arguments: Any, **named: Any) -> None:
        if not subject.startswith("$"):
            crash.now("before", "publish")
        await send(client, subject, *arguments, **named)

    def acknowledged(batch: _Batch, *arguments: Any) -> None:
        answer(batch, *arguments)
        crash.now("after", "publish")

    NatsClient.publish = publish  # type: ignore[method-assign,assignment]
    _Batch.answer = acknowledged  # type: ignore[method-assign]


async def run(order: dict[str, Any]) -> None:
    settings = NatsSettings(url=order["url"])
    nats = await connect(settings, name="crashing agent", patience=20)
    js = nats.jetstream()
    crash = Crash(order["point"], order["call"])
    crash_publishes(crash)
    runtime = await AgentRuntime.open(
        Deadly,
        into_jetstream(js, settings, SETTINGS),
        Path(order["directory"]),
        tenant=order["context"],
        workspace="default",
        settings=SETTINGS,
        attempts=ATTEMPTS,
    )
    store: Any = runtime._store
    store.append = crash.wrap("commit", store.append)
    store.mark_published = crash.wrap("mark", store.mark_published)
    store.keep_letter = crash.wrap("keep", store.keep_letter)
    wanted = ConsumerSettings(stream="any", durable="counting_consumer", ack_wait_seconds=ACK_WAIT, backoff=QUICK)
    subjects = fill_subjects(Deadly, order["context"], "default")
    consumers = await open_consumers(js, runtime, subjects, wanted)
    for consumer in consumers:
        consumer._handler = Handler(runtime, crash, nats.flush)
    tasks = [asyncio.create_task(runtime.run()), *(asyncio.create_task(consumer.run()) for consumer in consumers)]
    if order["point"] != "none":
        await asyncio.gather(*tasks)
    await settled(Context(nats, order["context"]))
    await stop(consumers, tasks)
    await runtime.close()
    await nats.close()


async def stop(consumers: Sequence[Consumer], tasks: Sequence[asyncio.Task[None]]) -> None:
    for consumer in consumers:
        await consumer.stop()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def main() -> None:
    logs.configure("error")  # to the standard error: answers go to the output
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            asyncio.run(run(json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)  # noqa: T201 - the answer


if __name__ == "__main__":
    main()
