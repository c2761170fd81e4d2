"""Publishing what the store holds: pipelined, each message under the id that it was stored with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, NamedTuple

import structlog
from nats.js import JetStreamContext
from nats.js.api import PubAck

from delivery.agents.emitting import Draft
from delivery.agents.envelopes import headers_of
from delivery.agents.records import decode_record, payload_of
from delivery.agents.store import Outgoing
from delivery.errors import from_nats

_log = structlog.get_logger(__name__)

HEADER_BYTES: Final = 16 * 1024  # of a message that its headers may take


class Message(NamedTuple):
    """A stored message on its way out."""

    position: int
    cause: int  # the position of the message that caused it
    subject: str
    headers: dict[str, str]
    body: bytes


def message_of(position: int, cause: int, draft: Draft) -> Message:
    """Return the message of an event that was just stored."""
    return Message(position, cause, draft.subject, headers_of(draft.envelope), draft.payload)


def stored_message(outgoing: Outgoing) -> Message:
    """Return the same message, read back from the store."""
    record = decode_record(outgoing.record)
    body = payload_of(outgoing.record)
    return Message(outgoing.position, record.cause or 0, record.subject, headers_of(record.envelope), body)


async def publish(js: JetStreamContext, messages: Sequence[Message], seconds: float) -> list[Message]:
    """Publish all at once; return those that JetStream has not acknowledged within `seconds`."""
    acks: dict[int, asyncio.Future[PubAck]] = {}
    for message in messages:
        try:
            acks[message.position] = await js.publish_async(message.subject, message.body, headers=message.headers)
        except Exception as error:  # noqa: BLE001 - whatever it was, the message stays in the store
            _refused(message, error)
    if acks:
        await asyncio.wait(acks.values(), timeout=seconds)
    return [message for message in messages if not _acknowledged(message, acks.get(message.position))]


def _acknowledged(message: Message, ack: asyncio.Future[PubAck] | None) -> bool:
    if ack is None:
        return False
    if not ack.done():
        ack.cancel()
        _refused(message, TimeoutError("no acknowledgement"))
        return False
    if (error := ack.exception()) is not None:
        _refused(message, error)
        return False
    return True


def _refused(message: Message, error: BaseException) -> None:
    doing = f"publishing to {message.subject}"
    detail = str(from_nats(error, doing)) if isinstance(error, Exception) else repr(error)
    _log.warning("agent_publish_failed", subject=message.subject, position=message.position, detail=detail)
