"""What the demo adds to a stack: a consumer that calls the demo's own handler, and an agent."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from aiohttp import web

from cli.stack import PageProgram, Stack
from cli.stack.layout import MESH
from embedded import EmbeddedServer

POISON: Final = "not an order"  # a body that the handler cannot read until it is repaired
EXAMPLES: Final = Path(__file__).parents[2] / "examples"
CONSUMER: Final = "demo_handler"


class Effect(NamedTuple):
    """What one message did."""

    event_type: str
    client_message_id: str | None


class Receiver:
    """A handler on a port of loopback, served by a thread for as long as the block runs."""

    def __init__(self) -> None:
        self.url = ""
        self.effects: dict[str, Effect] = {}  # by Idempotency-Key
        self.repeated = 0  # calls for a message that was handled before
        self._reads_poison = False
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="handler", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def repair(self) -> None:
        """Teach the handler to read what it could not."""
        self._reads_poison = True

    def effects_of(self, event_type: str) -> list[Effect]:
        """Return what the messages of one type did."""
        return [effect for effect in list(self.effects.values()) if effect.event_type == event_type]

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        app = web.Application()
        app.router.add_post("/handle", self._handle)
        runner = web.AppRunner(app, access_log=None)
        self._loop.run_until_complete(runner.setup())
        self._loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/handle"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())
        self._loop.close()

    async def _handle(self, request: web.Request) -> web.Response:
        key = request.headers["Idempotency-Key"]
        if key in self.effects:
            self.repeated += 1
            return web.Response(status=409)
        call: dict[str, Any] = await request.json()
        payload = call["payload"]
        if payload.get("message", {}).get("body") == POISON and not self._reads_poison:
            return web.Response(status=422, text="this is not an order")
        self.effects[key] = Effect(call["event_type"], payload.get("client_message_id"))
        return web.Response(status=200)


class HandledStack(Stack):
    """A stack with a consumer, which calls the receiver."""

    def __init__(self, state: Path, receiver: Receiver) -> None:
        super().__init__(state)
        self.consumer = ConsumerProgram(self, receiver)

    @property
    def programs(self) -> tuple[EmbeddedServer, ...]:
        """Every process, each after those that it needs."""
        return (*super().programs, self.consumer)


class DemoStack(HandledStack):
    """The same with an agent."""

    def __init__(self, state: Path, receiver: Receiver) -> None:
        super().__init__(state, receiver)
        self.agent = AgentProgram(self)

    @property
    def programs(self) -> tuple[EmbeddedServer, ...]:
        """Every process, each after those that it needs."""
        return (*super().programs, self.agent)


class ConsumerProgram(PageProgram):
    """The consumer of every event of the mesh."""

    name = "consumer"
    module = "postroom.worker"
    arguments = ("consumer",)

    def __init__(self, stack: Stack, receiver: Receiver) -> None:
        super().__init__(stack)
        self._receiver = receiver

    def _settings(self) -> Mapping[str, Any]:
        return {
            "context": MESH,
            "database_url": self.stack.postgres.url,
            "listen_port": self._port(),
            "nats": {"url": self.stack.nats.url},
            "consumer": {"stream": f"{MESH.upper()}_EVENTS", "durable": CONSUMER},
            "handler": {"url": self._receiver.url},
        }


class AgentProgram(PageProgram):
    """The agent of `examples/counting_agent.py`, which answers every command with an event."""

    name = "agent"

    def _command(self) -> list[str]:
        words = ["agent", "counting_agent:Counter", "--config", str(self.config_file)]
        return ["/usr/bin/env", f"PYTHONPATH={EXAMPLES}", sys.executable, "-P", "-m", "postroom.worker", *words]

    def _settings(self) -> Mapping[str, Any]:
        return {
            "tenant": MESH,
            "state_directory": str(self.directory),
            "listen_port": self._port(),
            "nats": {"url": self.stack.nats.url},
        }
