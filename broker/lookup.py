"""`POST /v1/accepted`: which of a member's messages the broker has accepted. B0 alone: no row, no unit of the limiter.

That an id is not there is worth something only where it stays so: the caller may have given a post up that is still at
work here. So before a "no" the look-up waits until every post that may hold the id has ended: the member's batches at
work in this process, then the transactions in Postgres that began before, whichever instance began them. What it cannot
see is a batch that waits in another instance for its turn, or in a proxy; that one ends unwritten as soon as its
instance notices that nobody waits for the answer.
"""

from __future__ import annotations

import asyncio
from typing import Final

from broker.accept import Accepting, answer_taken
from broker.authentication import Member
from broker.database import QUERIES, Database
from broker.store import Taken
from postroom.accept import AcceptAnswer, AcceptedQuery, AcceptResponse, SentMessage
from postroom.chassis.postgres import Connection
from postroom.errors import NotFound, TryAgain

_WAIT_SECONDS: Final = 3.0  # for posts that began before; below the patience of whoever asks
_LOOK_SECONDS: Final = 0.01  # between two looks at the transactions


class LookUp:
    """Answers for ids; one for the whole process."""

    def __init__(self, database: Database, accepting: Accepting) -> None:
        self._database = database
        self._accepting = accepting

    async def accepted(self, sender: Member, asked: AcceptedQuery) -> AcceptResponse:
        """Answer for each message, in order: 200 where it was accepted, 404 where it was not, 409 for a used id.

        Raises `TryAgain` (503) where Postgres cannot say, or posts that began before do not end in time.
        """
        ids = {message.client_message_id for message in asked.messages}
        async with self._database.read(sender.whose) as connection:
            taken = await self._find(connection, sender, ids)
        if len(taken) < len(ids):
            try:
                async with asyncio.timeout(_WAIT_SECONDS):
                    await self._accepting.until_ended(sender)
                    async with self._database.read(sender.whose) as connection:
                        await _until_written(connection)
                        taken = await self._find(connection, sender, ids)
            except TimeoutError:
                sentence = "posts that began before are still at work, and may hold these ids: ask again"
                raise TryAgain.of(503, "posts_at_work", sentence, retryable=True, retry_after=1.0) from None
        answers = [_answer(sender, each, taken.get(each.client_message_id)) for each in asked.messages]
        return AcceptResponse(answers=answers)

    async def _find(self, connection: Connection, sender: Member, ids: set[str]) -> dict[str, Taken]:
        rows = await connection.fetch(QUERIES["find_accepted"], sender.mesh_id, list(ids))
        return {row[0]: Taken(*row[1:]) for row in rows}


async def _until_written(connection: Connection) -> None:
    """Wait until the transactions that write dedupe rows now have ended; a Postgres that only copies cannot say."""
    if await connection.fetchval(QUERIES["is_read_only"]):
        sentence = "Postgres takes no writes at present, and may not have all that was accepted: ask again"
        raise TryAgain.of(503, "database_unavailable", sentence, retryable=True, retry_after=1.0)
    under_way = await connection.fetchval(QUERIES["accepts_under_way"], None)
    while under_way:
        await asyncio.sleep(_LOOK_SECONDS)
        under_way = await connection.fetchval(QUERIES["accepts_under_way"], under_way)


def _answer(sender: Member, asked: SentMessage, row: Taken | None) -> AcceptAnswer:
    name = asked.client_message_id
    if row is not None:
        return answer_taken(sender, name, bytes.fromhex(asked.request_fingerprint), row)
    problem = NotFound.of(404, "not_accepted", f"no message was accepted under the id {name}").problem
    return AcceptAnswer(status=problem.status, client_message_id=name, problem=problem)
