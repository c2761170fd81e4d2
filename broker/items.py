"""B1 for one message: from the bytes of a batch to the values of its rows (docs/contract/accept.md#accept-11).

Reading takes three steps, because B0 comes before anything that can fail: `split` finds where each message of a batch
begins and ends, `read_item` takes only its id and fingerprint, and `check` decodes it once its id is known to be new.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from typing import Annotated, Any, Final, NamedTuple, NoReturn
from uuid import UUID

import msgspec

from postroom._wire.accept import MAX_BATCH, AcceptedEvent, RawAcceptItem
from postroom._wire.administration import MemberName
from postroom._wire.fingerprint import prefix
from postroom._wire.ids import ID_RULE, MAX_ID_LENGTH
from postroom._wire.message import (
    MAX_MENTIONS,
    TRACEPARENT,
    DestinationKind,
    Envelope,
    Priority,
    check_envelope,
    refuse,
    refuse_duplicate_keys,
    refuse_too_many_values,
)
from postroom._wire.names import FINGERPRINT, MESSAGE_ID
from postroom._wire.words import json_fault, shape_fault
from postroom.chassis.postgres import uuid_of
from postroom.errors import InvalidMessage, Problem

_Mentions: Final = Annotated[list[MemberName], msgspec.Meta(max_length=MAX_MENTIONS)]
_MAX_EVENT_VERSION: Final = 999_999_999  # what a subject has room for

# A list of the messages would be built whole, millions of them, before it could be counted. This has as many places as
# a batch may have messages, which are filled one after the other: a message too many ends the decoding.
_Places: Final = msgspec.defstruct(
    "_Places",
    [(f"message_{place}", msgspec.Raw, msgspec.UNSET) for place in range(MAX_BATCH)],
    array_like=True,
    forbid_unknown_fields=True,
)
_Request: Final[Any] = msgspec.defstruct("_Request", [("messages", _Places)], forbid_unknown_fields=True)
_List: Final[Any] = msgspec.defstruct("_List", [("messages", msgspec.Raw)], forbid_unknown_fields=True)
_AT_ONCE: Final = 2 * 1024 * 1024  # bytes of a batch that is split in one go: more than a relay posts, in some 4 ms

_SPACE: Final = b" \t\r\n"
_ENCLOSING: Final = len(b'{"messages":]}')  # each message has one sign more, "[" or ","
_BEFORE: Final = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"[^"]*"[ \t\r\n]*:[ \t\r\n]*')
_FIRST: Final = re.compile(rb'[ \t\r\n]*\{[ \t\r\n]*"messages"[ \t\r\n]*:[ \t\r\n]*\[[ \t\r\n]*')
_LAST: Final = re.compile(rb"\][ \t\r\n]*\}[ \t\r\n]*")
_WINDOW: Final = 256 * 1024  # bytes of a message that may be skipped at once
_TRAILING: Final = re.compile(r"JSON is malformed: trailing characters \(byte (\d+)\)")

_decode_request: Final = msgspec.json.Decoder(_Request).decode
_decode_list: Final = msgspec.json.Decoder(_List).decode
_skip: Final = msgspec.json.Decoder(msgspec.Raw).decode
_decode_item: Final = msgspec.json.Decoder(RawAcceptItem).decode
_decode_message: Final = msgspec.json.Decoder(Envelope).decode
_encode: Final = msgspec.json.Encoder().encode
_ITEM: Final = len(_encode(RawAcceptItem(client_message_id="", request_fingerprint="", message=msgspec.Raw())))
_MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)  # ValidationError is a DecodeError


class Item(NamedTuple):
    """One message of a batch before it is decoded: its position, its id, and the fingerprint it was sent with."""

    position: int
    client_message_id: str
    fingerprint: bytes  # 32 bytes
    message: msgspec.Raw


class Checked(NamedTuple):
    """The values of a message's rows, and the message as it is announced (None for a dm), encoded.

    Decoded, a batch may hold millions of values, which would be kept until it is written, and then freed at once.
    """

    destination_kind: DestinationKind
    destination_ref: str
    priority: Priority
    reply_to: str | None
    traceparent: str | None
    meta: str | None  # canonical JSON
    body: bytes
    body_is_text: bool
    mentions: list[str]
    announced: msgspec.Raw | None
    event_version: int
    correlation_id: UUID | None
    causation_id: UUID | None


class Malformed(NamedTuple):
    """A message without an id or fingerprint that can be looked up, and why."""

    position: int
    client_message_id: str
    problem: Problem


def split(body: bytes | bytearray, max_batch: int) -> Iterator[msgspec.Raw]:
    """Yield the messages of a batch; a large one is split lazily, since many small values may take long.

    Raises `InvalidMessage` where the batch itself is wrong, which may be after its first messages.
    """
    places: tuple[Any, ...] = ()
    if len(body) <= _AT_ONCE:
        with suppress(*_MALFORMED):  # splitting it one by one finds what is wrong, and where
            places = msgspec.structs.astuple(_decode_request(body).messages)
    messages = list(takewhile(lambda place: place is not msgspec.UNSET, places))
    if 0 < len(messages) <= max_batch:
        if len(body) != _ENCLOSING + len(messages) + sum(map(len, messages)):  # there is room for more
            # refuse another list before the one that counts, which would be ignored
            ends = len(body.rstrip(_SPACE).removesuffix(b"}").rstrip(_SPACE))
            if _BEFORE.fullmatch(body, 0, ends - len(_decode_list(body).messages)) is None:
                refuse("duplicate_key", "the key 'messages' is given twice in one object", "messages")
        yield from messages
    else:
        yield from _one_by_one(body, max_batch)


def _one_by_one(body: bytes | bytearray, max_batch: int) -> Iterator[msgspec.Raw]:
    if (opening := _FIRST.match(body)) is None:
        _refuse_batch(max_batch, 'it is not {"messages": […]}')
    rest, start, count = memoryview(body), opening.end(), 0
    if _LAST.fullmatch(body, start) is not None:
        _refuse_batch(max_batch, "it has none")
    while True:
        try:
            end = start + _length(rest[start:])
        except _MALFORMED as error:
            _refuse_batch(max_batch, f"message {count}: {json_fault(error, bytes(rest[start:]))}")
        if (count := count + 1) > max_batch:
            refuse("batch_too_large", f"more than {max_batch} messages, the limit", "messages")
        yield msgspec.Raw(rest[start:end])
        if body[end : end + 1] != b",":
            break
        start = end + 1
    if _LAST.fullmatch(body, end) is None:
        _refuse_batch(max_batch, f"it does not end after message {count - 1}")


def _length(rest: memoryview) -> int:
    """Return the length of the value that `rest` begins with, including the white space after it."""
    if len(rest) > _WINDOW:
        try:
            return _length(rest[:_WINDOW])
        except _MALFORMED:  # it is longer; one of too many values might be by far
            refuse_too_many_values(bytes(rest[:_WINDOW]))
    try:
        _skip(rest)
    except msgspec.DecodeError as error:
        if (trailing := _TRAILING.fullmatch(str(error))) is None:
            raise
        return int(trailing[1]) - 1
    return len(rest)


def _refuse_batch(max_batch: int, reason: str) -> NoReturn:
    refuse("invalid_batch", f"the body is not a batch of 1 to {max_batch} messages: {reason}")


def read_item(position: int, raw: msgspec.Raw) -> Item | Malformed:
    """Read only the id and the fingerprint of a batch's message."""
    try:
        item = _decode_item(raw)
    except _MALFORMED as error:
        return _malformed(position, "", "invalid_item", f"message {position} of the batch: {error}")
    if len(raw) != _ITEM + len(item.client_message_id) + len(item.request_fingerprint) + len(item.message):
        try:  # there is room for another key; what is in the message comes after the look-up of its id
            beside = bytes(raw).replace(bytes(item.message), b"{}", 1)
            refuse_too_many_values(beside)
            refuse_duplicate_keys(beside)
        except InvalidMessage as error:
            return _malformed(position, "", error.code, f"message {position} of the batch: {error.problem.detail}")
    if not MESSAGE_ID.allows(item.client_message_id):
        sentence = f"client_message_id is not an id: {ID_RULE}"
        return _malformed(position, item.client_message_id[:MAX_ID_LENGTH], "invalid_client_message_id", sentence)
    if not FINGERPRINT.allows(item.request_fingerprint):
        sentence = f"request_fingerprint is not {FINGERPRINT.words}"
        return _malformed(position, item.client_message_id, "invalid_fingerprint", sentence)
    return Item(position, item.client_message_id, bytes.fromhex(item.request_fingerprint), item.message)


