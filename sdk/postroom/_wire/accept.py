"""What a daemon and a broker say to each other: `POST /v1/accept` and `/v1/accepted`, `GET /v1/features`."""

from typing import Annotated

import msgspec

from postroom._wire.message import Envelope
from postroom._wire.names import FINGERPRINT, MESSAGE_ID
from postroom.errors import Problem

DEDUPE_MODES = ("retention_scoped", "permanent")
MIN_DEDUPE_DAYS = 7  # docs/contract/accept.md#accept-3: a daemon tries for days, and must then be recognised
MAX_BATCH = 1000  # messages in one accept request
OVERLOADED = "overloaded"  # code of a 503 by a broker that has as much at work as it takes: it works, ask for less

Fingerprint = Annotated[str, msgspec.Meta(pattern=FINGERPRINT.schema)]


class AcceptItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One message of a batch: its id, the fingerprint frozen by the daemon (64 hex digits), and the message."""

    client_message_id: str
    request_fingerprint: Fingerprint
    message: Envelope


class RawAcceptItem(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An `AcceptItem` whose message is spliced in as the outbox stores it, and never decoded on the way out."""

    client_message_id: str
    request_fingerprint: str
    message: msgspec.Raw


class AcceptBatch(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/accept`, for documents and clients; the broker decodes its messages one by one."""

    messages: Annotated[list[AcceptItem], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


class SentMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A message in a look-up: its id and its fingerprint (64 hex digits)."""

    client_message_id: Annotated[str, msgspec.Meta(pattern=MESSAGE_ID.schema)]
    request_fingerprint: Fingerprint


class AcceptedQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/accepted`: the member's own messages to look up."""

    messages: Annotated[list[SentMessage], msgspec.Meta(min_length=1, max_length=MAX_BATCH)]


class AcceptAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The broker's answer for one message, in the order of the request.

    `status` 201 (new) and 200 (duplicate) carry the ids; anything else carries `problem`. To a look-up it is 200, 404
    (`not_accepted`) or 409 (another message, or another member, has the id).
    """

    status: int
    client_message_id: str
    broker_message_id: str | None = None
    history_id: int | None = None
    duplicate: bool | None = None
    history_available: bool | None = None
    first_seen_at: str | None = None  # RFC 3339
    problem: Problem | None = None


class AcceptResponse(msgspec.Struct, kw_only=True):
    """The body of a 200 to `POST /v1/accept` and `/v1/accepted`: one answer per message."""

    answers: list[AcceptAnswer]


class AcceptedEvent(msgspec.Struct, kw_only=True):
    """The payload of an event-outbox row: the whole message as accepted, so that publishing needs no other row."""

    broker_message_id: str
    client_message_id: str
    mesh: str
    sender: str
    message: msgspec.Raw  # an `Envelope`


class DedupeFeature(msgspec.Struct, kw_only=True):
    """`client_message_id_dedupe`: how long, and how exactly, the broker recognises an id."""

    version: int
    mode: Annotated[str, msgspec.Meta(extra_json_schema={"enum": list(DEDUPE_MODES)})]  # a later broker may have more
    request_fingerprint: bool
    dedupe_retention_days: int | None = None  # at least 7; absent when permanent


class PayloadFeature(msgspec.Struct, kw_only=True):
    """`max_payload`: the largest body that the broker accepts inline, in bytes."""

    inline_bytes: int


class RateLimitFeature(msgspec.Struct, kw_only=True):
    """`rate_limit`: messages per window, and the window's length in seconds."""

    per_mesh: int
    per_member: int
    window_seconds: int


class Features(msgspec.Struct, kw_only=True):
    """The body of `GET /v1/features`; the token belongs to `member` of `mesh`.

    `incarnation` names the database: a different one may lack what was accepted before. `last_history_id` is
    the last number that the mesh has used: it never decreases, unless an older database was restored.
    """

    mesh: str
    member: str
    max_batch: int
    client_message_id_dedupe: DedupeFeature | None = None
    max_payload: PayloadFeature | None = None
    rate_limit: RateLimitFeature | None = None
    incarnation: str | None = None
    last_history_id: int | None = None
