"""What the demo does, act by act: events, a broker that stops, a daemon that is killed, a message that dies."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

import cli
from chassis.exits import Exit, Fatal
from cli.demo.reckoning import Line, Told, reckon
from cli.demo.stage import Stage
from cli.stack import Stack
from embedded import EmbeddedServer
from postroom import Client, PostroomError
from postroom.message import SendRequest
from postroom.sends import BatchResult

EVENTS: Final = Path(cli.__file__).parents[1] / "examples" / "events.ndjson"
TYPO: Final = "topic:ordres"
_SENT_AGAIN: Final = 500  # events
_PATIENCE: Final = 60.0  # seconds that a client keeps trying while a process is away
_DRAIN_SECONDS: Final = 300.0
_POLL_SECONDS: Final = 0.1


class Demo:
    """One run on a stack of its own; `run` says whether every number holds."""

    def __init__(self, stack: Stack, stage: Stage) -> None:
        self._stack = stack
        self._stage = stage
        self._told = Told()
        self._events = read_events(EVENTS)

    def run(self) -> bool:
        """Do everything, in order; raises `Fatal` where a process ended that should not have."""
        try:
            return self._acts()
        except PostroomError as error:
            for program in self._stack.programs:
                if program.process is None:
                    raise Fatal(Exit.FAILED, f"{program.failure()}") from error
            raise

    def _acts(self) -> bool:
        third = len(self._events) // 3
        self._start()
        self._stop_the_broker(self._events[:third])
        self._kill_the_daemon(self._events[third : 2 * third])
        self._send_the_rest(self._events[2 * third :])
        self._misaddress_one()
        self._send_again(self._events[:_SENT_AGAIN])
        return self._count()

    def _start(self) -> None:
        self._stage.act("Start Postgres, Redis, NATS, a broker and a daemon")
        self._stack.start(self._say_ready)

    def _say_ready(self, program: EmbeddedServer) -> None:
        process = program.process
        self._stage.say(f"{program.name:<9} ready, pid {process.pid if process else '-'}")

    def _stop_the_broker(self, events: Sequence[SendRequest]) -> None:
        self._stage.act(f"Send {len(events):,} events, and stop the broker in the middle")
        self._send(events, "sending", self._stop_while_it_works)
        with self._client() as client:
            rows = client.health().rows
        self._stage.say(f"every event was acknowledged; {rows['pending'] + rows['inflight']:,} wait on disk", "yellow")
        self._stack.broker.start()
        self._stage.say("the broker is back")

    def _stop_while_it_works(self, go_on: Callable[[], None]) -> None:
        with self._client() as client:
            self._wait(lambda: client.health().rows["done"] > 0, "for the broker to accept the first event")
        self._stack.broker.stop()
        go_on()

    def _kill_the_daemon(self, events: Sequence[SendRequest]) -> None:
        self._stage.act(f"Send {len(events):,} more, and kill the daemon with -9 in the middle")
        repeated = self._send(events, "sending", self._kill_and_start)
        self._stage.say(
            f"the client carried on by itself; {repeated:,} events whose answer was lost went twice, under one id"
        )

    def _kill_and_start(self, go_on: Callable[[], None]) -> None:
        go_on()
        process = self._stack.daemon.process
        if process is not None:
            process.end((signal.SIGKILL, _PATIENCE))
        self._stack.daemon.start()

    def _send_the_rest(self, events: Sequence[SendRequest]) -> None:
        self._stage.act(f"Send the last {len(events):,}, and let everything arrive")
        self._send(events, "sending", lambda go_on: go_on())
        self._drain()

    def _misaddress_one(self) -> None:
        self._stage.act(f"Send one to {TYPO}, see it die, and repair it")
        with self._client() as client:
            identity = client.send(TYPO, "a misspelt destination").client_message_id
            self._told.sent.append(identity)
            row = client.wait(identity, _DRAIN_SECONDS)
            self._stage.say(f"{row.status}: {row.last_error}", "red")
            if row.status != "dead":
                raise Fatal(Exit.FAILED, f"a message to {TYPO} should be dead, but is {row.status}")
            self._told.dead.append(identity)
            patched = SendRequest(to="topic:orders", body="a destination put right")
            successor = client.requeue(row.id, reason="the destination was misspelt", message=patched)
            self._told.requeued.append(successor.client_message_id)
            row = client.wait(successor.client_message_id, _DRAIN_SECONDS)
            self._stage.say(f"requeued to {row.destination} under the fresh id {row.client_message_id}: {row.status}")

    def _send_again(self, events: Sequence[SendRequest]) -> None:
        self._stage.act(f"Send the first {len(events):,} events again")
        with self._client() as client:
            for result in client.send_many(events):
                identity = _acknowledged(result)
                self._told.sent_again.append(identity)
                self._told.duplicates += bool(result.result and result.result.duplicate)
        self._stage.say(f"{self._told.duplicates:,} of {len(events):,} were known already")
        self._drain()

    def _count(self) -> bool:
        self._stage.act("Stop the daemon, and count in SQLite and in Postgres")
        self._stack.daemon.stop()
        lines = reckon(
            self._told, self._stack.layout.outbox_file, self._stack.postgres.url, events=len(self._events) + 1
        )
        self._stage.table(("what", "means", "told", "SQLite", "Postgres", "holds"), map(_cells, lines))
        if holds := all(line.holds for line in lines):
            self._stage.say("Nothing was lost, and nothing is there twice.", "bold green")
        return holds

    def _send(self, events: Sequence[SendRequest], label: str, halfway: Callable[[Callable[[], None]], None]) -> int:
        """Send `events`; `halfway`, called when half are answered, lets the rest go. Return how many went twice."""
        gate = threading.Event()
        half = len(events) // 2
        repeated = 0
        with self._client() as client, self._stage.progress(label, len(events)) as show:
            for number, result in enumerate(client.send_many(_gated(events, half, gate)), 1):
                self._told.sent.append(_acknowledged(result))
                repeated += bool(result.result and result.result.duplicate)
                show(number)
                if number == half:
                    halfway(gate.set)
        self._stage.say(f"{len(events):,} events acknowledged", "green")
        return repeated

    def _drain(self) -> None:
        """Wait until the broker has everything."""
        with self._client() as client, self._stage.progress("arriving", len(self._events)) as show:

            def arrived() -> bool:
                waiting = _waiting(client.health().rows)
                show(len(self._events) - waiting)
                return waiting == 0

            self._wait(arrived, "for every event to arrive")
        self._stage.say("nothing waits any more: the broker has all of it", "green")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                raise Fatal(Exit.FAILED, f"waited {_DRAIN_SECONDS:.0f} s {what}, in vain")
            time.sleep(_POLL_SECONDS)

    def _client(self) -> Client:
        return Client(self._stack.layout.socket, patience=_PATIENCE)


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


def _waiting(rows: dict[str, int]) -> int:
    return rows["pending"] + rows["inflight"]


def _cells(line: Line) -> tuple[tuple[str, ...], bool]:
    return (line.name, line.meaning, str(line.told), str(line.outbox), str(line.broker)), line.holds
