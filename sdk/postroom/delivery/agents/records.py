"""What the event store keeps of each event, in canonical JSON (RFC 8785), and the chain of hashes over it.

A record is `{"cause":…,"envelope":{…},"role":"…","subject":"…"}`. The state hash after position n is

    sha256( state hash after n - 1  ‖  record n )          with 32 zero bytes before position 1

so it depends on every byte of every record and on their order, and on nothing else: not on deliveries, batches or times
at which anything ran (docs/contract/delivery.md#delivery-60).
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, Literal

import msgspec
import rfc8785

from postroom.agent import Envelope
from postroom.errors import InvalidMessage

Role = Literal["handled", "conflict", "refused", "emitted", "reported"]

NO_HASH: Final = bytes(32)  # the state hash of an empty store


class Record(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One event of the store; the fields stand in canonical order.

    `handled`, `conflict` and `refused` say what became of a message that came in. Because of the one at the position
    `cause`, the agent `emitted` this one, or the runtime `reported` it.
    """

    cause: int | None
    envelope: Envelope
    role: Role
    subject: str

    @property
    def changes_state(self) -> bool:
        """Whether `apply` sees the event: what was handled, and what the agent emitted."""
        return self.role in ("handled", "emitted")


class _Payload(msgspec.Struct):
    payload: msgspec.Raw


class _Body(msgspec.Struct):
    envelope: _Payload


_decode_payload: Final = msgspec.json.Decoder(_Body).decode
_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(Record).decode
_decode_any: Final = msgspec.json.Decoder().decode


def canonical(value: Any, what: str) -> bytes:
    """Return the canonical JSON of a payload; raises `InvalidMessage` where JSON cannot hold it."""
    try:
        return rfc8785.dumps(msgspec.to_builtins(value))
    except (rfc8785.CanonicalizationError, TypeError, ValueError, RecursionError) as error:
        raise InvalidMessage.of("invalid_payload", f"{what} is not JSON: {error}", field="payload") from error


def with_payload(envelope: Envelope, value: Any) -> tuple[Envelope, bytes]:
    """Return the envelope with the payload as a replay would read it, and that payload's canonical JSON."""
    payload = canonical(value, f"the payload of {envelope.type or envelope.id!r}")
    return msgspec.structs.replace(envelope, payload=_decode_any(payload)), payload


def encode_record(record: Record, payload: bytes) -> bytes:
    """Return the canonical JSON of a record, whose payload is encoded already."""
    envelope = msgspec.structs.replace(record.envelope, payload=msgspec.Raw(payload))
    return _encode(msgspec.structs.replace(record, envelope=envelope))


def decode_record(text: str | bytes) -> Record:
    """Read a record; raises `msgspec.DecodeError` or `msgspec.ValidationError` for what is none."""
    return _decode(text)


def payload_of(record: bytes) -> bytes:
    """Return the payload of a record as its bytes stand there: what is published again is what was published."""
    return bytes(_decode_payload(record).envelope.payload)


def next_hash(previous: bytes, record: bytes) -> bytes:
    """Return the state hash after `record`."""
    return hashlib.sha256(previous + record).digest()
