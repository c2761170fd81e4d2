"""What the demo does, act by act: events, a broker that stops, a daemon that is killed, a message that dies.

Then the receiving side: a handler, an agent that answers, a message that the handler cannot read.
"""

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Final, TypeVar

import msgspec

from cli.demo.counts import ANSWER, TOPIC, Broker, Outbox, Reported, compare
from cli.demo.stage import CONSUMER, EXAMPLES, POISON, WAIT_SECONDS, AgentProgram, HandledStack, Receiver, Stage, wait
from cli.stack.layout import MESH
from postroom import BrokerClient, Client, PostroomError
from postroom._wire.dead_letters import DEAD_LETTERS, Letter, LetterFilter, LettersQuery
from postroom._wire.message import SendRequest
from postroom._wire.sends import BatchResult
from postroom.chassis.exits import Exit, Fatal

T = TypeVar("T")

EVENTS: Final = EXAMPLES / "events.ndjson"
TYPO: Final = "topic:ordres"
QUEUE: Final = "counter"  # whose commands the agent takes
COMMANDS: Final = 3
PATIENCE: Final = 60.0  # seconds that a client keeps trying while a process is down
_SENT_AGAIN: Final = 500  # events


class Demo:
    """One run on a stack of its own, with an agent; `run` returns whether every number holds."""

    def __init__(self, stack: HandledStack, stage: Stage, receiver: Receiver) -> None:
        stack.programs.append(AgentProgram(stack))
        self.stack = stack
        self.stage = stage
        self.receiver = receiver
        self.reported = Reported()
        self._events = [msgspec.json.decode(line, type=SendRequest) for line in EVENTS.read_bytes().splitlines()]

    def client(self) -> Client:
        """Return a client that survives a restart of the daemon."""
        return Client(self.stack.layout.socket, patience=PATIENCE)

    def run(self) -> bool:
        """Do everything, in order; raises `Fatal` if a process ended that should not have."""
        try:
            self.stage.act("Start Postgres, Redis, NATS, a broker, a worker, a daemon, a consumer and an agent")
            self.stack.start(self.stage.say)
            self._ask(lambda broker: broker.create_queue(MESH, QUEUE))
            third = len(self._events) // 3
            self._stop_the_broker(self._events[:third])
            self._kill_the_daemon(self._events[third : 2 * third])
            rest = self._events[2 * third :]
            self.stage.act(f"Send the last {len(rest):,}, and let everything arrive")
            self._send(rest, lambda go_on: go_on())
            self._drain()
            self._misaddress_one()
            self._send_again(self._events[:_SENT_AGAIN])
            to_topic = sum(event.to == f"topic:{TOPIC}" for event in self._events) + len(self.reported.requeued)
            self._handle_everything(to_topic)
            self._ask_the_agent()
            self._bury_and_replay()
            return self._count(to_topic + 1)
        except PostroomError as error:
            for program in self.stack.programs:
                if program.process is None:
                    raise Fatal(Exit.FAILED, f"{program.failure()}") from error
            raise

    def _stop_the_broker(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send {len(events):,} events, and stop the broker in the middle")

        def stop(go_on: Callable[[], None]) -> None:
            with self.client() as client:
                wait(lambda: client.health().rows["done"] > 0, "for the broker to accept the first event")
            self.stack.broker.stop()
            go_on()

        self._send(events, stop)
        with self.client() as client:
            rows = client.health().rows
        self.stage.say(f"every event was acknowledged; {rows['pending'] + rows['inflight']:,} wait on disk", "yellow")
        self.stack.broker.start()
        self.stage.say("the broker is back")

    def _kill_the_daemon(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send {len(events):,} more, and kill the daemon with -9 in the middle")

        def kill(go_on: Callable[[], None]) -> None:
            go_on()
            process = self.stack.daemon.process
            if process is not None:
                process.end((signal.SIGKILL, PATIENCE))
            self.stack.daemon.start()

        repeated = self._send(events, kill)
        self.stage.say(
            f"the client carried on by itself; {repeated:,} events whose answer was lost were sent twice, under one id"
        )

    def _misaddress_one(self) -> None:
        self.stage.act(f"Send one to {TYPO}, see it become a dead row, and repair it")
        with self.client() as client:
            identity = client.send(TYPO, "a misspelt destination").client_message_id
            self.reported.sent.append(identity)
            row = client.wait(identity, WAIT_SECONDS)
            self.stage.say(f"{row.status}: {row.last_error}", "red")
            if row.status != "dead":
                raise Fatal(Exit.FAILED, f"a message to {TYPO} should be dead, but is {row.status}")
            self.reported.dead.append(identity)
            patched = SendRequest(to="topic:orders", body="a corrected destination")
            successor = client.act("requeue", row.id, reason="the destination was misspelt", message=patched)
            self.reported.requeued.append(successor.client_message_id)
            row = client.wait(successor.client_message_id, WAIT_SECONDS)
            self.stage.say(f"requeued to {row.destination} under the fresh id {row.client_message_id}: {row.status}")

    def _send_again(self, events: Sequence[SendRequest]) -> None:
        self.stage.act(f"Send the first {len(events):,} events again")
        with self.client() as client:
            for result in client.send_many(events):
                self.reported.sent_again.append(_acknowledged(result))
                self.reported.duplicates += bool(result.result and result.result.duplicate)
        self.stage.say(f"{self.reported.duplicates:,} of {len(events):,} were duplicates")
        self._drain()

    def _handle_everything(self, events: int) -> None:
        self.stage.act("Meanwhile a consumer posted every accepted event to a handler")
        with self.stage.progress("handled", events) as show:

            def handled() -> bool:
                done = len(self.receiver.effects_of(TOPIC))
                show(done)
                return done >= events

            wait(handled, "for the handler to get every event")
        again = f"{self.receiver.repeated:,} came twice and were handled once"
        self.stage.say(f"{len(self.receiver.effects):,} events handled; {again}", "green")

    def _ask_the_agent(self) -> None:
        self.stage.act(f"Send {COMMANDS} commands to an agent, which answers each with an event")
        with self.client() as client:
            for number in range(COMMANDS):
                sent = client.send(f"queue:{QUEUE}", f"count this, {number}")
                self.reported.sent.append(sent.client_message_id)
                self.reported.commands.append(sent.client_message_id)
        wait(lambda: len(self.receiver.effects_of(ANSWER)) >= COMMANDS, "for the agent's answers")
        self.stage.say(f"{COMMANDS} answers reached the handler as {MESH}.event.{ANSWER}.v1", "green")

    def _bury_and_replay(self) -> None:
        self.stage.act("Send one that the handler cannot read, fix the handler, and replay it")
        with self.client() as client:
            self.reported.buried = client.send(f"topic:{TOPIC}", POISON).client_message_id
            self.reported.sent.append(self.reported.buried)
        letters: list[Letter] = []
        query = LettersQuery(mesh=MESH, consumer=CONSUMER)

        def dead() -> bool:
            letters[:] = self._ask(lambda broker: broker.list_things(DEAD_LETTERS, query)).letters
            return bool(letters)

        wait(dead, "for the dead letter")
        (stored,) = letters
        if stored.letter is None:
            raise Fatal(Exit.FAILED, f"the dead letter {stored.id} cannot be read")
        self.stage.say(f"dead: {stored.letter.reason}, {stored.letter.last_error}", "red")
        self.receiver.repair()
        meant, why = LetterFilter(ids=frozenset({stored.id})), "the handler is fixed"
        result = self._ask(lambda broker: broker.change(DEAD_LETTERS, "replay", meant, mesh=MESH, reason=why))
        for failure in result.failed:
            raise Fatal(Exit.FAILED, failure.problem.detail)
        wait(lambda: self._effects_of_buried() > 0, "for the replayed message")
        self.stage.say("replayed under a fresh message id, and handled", "green")

    def _count(self, to_topic: int) -> bool:
        self.stage.act("Stop the daemon, and count in SQLite and in Postgres")
        self.stack.daemon.stop()
        lines = compare(
            self.reported,
            Outbox(self.stack.layout.outbox_file),
            Broker(self.stack.postgres.url),
            sends=len(self._events) + 1 + COMMANDS + 1,
            to_topic=to_topic,
            kept=sum(event.to != f"topic:{TOPIC}" for event in self._events),
            events=len(self.receiver.effects_of(TOPIC)),
            answers=len(self.receiver.effects_of(ANSWER)),
            unburied=self._effects_of_buried(),
        )
        self.stage.table(
            ("what", "means", "reported", "SQLite", "Postgres", "holds"),
            (((each.name, each.meaning, *map(str, each[2:])), each.holds) for each in lines),
        )
        count = {each.name: each.broker.found for each in lines}
        self.stage.say(
            f"{count['accepted']:,} accepted: {count['handled']:,} handled, {count['answered']:,} answered, and "
            f"{count['kept']:,} kept for a later reader"
        )
        if holds := all(each.holds for each in lines):
            self.stage.say("Nothing was lost, and nothing is there twice.", "bold green")
        return holds

    def _effects_of_buried(self) -> int:
        return sum(effect.client_message_id == self.reported.buried for effect in self.receiver.effects_of(TOPIC))

    def _ask(self, work: Callable[[BrokerClient], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self.stack.broker.client() as client:
                return await work(client)

        return asyncio.run(run())

    def _send(self, events: Sequence[SendRequest], halfway: Callable[[Callable[[], None]], None]) -> int:
        """Send `events`; `halfway`, called when half are answered, lets the rest go. Return how many went twice."""
        gate = threading.Event()
        half = len(events) // 2
        repeated = 0
        with self.client() as client, self.stage.progress("sending", len(events)) as show:
            for number, result in enumerate(client.send_many(_gated(events, half, gate)), 1):
                self.reported.sent.append(_acknowledged(result))
                repeated += bool(result.result and result.result.duplicate)
                show(number)
                if number == half:
                    halfway(gate.set)
        self.stage.say(f"{len(events):,} events acknowledged", "green")
        return repeated

    def _drain(self) -> None:
        with self.client() as client, self.stage.progress("arriving", len(self._events)) as show:

            def arrived() -> bool:
                rows = client.health().rows
                waiting = rows["pending"] + rows["inflight"]
                show(len(self._events) - waiting)
                return waiting == 0

            wait(arrived, "for every event to arrive")
        self.stage.say("nothing is waiting: the broker has everything", "green")


def _gated(events: Sequence[SendRequest], half: int, gate: threading.Event) -> Iterator[SendRequest]:
    """Yield the second half only once the gate is open, so that what happens halfway does so before it."""
    yield from events[:half]
    gate.wait()
    yield from events[half:]


def _acknowledged(result: BatchResult) -> str:
    """Return the id of a message that the daemon has stored; raises `Fatal` if it refused the message."""
    if result.result is None:
        said = result.problem.detail if result.problem is not None else "nothing"
        raise Fatal(Exit.FAILED, f"the daemon refused event {result.line}: {said}")
    return result.result.client_message_id
