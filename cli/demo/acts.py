"""What the demo does, act by act: events, a broker that stops, a daemon that is killed, a message that dies."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cli.demo.deliveries import COMMANDS, QUEUE, Delivering
from cli.demo.programs import EXAMPLES, DemoStack, Receiver
from cli.demo.reckoning import TOPIC, Handled, Line, Meant, reckon
from cli.demo.stage import PATIENCE, WAIT_SECONDS, Scene, Stage
from cli.stack.layout import MESH
from embedded import EmbeddedServer
from postroom import PostroomError
from postroom._wire.message import SendRequest
from postroom._wire.sends import BatchResult
from postroom.chassis.exits import Exit, Fatal

EVENTS: Final = EXAMPLES / "events.ndjson"
TYPO: Final = "topic:ordres"
_SENT_AGAIN: Final = 500  # events


class Demo(Scene):
    """One run on a stack of its own; `run` says whether every number holds."""

    def __init__(self, stack: DemoStack, stage: Stage, receiver: Receiver) -> None:
        super().__init__(stack, stage, receiver)
        self._events = read_events(EVENTS)

    def run(self) -> bool:
        """Do everything, in order; raises `Fatal` where a process ended that should not have."""
        try:
            return self._acts()
        except PostroomError as error:
            for program in self.stack.programs:
                if program.process is None:
                    raise Fatal(Exit.FAILED, f"{program.failure()}") from error
            raise

    def _acts(self) -> bool:
        third = len(self._events) // 3
        self.stage.act("Start Postgres, Redis, NATS, a broker, a worker, a daemon, a consumer and an agent")
        self.stack.start(self._say_ready)
        asyncio.run(self._create_queue())
        self._stop_the_broker(self._events[:third])
        self._kill_the_daemon(self._events[third : 2 * third])
        self._send_the_rest(self._events[2 * third :])
        self._misaddress_one()
        self._send_again(self._events[:_SENT_AGAIN])
        delivering = Delivering(self)
        to_topic = sum(event.to == f"topic:{TOPIC}" for event in self._events) + len(self.told.requeued)
        delivering.handle_everything(to_topic)
        delivering.ask_the_agent()
        delivering.bury_and_replay()
        meant = Meant(sends=len(self._events) + 1 + COMMANDS + 1, to_topic=to_topic + 1)
        return self._count(delivering.handled(), meant)

    async def _create_queue(self) -> None:
        async with self.stack.broker.client() as broker:
            await broker.create_queue(MESH, QUEUE)

    def _say_ready(self, program: EmbeddedServer) -> None:
        process = program.process
        self.stage.say(f"{program.name:<9} ready, pid {process.pid if process else '-'}")

    def _stop_the_broker(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send {len(events):,} events, and stop the broker in the middle")
        self._send(events, "sending", self._stop_while_it_works)
        with self.client() as client:
            rows = client.health().rows
        self.stage.say(f"every event was acknowledged; {rows['pending'] + rows['inflight']:,} wait on disk", "yellow")
        self.stack.broker.start()
        self.stage.say("the broker is back")

    def _stop_while_it_works(self, go_on: Callable[[], None]) -> None:
        with self.client() as client:
            self.wait(lambda: client.health().rows["done"] > 0, "for the broker to accept the first event")
        self.stack.broker.stop()
        go_on()

    def _kill_the_daemon(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send {len(events):,} more, and kill the daemon with -9 in the middle")
        repeated = self._send(events, "sending", self._kill_and_start)
        self.stage.say(
            f"the client carried on by itself; {repeated:,} events whose answer was lost were sent twice, under one id"
        )

    def _kill_and_start(self, go_on: Callable[[], None]) -> None:
        go_on()
        process = self.stack.daemon.process
        if process is not None:
            process.end((signal.SIGKILL, PATIENCE))
        self.stack.daemon.start()

    def _send_the_rest(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send the last {len(events):,}, and let everything arrive")
        self._send(events, "sending", lambda go_on: go_on())
        self._drain()

    def _misaddress_one(self) -> None:
        self.stage.act(f"Send one to {TYPO}, see it become a dead row, and repair it")
        with self.client() as client:
            identity = client.send(TYPO, "a misspelt destination").client_message_id
            self.told.sent.append(identity)
            row = client.wait(identity, WAIT_SECONDS)
            self.stage.say(f"{row.status}: {row.last_error}", "red")
            if row.status != "dead":
                raise Fatal(Exit.FAILED, f"a message to {TYPO} should be dead, but is {row.status}")
            self.told.dead.append(identity)
            patched = SendRequest(to="topic:orders", body="a corrected destination")
            successor = client.act("requeue", row.id, reason="the destination was misspelt", message=patched)
            self.told.requeued.append(successor.client_message_id)
            row = client.wait(successor.client_message_id, WAIT_SECONDS)
            self.stage.say(f"requeued to {row.destination} under the fresh id {row.client_message_id}: {row.status}")

    def _send_again(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send the first {len(events):,} events again")
        with self.client() as client:
            for result in client.send_many(events):
                identity = _acknowledged(result)
                self.told.sent_again.append(identity)
                self.told.duplicates += bool(result.result and result.result.duplicate)
        self.stage.say(f"{self.told.duplicates:,} of {len(events):,} were duplicates")
        self._drain()

    def _count(self, handled: Handled, meant: Meant) -> bool:
        self.stage.act("Stop the daemon, and count in SQLite and in Postgres")
        self.stack.daemon.stop()
        lines = reckon(self.told, handled, self.stack.layout.outbox_file, self.stack.postgres.url, meant)
        self.stage.table(("what", "means", "told", "SQLite", "Postgres", "holds"), map(_cells, lines))
        if holds := all(line.holds for line in lines):
            self.stage.say("Nothing was lost, and nothing is there twice.", "bold green")
        return holds

    def _send(self, events: Sequence[SendRequest], label: str, halfway: Callable[[Callable[[], None]], None]) -> int:
        """Send `events`; `halfway`, called when half are answered, lets the rest go. Return how many went twice."""
        gate = threading.Event()
        half = len(events) // 2
        repeated = 0
        with self.client() as client, self.stage.progress(label, len(events)) as show:
            for number, result in enumerate(client.send_many(_gated(events, half, gate)), 1):
                self.told.sent.append(_acknowledged(result))
                repeated += bool(result.result and result.result.duplicate)
                show(number)
                if number == half:
                    halfway(gate.set)
        self.stage.say(f"{len(events):,} events acknowledged", "green")
        return repeated

    def _drain(self) -> None:
        """Wait until the broker has everything."""
        with self.client() as client, self.stage.progress("arriving", len(self._events)) as show:

            def arrived() -> bool:
                rows = client.health().rows
                waiting = rows["pending"] + rows["inflight"]
                show(len(self._events) - waiting)
                return waiting == 0

            self.wait(arrived, "for every event to arrive")
        self.stage.say("nothing is waiting: the broker has everything", "green")


def read_events(file: Path) -> list[SendRequest]:
    """Read the events, each with an id of its own; raises `Fatal` where the file is not there."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise Fatal(Exit.FAILED, f"the demo sends {file}, which comes with the source: {error.strerror}") from error
    return [msgspec.json.decode(line, type=SendRequest) for line in lines]


def _gated(events: Sequence[SendRequest], half: int, gate: threading.Event) -> Iterator[SendRequest]:
    """Yield the second half only once the gate is open, so that what comes halfway really does."""
    yield from events[:half]
    gate.wait()
    yield from events[half:]


def _acknowledged(result: BatchResult) -> str:
    """Return the id that the daemon keeps now; raises `Fatal` where it refused the message."""
    if result.result is None:
        said = result.problem.detail if result.problem is not None else "nothing"
        raise Fatal(Exit.FAILED, f"the daemon refused event {result.line}: {said}")
    return result.result.client_message_id


def _cells(line: Line) -> tuple[tuple[str, ...], bool]:
    return (line.name, line.meaning, str(line.told), str(line.outbox), str(line.broker)), line.holds
