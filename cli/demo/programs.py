"""What the demo adds to a stack: a consumer that calls the demo's own handler, and an agent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import cli
from cli.demo.receiver import Receiver
from cli.stack import Stack
from cli.stack.commands import module_command
from cli.stack.layout import MESH
from cli.stack.programs import PageProgram
from embedded import EmbeddedServer

EXAMPLES: Final = Path(cli.__file__).parents[1] / "examples"
CONSUMER: Final = "demo_handler"


class DemoStack(Stack):
    """A stack with a consumer and an agent."""

    def __init__(self, state: Path, receiver: Receiver) -> None:
        super().__init__(state)
        self.consumer = ConsumerProgram(self, receiver)
        self.agent = AgentProgram(self)

    @property
    def programs(self) -> tuple[EmbeddedServer, ...]:
        """Every process, each after those that it needs."""
        return (*super().programs, self.consumer, self.agent)


class ConsumerProgram(PageProgram):
    """The consumer of every event of the mesh."""

    name = "consumer"

    def __init__(self, stack: Stack, receiver: Receiver) -> None:
        super().__init__(stack.layout, stack.layout.state / "consumer")
        self._stack = stack
        self._receiver = receiver

    def _command(self) -> list[str]:
        return module_command("cli", "consumer", "run", "--config", self.config_file)

    def _settings(self) -> Mapping[str, Any]:
        return {
            "context": MESH,
            "database_url": self._stack.postgres.url,
            "listen_port": self._port(),
            "nats": {"url": self._stack.nats.url},
            "consumer": {"stream": f"{MESH.upper()}_EVENTS", "durable": CONSUMER},
            "handler": {"url": self._receiver.url},
        }


class AgentProgram(PageProgram):
    """The agent of `examples/counting_agent.py`, which answers every command with an event."""

    name = "agent"

    def __init__(self, stack: Stack) -> None:
        super().__init__(stack.layout, stack.layout.state / "agent")
        self._stack = stack

    def _command(self) -> list[str]:
        words = module_command("cli", "agent", "run", "counting_agent:Counter", "--config", self.config_file)
        return ["/usr/bin/env", f"PYTHONPATH={EXAMPLES}", *words]

    def _settings(self) -> Mapping[str, Any]:
        return {
            "tenant": MESH,
            "state_directory": str(self.directory),
            "listen_port": self._port(),
            "nats": {"url": self._stack.nats.url},
        }
