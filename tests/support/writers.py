"""Programs that send to a daemon until they are told to stop, and remember what it acknowledged."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

from postroom import AsyncClient, new_id
from postroom._wire.message import SendRequest
from support.mailroom import TOPIC

_BATCH: Final = 50  # messages of a batch, at most
_BODY: Final = 2000  # bytes of a body, fewer than


class Writers:
    """`write` sends one message after the other, `write_batches` many at once; any number of each may run."""

    def __init__(self, socket: Path, chance: random.Random, *, patience: float = 120.0, rest: float = 0.0) -> None:
        self.acknowledged: dict[str, bytes] = {}
        self.enough = asyncio.Event()
        self._socket = socket
        self._chance = chance
        self._patience = patience
        self._rest = rest  # seconds that each takes between two
        self._progress = asyncio.Condition()

    async def write(self) -> None:
        async with AsyncClient(self._socket, patience=self._patience) as client:
            while not self.enough.is_set():
                message_id, body = self._message()
                await client.send(TOPIC, body, client_message_id=message_id)
                await self._note({message_id: body})
                await asyncio.sleep(self._rest)

    async def write_batches(self) -> None:
        async with AsyncClient(self._socket, patience=self._patience) as client:
            while not self.enough.is_set():
                messages = dict(self._message() for _ in range(self._chance.randrange(1, _BATCH)))
                sends = [
                    SendRequest(to=TOPIC, body=body.hex(), client_message_id=message_id)
                    for message_id, body in messages.items()
                ]
                async for results in client.send_many_in_chunks(sends):
                    kept = [each.result.client_message_id for each in results if each.result is not None]
                    assert len(kept) == len(results), results
                    await self._note({message_id: messages[message_id].hex().encode() for message_id in kept})
                await asyncio.sleep(self._rest)

    async def reached(self, count: int) -> None:
        """Return when so many messages have been acknowledged."""
        async with self._progress:
            await self._progress.wait_for(lambda: len(self.acknowledged) >= count)

    async def _note(self, messages: dict[str, bytes]) -> None:
        async with self._progress:
            self.acknowledged |= messages
            self._progress.notify_all()

    def _message(self) -> tuple[str, bytes]:
        return new_id(), self._chance.randbytes(self._chance.randrange(_BODY))
