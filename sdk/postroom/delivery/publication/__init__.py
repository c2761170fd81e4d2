"""Publishing: rows of a database go into JetStream, once and in order, and again where a stream loses them.

This is its interface: rows that must reach a stream, in any database. Publisher and record know a `Source` and nothing
behind it. It has two forms: a table of Postgres (postgres.py: events, deliveries, dead letters, replays), and an
agent's SQLite store (agents/outgoing.py: what it emitted, and its dead letters).
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

from postroom.delivery.message import EPOCH, MESSAGE_ID
from postroom.delivery.settings import PublisherSettings


class Outgoing(NamedTuple):
    """A message that is to be published; `place` counts within its aggregate, from 1."""

    key: Any  # its source's name for it
    aggregate: str | int
    place: int
    attempts: int
    subject: str
    body: bytes
    headers: dict[str, str]
    shorter: bytes | None = None  # the body where the whole one is too large for the server


class Place(NamedTuple):
    """Where the server stored a message, perhaps at an earlier publish: a number in a stream, and its creation."""

    stream: str
    created_at: datetime
    sequence: int
    duplicate: bool


class Unanswered(str):
    """Why JetStream has neither taken nor refused a message: a stream may have it."""

    __slots__ = ()


class Denied(Unanswered):
    """Why NATS lets this user not publish a message: that is no fault of the message's."""

    __slots__ = ()


class Refused(str):
    """Why a stream, as it is now, does not take a message that is like any other: it is full, or sealed."""

    __slots__ = ()


class Failed(NamedTuple):
    """A message that no stream is known to have: why, and after how many seconds it may be tried again."""

    message: Outgoing
    error: str
    seconds: float


class Claim(Protocol):
    """Messages in hand. Where the claim ends without `settle`, their rows are unchanged."""

    messages: Sequence[Outgoing]
    more: bool  # whether others may be due although this claim has none

    async def settle(
        self, placed: Sequence[tuple[Outgoing, Place]], gone: Sequence[Outgoing], failed: Sequence[Failed]
    ) -> bool:
        """Note where messages are, and which no stream stored.

        Two messages to which a stream gave one number are both unpublished again, under the next epoch, since the
        stream has lost one of them. Those of `placed` that are `gone` from their streams are unpublished again too,
        unless they are settled. Return whether any shared a number.
        """


class Search(NamedTuple):
    """A search for rows that a stream has lost: their places are beyond `bound`."""

    loss: Literal["behind_the_end", "before_the_beginning", "of_another_stream"]
    stream: str
    created_at: datetime  # of that stream, as it is now
    bound: int  # its last number, or its first
    since: datetime  # what was published before is too old
    until: datetime  # what was published after that may not be there yet


class Placed(NamedTuple):
    """A message with a place in a stream: its id without the epoch, the epoch, and the number."""

    identity: str
    epoch: int
    sequence: int


class Source(Protocol):
    """Rows of one kind."""

    name: str

    def claim(self, limits: PublisherSettings) -> AbstractAsyncContextManager[Claim]:
        """Take due messages in hand, oldest first."""

    async def now(self) -> datetime:
        """Return the time, by the clock that its times of publishing are taken from."""

    async def all_marked(self) -> bool:
        """Wait until what has been published by now is marked so; False where that cannot be known.

        Then a search may miss what a publisher is publishing, and has to be repeated.
        """

    async def requeue_lost(self, search: Search) -> int:
        """Make unpublished, under the next epoch, what is lost and was not settled; return how many messages."""

    async def newest_at(
        self, stream: str, created_at: datetime, first: int, last: int, missing: Sequence[int]
    ) -> Placed | None:
        """Return the message with the highest number of a stream from `first` to `last`, without those in `missing`."""

    async def prune(self) -> None:
        """Forget what was published so long ago that it is not needed any more."""


def message_id(identity: str, epoch: int) -> str:
    """Return the `Nats-Msg-Id`: new in each epoch, since a stream would drop the old one; inboxes cut the epoch off."""
    return f"{identity}/{epoch}" if epoch else identity


def identifying(identity: str, epoch: int) -> dict[str, str]:
    """Return the headers that say which message it is, and which part of its id is the epoch."""
    headers = {MESSAGE_ID: message_id(identity, epoch)}
    return {**headers, EPOCH: str(epoch)} if epoch else headers
