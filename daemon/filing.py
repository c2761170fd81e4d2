"""Filing what arrives: the handler behind the inbox's consumer, and the refill from the broker's history."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from typing import Final

import msgspec
import structlog

from inbox import Inbox
from postroom.administration import HistoryMessage, HistoryQuery
from postroom.broker import BrokerClient
from postroom.delivery.consuming import DONE, Dead, Delivery, Settle
from postroom.errors import Gone, PostroomError

_log = structlog.get_logger(__name__)

_RETRY_SECONDS: Final = 1.0  # between two tries to write to a full disk
_PAGE: Final = 200  # messages of the history asked for, and filed, at once

_decode: Final = msgspec.json.Decoder(HistoryMessage).decode
Sleep = Callable[[float], Awaitable[None]]


class FilingCounters(msgspec.Struct):
    """What was done with messages since the process started, for metrics."""

    filed: int = 0
    known: int = 0  # were here before, or had been
    refused: int = 0  # make no sense


class Filing:
    """Files batches: one transaction each, and `Done` only after its commit (docs/contract/delivery.md#delivery-80).

    A message that was filed before is left out by its key in the file, so a batch that comes again is harmless. While
    the disk is full a batch waits in hand, however long: a message is never buried for that.
    """

    def __init__(self, inbox: Inbox, mesh: str, counters: FilingCounters, *, sleep: Sleep = asyncio.sleep) -> None:
        self._inbox = inbox
        self._mesh = mesh
        self._counters = counters
        self._sleep = sleep
        self._stopping = False
        self.trouble: str | None = None  # what keeps a batch waiting

    def stop(self) -> None:
        """Let a batch that waits go back to the stream."""
        self._stopping = True

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """File the messages of `batch` and settle them; what makes no sense is buried."""
        messages = {each.sequence: message for each in batch if (message := self._message(each)) is not None}
        try:
            filed = await self._file(list(messages.values()))
        except (ArithmeticError, ValueError, RecursionError):  # a number, a text or a depth that no file holds
            if len(batch) > 1:
                raise  # each is given alone then
            filed, messages = False, {}
        for delivery in batch:
            if delivery.sequence not in messages:
                self._counters.refused += 1
                await settle(delivery, _senseless(delivery, self._mesh))
            elif filed:
                await settle(delivery, DONE)

    def _message(self, delivery: Delivery) -> HistoryMessage | None:
        try:
            message = _decode(delivery.data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return message if message.mesh == self._mesh and message.history_id > 0 else None

    async def _file(self, messages: Sequence[HistoryMessage]) -> bool:
        """Return whether the messages are on disk; waits while that cannot be."""
        while messages and not self._stopping:
            try:
                new = await self._inbox.file(messages)
            except PostroomError as error:
                self._say(str(error))
                await self._sleep(_RETRY_SECONDS)
                continue
            self._counters.filed += new
            self._counters.known += len(messages) - new
            self.trouble = None
            return True
        return not messages

    def _say(self, sentence: str) -> None:
        if sentence != self.trouble:
            _log.warning("inbox_waits", reason=sentence)
        self.trouble = sentence


def _senseless(delivery: Delivery, mesh: str) -> Dead:
    sentence = f"the message {delivery.message_id} is none of the mesh {mesh}, as the broker's history shows them"
    return Dead("malformed", sentence)


async def refill(inbox: Inbox, broker: BrokerClient, member: str, accepted_after: datetime) -> None:
    """File what the broker's history holds for `member`, from where an earlier refill had come to, up to its end.

    What the history shows beside (queues, direct messages to others) stays out. Raises `PostroomError`, and then goes
    on where it was with the next call.
    """
    while True:
        query = HistoryQuery(after=inbox.refill_after or 0, limit=_PAGE)
        batch: list[HistoryMessage] = []
        try:
            async for message in broker.history(query):
                batch.append(message)
                if len(batch) == _PAGE:
                    await _refill(inbox, batch, member, accepted_after)
                    batch = []
            break
        except Gone as error:  # the broker's database was restored: what is filed already is known by its key
            _log.warning("inbox_refill_goes_back", reason=str(error))
            await inbox.refilled_to(error.problem.resume_after or 0)
    await _refill(inbox, batch, member, accepted_after)
    await inbox.refilled_to(None)
    _log.info("inbox_refilled")


async def _refill(inbox: Inbox, batch: Sequence[HistoryMessage], member: str, accepted_after: datetime) -> None:
    wanted = [each for each in batch if _is_for(each, member) and each.accepted_at >= accepted_after]
    if wanted:
        await inbox.file(wanted)
    if batch:
        await inbox.refilled_to(batch[-1].history_id)


def _is_for(message: HistoryMessage, member: str) -> bool:
    return message.destination_kind == "topic" or message.to == f"dm:{member}"
