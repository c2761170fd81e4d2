"""What the demo plays on: how it looks, its own handler, and a stack with a consumer that calls it and an agent."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from aiohttp import web
from rich.box import ROUNDED
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from cli.output import line
from cli.stack import PageProgram, Stack
from cli.stack.layout import MESH
from postroom._wire.loop_thread import LoopThread
from postroom.chassis.exits import Exit, Fatal

POISON: Final = "not an order"  # a body that the handler cannot read until it is repaired
EXAMPLES: Final = Path(__file__).parents[2] / "examples"
CONSUMER: Final = "demo_handler"
WAIT_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.1
_WIDE: Final = 160  # columns, off a terminal


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` holds; raises `Fatal` where it does not come to that."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise Fatal(Exit.FAILED, f"gave up after waiting {WAIT_SECONDS:.0f} s {what}")
        time.sleep(_POLL_SECONDS)


class Stage:
    """Where the demo shows what it does."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._on_terminal = self._console.is_terminal
        self._acts = 0

    def act(self, title: str) -> None:
        """Begin the next part."""
        self._acts += 1
        if self._on_terminal:
            self._console.print()
            self._console.rule(Text(f"{self._acts}. {title}", style="bold cyan"), align="left", style="dim")
        else:
            line(f"\n{self._acts}. {title}", flush=True)

    def say(self, text: str, style: str = "") -> None:
        """Say one thing that happened."""
        if self._on_terminal:
            self._console.print(Text(f"   {text}", style=style))
        else:
            line(f"   {text}", flush=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        """Show how far something is; call what is yielded with the number done."""
        if not self._on_terminal:
            yield lambda _done: None
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=self._console, transient=True) as bar:
            task = bar.add_task(label, total=total)
            yield lambda done: bar.update(task, completed=done)

    def table(self, columns: Sequence[str], rows: Iterable[tuple[Sequence[str], bool]]) -> None:
        """Show the result: each row's cells, and whether it holds."""
        table = Table(*columns, header_style="bold", box=ROUNDED if self._on_terminal else None, pad_edge=False)
        for column in table.columns[2:]:
            column.justify = "right"
        for cells, holds in rows:
            table.add_row(*cells, Text("yes", style="bold green") if holds else Text("NO", style="bold red"))
        console = self._console if self._on_terminal else Console(width=_WIDE, no_color=True)
        console.print(table)


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
        app = web.Application()
        app.router.add_post("/handle", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        self._thread = LoopThread()

    def __enter__(self) -> Self:
        self._thread.run(self._serve)
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.run(self._runner.cleanup)
        self._thread.close()

    def repair(self) -> None:
        """Teach the handler to read what it could not."""
        self._reads_poison = True

    def effects_of(self, event_type: str) -> list[Effect]:
        """Return what the messages of one type did."""
        return [effect for effect in list(self.effects.values()) if effect.event_type == event_type]

    async def _serve(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/handle"

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
        self.programs.append(self.consumer)


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
