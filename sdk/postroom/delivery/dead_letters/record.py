"""The record of dead letters in Postgres: what consumers, webhooks and jobs buried, and what operators did with it."""

from __future__ import annotations

from typing import Final

import asyncpg
import msgspec

from postroom._wire.sql import load_queries
from postroom.chassis.postgres import UNREACHABLE, Pool
from postroom.delivery.dead_letters.letter import DeadLetter, letter_id
from postroom.delivery.errors import letter_not_kept
from postroom.delivery.subjects import dead_letter_subject

QUERIES: Final = load_queries(__package__, "record.sql")


class RecordedLetters:
    """Keeps the letters of one context as rows; a worker publishes them."""

    def __init__(self, pool: Pool, context: str) -> None:
        self._pool = pool
        self._context = context

    async def keep(self, letter: DeadLetter) -> None:
        """Commit the letter, unless the record has it."""
        try:
            await self._pool.execute(QUERIES["keep"], *columns(self._context, letter), letter.data())
        except (*UNREACHABLE, asyncpg.PostgresError) as error:
            raise letter_not_kept(letter.message_id or str(letter.sequence), error) from error


def columns(context: str, letter: DeadLetter) -> tuple[object, ...]:
    """Return what a row says of a letter: context, id, subject, time, and the letter itself without its payload."""
    subject = dead_letter_subject(context, letter.original_subject)
    return context, letter_id(letter), subject, letter.died_at, msgspec.json.encode(letter.without_data())
