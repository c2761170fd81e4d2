"""The demo's acts at the other end: a handler, an agent that answers, a message that nobody can read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from cli.demo.programs import CONSUMER, POISON
from cli.demo.reckoning import ANSWER, TOPIC, Handled
from cli.demo.stage import Scene
from cli.stack.layout import MESH
from postroom import BrokerClient
from postroom._wire.dead_letters import DEAD_LETTERS, Letter, LetterFilter, LettersQuery
from postroom.chassis.exits import Exit, Fatal

T = TypeVar("T")

QUEUE: Final = "counter"  # whose commands the agent takes
COMMANDS: Final = 3


class Delivering:
    """The acts that show what becomes of accepted messages."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._stage = scene.stage
        self._receiver = scene.receiver
        self._told = scene.told

    def handle_everything(self, events: int) -> None:
        """Wait until the handler has handled every event that was accepted."""
        self._stage.act("Meanwhile a consumer posted every accepted event to a handler")
        with self._stage.progress("handled", events) as show:

            def handled() -> bool:
                done = len(self._receiver.effects_of(TOPIC))
                show(done)
                return done >= events

            self._scene.wait(handled, "for the handler to get every event")
        again = f"{self._receiver.repeated:,} came twice and were handled once"
        self._stage.say(f"{len(self._receiver.effects):,} events handled; {again}", "green")

    def ask_the_agent(self) -> None:
        """Send commands to an agent, and see its answers at the handler."""
        self._stage.act(f"Send {COMMANDS} commands to an agent, which answers each with an event")
        with self._scene.client() as client:
            for number in range(COMMANDS):
                sent = client.send(f"queue:{QUEUE}", f"count this, {number}")
                self._told.sent.append(sent.client_message_id)
                self._told.commands.append(sent.client_message_id)
        self._scene.wait(lambda: len(self._receiver.effects_of(ANSWER)) >= COMMANDS, "for the agent's answers")
        self._stage.say(f"{COMMANDS} answers reached the handler as {MESH}.event.{ANSWER}.v1", "green")

    def bury_and_replay(self) -> None:
        """Send a message that the handler refuses; see its dead letter, repair the handler, replay it."""
        self._stage.act("Send one that the handler cannot read, fix the handler, and replay it")
        with self._scene.client() as client:
            self._told.buried = client.send(f"topic:{TOPIC}", POISON).client_message_id
            self._told.sent.append(self._told.buried)
        letters: list[Letter] = []
        query = LettersQuery(mesh=MESH, consumer=CONSUMER)

        def dead() -> bool:
            letters[:] = self._ask(lambda broker: broker.list_things(DEAD_LETTERS, query)).letters
            return bool(letters)

        self._scene.wait(dead, "for the dead letter")
        (stored,) = letters
        if stored.letter is None:
            raise Fatal(Exit.FAILED, f"the dead letter {stored.id} cannot be read")
        self._stage.say(f"dead: {stored.letter.reason}, {stored.letter.last_error}", "red")
        self._receiver.repair()
        meant, why = LetterFilter(ids=frozenset({stored.id})), "the handler is fixed"
        result = self._ask(lambda broker: broker.change(DEAD_LETTERS, "replay", meant, mesh=MESH, reason=why))
        for failure in result.failed:
            raise Fatal(Exit.FAILED, failure.problem.detail)
        self._scene.wait(lambda: self._effects_of_buried() > 0, "for the replayed message")
        self._stage.say("replayed under a fresh message id, and handled", "green")

    def handled(self) -> Handled:
        """Count what the handler did."""
        return Handled(
            events=len(self._receiver.effects_of(TOPIC)),
            answers=len(self._receiver.effects_of(ANSWER)),
            buried=self._effects_of_buried(),
        )

    def _effects_of_buried(self) -> int:
        return sum(effect.client_message_id == self._told.buried for effect in self._receiver.effects_of(TOPIC))

    def _ask(self, work: Callable[[BrokerClient], Awaitable[T]]) -> T:
        async def run() -> T:
            async with self._scene.stack.broker.client() as client:
                return await work(client)

        return asyncio.run(run())
