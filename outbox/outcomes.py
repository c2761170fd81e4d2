"""Rows that the broker was sent and did not answer for: what became of them is asked, never guessed.

Before a verb retires such a row, the broker is asked for its id. What it has is done; what it has not may be retired;
and while it cannot be asked, the row's outcome stays unknown, and only force retires it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from outbox.model import Accepted, Unanswered
from outbox.reading import Reader
from outbox.transaction import Transaction
from postroom._wire.sends import RowStatus
from postroom._wire.sql import load_queries
from postroom.chassis.store import Store
from postroom.errors import PostroomError

_QUERIES: Final = load_queries("outbox", "sql/operate.sql")
_UNANSWERED: Final[tuple[RowStatus, ...]] = ("pending", "dead")  # the states of a row that may be unanswered
_ASK_SECONDS: Final = 5.0  # below the patience of whoever waits for the verb

LookUp = Callable[[Sequence[Unanswered]], Awaitable[Sequence[Accepted | None]]]
"""Asks the broker for rows: in their order, what it has of each, None where it has it not.

Raises `PostroomError` where it cannot be asked, or where a post of one of them may still be under way there.
"""

_encode: Final = msgspec.json.Encoder().encode
_decode_ids: Final = msgspec.json.Decoder(list[str]).decode


class Learned(NamedTuple):
    """What the broker was found to have, by row id: these rows are done; and why it could not be asked, if so."""

    accepted: dict[str, Accepted]
    doubt: str | None = None


class Outcomes:
    """Asks for the outcomes of rows and settles what the broker has."""

    def __init__(self, reader: Reader, store: Store, look_up: LookUp | None, changed: Callable[[str], None]) -> None:
        self._reader = reader
        self._store = store
        self._look_up = look_up
        self._changed = changed

    async def learn(self, row_ids: Sequence[str]) -> Learned:
        """Ask for those of the rows whose outcome is unknown; nothing is asked where there is none."""
        rows = await self._reader.unanswered(row_ids)
        if not rows:
            return Learned({})
        if self._look_up is None:
            return Learned({}, "there is no broker to ask")
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                found = await self._look_up(rows)
        except TimeoutError:
            return Learned({}, f"the broker did not answer within {_ASK_SECONDS:g} s")
        except PostroomError as error:
            return Learned({}, f"the broker cannot be asked: {error}")
        settled = await self._store.submit(_Learn(rows, found))
        for row_id in settled:
            self._changed(row_id)
        accepted = {row.row_id: one for row, one in zip(rows, found, strict=True) if one is not None}
        return Learned({row_id: accepted[row_id] for row_id in settled})


class _Learn(NamedTuple):
    """Write down what the broker said; a row that was posted again since it was asked is left alone."""

    asked: Sequence[Unanswered]
    found: Sequence[Accepted | None]

    @property
    def rows(self) -> int:
        """How many rows it may write."""
        return len(self.asked)

    def run(self, transaction: Transaction) -> list[str]:
        """Settle what was accepted; returns the ids of those rows that are done."""
        answers = list(zip(self.asked, self.found, strict=True))
        found = _encode([(row.row_id, row.unanswered_at, *one) for row, one in answers if one is not None]).decode()
        absent = _encode([(row.row_id, row.unanswered_at) for row, one in answers if one is None]).decode()
        for status in _UNANSWERED:
            values = {"found": found, "status": status, "now": transaction.now}
            room = transaction.value(_QUERIES["room"], values)
            transaction.changed(status, "done", transaction.execute(_QUERIES["accepted"], values), room)
        transaction.execute(_QUERIES["not_accepted"], {"absent": absent})
        return _decode_ids(transaction.value(_QUERIES["done_of"], {"found": found}))
