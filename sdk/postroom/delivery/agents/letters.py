"""The dead letters of an agent: kept in its event store, and published from there as what it emits is."""

from __future__ import annotations

from functools import partial

import msgspec

from postroom.delivery.agents.publishing import Publisher
from postroom.delivery.agents.store import Store, durably
from postroom.delivery.agents.turns import Turns
from postroom.delivery.dead_letters.letter import DeadLetter, letter_id
from postroom.delivery.subjects import dead_letter_subject


class AgentLetters:
    """Where one agent's dead letters are kept."""

    def __init__(self, publisher: Publisher, store: Store, turns: Turns, context: str) -> None:
        self._publisher = publisher
        self._store = store
        self._turns = turns
        self._context = context

    async def keep(self, letter: DeadLetter) -> None:
        """Commit the letter and publish it; where JetStream does not take it now, the record publishes it later."""
        subject = dead_letter_subject(self._context, letter.original_subject)
        record = msgspec.json.encode(letter)
        async with self._turns.turn():
            kept = await durably(partial(self._store.keep_letter, letter_id(letter), subject, record))
        if kept is not None:
            await self._publisher.publish(self._publisher.read([kept]))