def _malformed(position: int, client_message_id: str, code: str, detail: str) -> Malformed:
    return Malformed(position, client_message_id, InvalidMessage.of(code, detail).problem)


def check(item: Item, max_inline_bytes: int) -> Checked:
    """Decode a message, check each field, and compare its fingerprint with the one sent; raises `InvalidMessage`."""
    refuse_too_many_values(bytes(item.message))
    try:
        envelope = _decode_message(item.message)
    except _MALFORMED as error:
        refuse("invalid_message", f"the message is not an envelope: {error}", "message")
    checked = check_envelope(envelope, max_body_bytes=max_inline_bytes)
    encoded = _encode(envelope)
    if encoded != bytes(item.message):  # what a daemon posts is the same
        refuse_duplicate_keys(bytes(item.message))
    if checked.fingerprint != item.fingerprint:
        computed, sent = prefix(checked.fingerprint), prefix(item.fingerprint)
        why = "it changed on the way, or the sender computes another canonical form"
        sentence = f"the message's fingerprint is {computed}…, it was sent with {sent}…: {why}"
        refuse("fingerprint_mismatch", sentence, "request_fingerprint")
    if envelope.traceparent is not None and TRACEPARENT.fullmatch(envelope.traceparent) is None:
        refuse("invalid_traceparent", "traceparent is not valid (W3C Trace Context)", "traceparent")
    meta = envelope.meta or {}
    mentions = _mentions(meta)
    event_version = meta.get("event_version", 1) if checked.destination.kind == "topic" else 1
    if type(event_version) is not int or not 1 <= event_version <= _MAX_EVENT_VERSION:
        sentence = f"meta.event_version must be a whole number from 1 to {_MAX_EVENT_VERSION}"
        refuse("invalid_event_version", sentence, "meta.event_version")
    return Checked(
        checked.destination.kind,
        checked.destination.ref,
        envelope.priority,
        envelope.reply_to,
        envelope.traceparent,
        checked.meta.decode() if checked.meta else None,
        checked.body,
        envelope.body_base64 is None,
        mentions,
        None if checked.destination.kind == "dm" else msgspec.Raw(encoded),
        event_version,
        uuid_of(meta.get("correlation_id")),
        uuid_of(meta.get("causation_id")),
    )


def _mentions(meta: Mapping[str, Any]) -> list[str]:
    if "mentions" not in meta:
        return []
    try:
        return sorted(set(msgspec.convert(meta["mentions"], _Mentions)))
    except msgspec.ValidationError as error:
        sentence = f"meta.mentions is not a list of members: {shape_fault(error, _Mentions)[1]}"
        refuse("invalid_mention", sentence, "meta.mentions")


def event(item: Item, checked: Checked, broker_message_id: str, mesh: str, sender: str) -> str | None:
    """Return the event's payload: a topic message becomes an event, a queue message a command, a dm neither."""
    if checked.announced is None:
        return None
    accepted = AcceptedEvent(
        broker_message_id=broker_message_id,
        client_message_id=item.client_message_id,
        mesh=mesh,
        sender=sender,
        message=checked.announced,
    )
    return _encode(accepted).decode()
