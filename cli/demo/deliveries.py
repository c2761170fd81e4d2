"""The demo's acts at the other end: a handler, an agent that answers, a message that nobody can read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from cli.demo.programs import CONSUMER, POISON
from cli.demo.reckoning import ANSWER, TOPIC, Handled
from cli.demo.stage import Scene
from cli.stack.layout import MESH
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import connected
from postroom.delivery.dead_letters.operations import LetterFilter, LetterOperations, StoredLetter
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

T = TypeVar("T")

QUEUE: Final = "counter"  # whose commands the agent takes
COMMANDS: Final = 3
_PATIENCE: Final = 20.0  # seconds


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
        letters: list[StoredLetter] = []

        def dead() -> bool:
            letters[:] = self._with_letters(lambda each: each.find(LetterFilter(consumer=CONSUMER)))
            return bool(letters)

        self._scene.wait(dead, "for the dead letter")
        (stored,) = letters
        if stored.letter is None:
            raise Fatal(Exit.FAILED, f"the dead letter {stored.id} cannot be read")
        self._stage.say(f"dead: {stored.letter.reason}, {stored.letter.last_error}", "red")
        self._receiver.repair()
        self._with_letters(lambda each: each.replay(stored, why="the handler is fixed"))
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

    def _with_letters(self, work: Callable[[LetterOperations], Awaitable[T]]) -> T:
        async def run() -> T:
            nats = await connect(NatsSettings(url=self._scene.stack.nats.url), name="postroom demo", patience=_PATIENCE)
            try:
                async with connected(self._scene.stack.postgres.url) as connection:
                    return await work(LetterOperations(connection, nats.jetstream(), MESH, actor="demo"))
            finally:
                await nats.close()

        return asyncio.run(run())
