"""Dead letters: messages that could not be handled, kept whole with the reason, and an operator's requests about them.

The rules begin at docs/contract/delivery.md#delivery-44.
"""

import base64
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final, Self

import msgspec

from postroom._wire.nouns import CHANGES, Change, Noun, Result, Verb
from postroom._wire.operations import MAX_IDS, Aged
from postroom._wire.programs import Trouble
from postroom._wire.words import counted
from postroom.errors import Problem

_VARYING: Final = re.compile(r"(?<!\w)\d+(?:[.,:]\d+)*(?!\w)|\b(?=[\w-]*\d)[\w-]{12,}\b")
_COMMON: Final = 200  # characters
_UNKNOWN: Final = datetime.fromtimestamp(0, UTC)


class DeadLetter(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """The body of a dead letter. The payload is text where it is UTF-8, else base64.

    A letter of another program may have no more than the first four members.
    """

    message_id: str | None
    original_subject: str
    reason: str
    attempts: int
    last_error: str = ""
    stream: str = ""
    sequence: int = 0
    consumer: str = ""
    published_at: datetime = _UNKNOWN
    died_at: datetime = _UNKNOWN
    headers: dict[str, str] = {}
    tenant: str | None = None
    idempotency_key: str | None = None
    payload: str | None = None
    payload_base64: str | None = None
    payload_omitted: bool = False  # NATS takes no letter so large: the record has payload and headers

    def __post_init__(self) -> None:
        """Refuse a payload that is not base64, which another program may have written."""
        if self.payload_base64 is not None:
            base64.b64decode(self.payload_base64)

    @property
    def has_payload(self) -> bool:
        """Whether the original message is in the letter."""
        return self.payload is not None or self.payload_base64 is not None

    def data(self) -> bytes:
        """Return the original payload, byte for byte."""
        if self.payload_base64 is not None:
            return base64.b64decode(self.payload_base64)
        return (self.payload or "").encode()

    def with_data(self, data: bytes) -> Self:
        """Return the letter with this payload."""
        try:
            return msgspec.structs.replace(self, payload=data.decode(), payload_base64=None)
        except UnicodeDecodeError:
            return msgspec.structs.replace(self, payload=None, payload_base64=base64.b64encode(data).decode())

    def without_data(self) -> Self:
        """Return the letter without its payload."""
        return msgspec.structs.replace(self, payload=None, payload_base64=None)

    def summary(self) -> Self:
        """Return the letter as a list shows it: with neither payload nor headers."""
        return msgspec.structs.replace(self.without_data(), headers={})

    def shortened(self) -> Self:
        """Return the part of the letter that fits into any message."""
        return msgspec.structs.replace(self.summary(), payload_omitted=True)


def common_error(error: str) -> str:
    """Return what the errors of one cause have in common: without numbers and ids, and of a long one the beginning."""
    return _VARYING.sub("…", error)[:_COMMON]


class _Conditions(Aged, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The conditions that letters match; what is not set matches everything."""

    subject: str | None = None  # of the original message; `*` and `>` as in NATS
    reason: str | None = None
    consumer: str | None = None
    error: str | None = None  # as `common_error` has it


class LetterFilter(_Conditions, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which letters a verb means: by `ids` (of letters, or message ids), else all that match the rest."""

    ids: Annotated[frozenset[str], msgspec.Meta(max_length=MAX_IDS)] | None = None


class LettersQuery(_Conditions, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/dead_letters`; a member's token implies its mesh."""

    mesh: str | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=CHANGES)] = CHANGES


class Letter(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """A letter under the id that verbs take; without a `letter`, something of another program in its stream.

    `new_message_id` is that of its replay, where that is what the answer is about.
    """

    id: str
    letter: DeadLetter | None = None
    new_message_id: str | None = None


class LetterPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Letters, oldest first; in a list without their payload.

    `unread` is why letters that are in streams alone are missing.
    """

    letters: list[Letter]
    next_cursor: str | None = None
    unread: Problem | None = None


class LetterCause(msgspec.Struct, kw_only=True, frozen=True):
    """Letters of one cause: a reason at a consumer, with one error but for numbers and ids; `example` is the latest."""

    reason: str
    consumer: str
    error: str
    letters: int
    oldest_at: datetime
    example: Letter


class LetterCauses(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Why messages of a mesh are dead, the most frequent cause first.

    `more` says that there are letters, or causes, that were not examined; `unread` why letters that are in streams
    alone are missing.
    """

    causes: list[LetterCause]
    more: bool = False
    unread: Problem | None = None


class LetterNote(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What an operator did to a dead letter: by its `act` it was `replayed`, say, or `dropped`."""

    act: str
    at: datetime
    actor: str
    why: str
    message_id: str | None
    original_subject: str
    reason: str  # why the letter was dead
    consumer: str
    new_message_id: str | None = None


class LetterLog(msgspec.Struct, kw_only=True):
    """What operators did most recently to the dead letters of a mesh, the last 1,000, oldest first."""

    notes: list[LetterNote]


class LetterCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How many letters of each mesh are open, by the name of its stream.

    `unread` is why those that are in streams alone are not counted.
    """

    letters: dict[str, int]
    unread: Problem | None = None

    def troubles(self) -> Iterator[Trouble]:
        """Yield which meshes have letters that wait for an operator."""
        for stream, count in self.letters.items():
            if count:
                show = f"postroom dlq list --mesh {stream.removesuffix('_DLQ').lower()}"
                yield Trouble(stream, counted(count, "dead letter"), show, "look")


DEAD_LETTERS: Final = Noun(
    "dead letter",
    "dead letters",
    "/v1/dead_letters",
    LettersQuery,
    LetterPage,
    Change[LetterFilter],
    Result[Letter],
    {
        "replay": Verb(
            "Send messages again, each under a fresh id, to the consumer that could not handle them; their letters are "
            "settled.",
            "replayed",
        ),
        "drop": Verb(
            "Settle dead letters that will not be handled; a record of each is kept, without its payload.",
            "dropped",
            grave=True,
        ),
    },
    whole=LetterPage,
    place="{mesh}/{id}",
    log=LetterLog,
    counts=LetterCounts,
)
