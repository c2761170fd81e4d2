"""Publishing: what a database holds goes into JetStream, once and in order, and again where a stream loses it.

Here is its seam: rows that must reach a stream, whatever the database. Publisher and record know a `Source` and nothing
behind it. It has two forms: a table of Postgres (postgres.py: events, deliveries, dead letters), and an agent's SQLite
store (agents/outgoing.py: what it emitted, and its dead letters).
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from datetime import datetime
from typing import Any, Literal, NamedTuple, Protocol

from postroom.delivery.message import EPOCH, MESSAGE_ID
from postroom.delivery.settings import PublisherSettings


class Outgoing(NamedTuple):
    """A message that is to be published; `place` counts within its aggregate, from 1."""

    key: Any  # what its source knows it by
    aggregate: str | int
    place: int
    attempts: int
    subject: str
    body: bytes
    headers: dict[str, str]
    shorter: bytes | None = None  # the body where the server takes no message so large


class Place(NamedTuple):
    """Where the server put a message: a number in a stream that was created then, perhaps at an earlier publish."""

    stream: str
    created_at: datetime
    sequence: int
    duplicate: bool


class Failed(NamedTuple):
    """A message that is nowhere: why, and after how many seconds it may be tried again."""

    message: Outgoing
    error: str
    seconds: float


class Claim(Protocol):
    """Messages in hand. Where the claim ends without `settle`, nothing has happened to their rows."""

    messages: Sequence[Outgoing]
    more: bool  # whether others may be due although none is here

    async def settle(
        self, placed: Sequence[tuple[Outgoing, Place]], gone: Sequence[Outgoing], failed: Sequence[Failed]
    ) -> bool:
        """Note where messages are, and which are nowhere.

        A number that a stream gave to two messages is of neither: both are unpublished again, under the next epoch, for
        the stream has lost one of them. Those of `placed` that are `gone` from their streams are unpublished again too,
        unless they are settled. Return whether any shared a number.
        """
        ...


class Search(NamedTuple):
    """A look for rows that a stream has lost: their places are beyond `bound`."""

    loss: Literal["behind_the_end", "before_the_beginning", "of_another_stream"]
    stream: str
    created_at: datetime  # of that stream, as it is now
    bound: int  # its last number, or its first
    since: datetime  # what was published before is too old
    until: datetime  # what was published after may not be there yet


class Placed(NamedTuple):
    """What has a place in a stream: a message's id without the epoch, the epoch, and the number."""

    identity: str
    epoch: int
    sequence: int


class Source(Protocol):
    """Rows of one kind."""

    name: str

    def claim(self, limits: PublisherSettings) -> AbstractAsyncContextManager[Claim]:
        """Take due messages in hand, oldest first."""
        ...

    async def now(self) -> datetime:
        """Return the time by which it notes when something was published."""
        ...

    async def all_marked(self) -> bool:
        """Wait until what has been published by now is marked so; False where that cannot be known.

        Then a search may miss what a publisher has under way, and is to be made again.
        """
        ...

    async def requeue_lost(self, search: Search) -> int:
        """Make unpublished, under the next epoch, what is lost and was not settled; return how many messages."""
        ...

    async def newest_at(
        self, stream: str, created_at: datetime, first: int, last: int, missing: Sequence[int]
    ) -> Placed | None:
        """Return what has the highest place of a stream from `first` to `last`, but for the numbers `missing`."""
        ...

    async def prune(self) -> None:
        """Forget what was published so long ago that nothing asks about it."""
        ...


def message_id(identity: str, epoch: int) -> str:
    """Return the `Nats-Msg-Id`: fresh in each epoch, for a stream would swallow the old one; inboxes cut it off."""
    return f"{identity}/{epoch}" if epoch else identity


def identifying(identity: str, epoch: int) -> dict[str, str]:
    """Return the headers that say which message it is, and which part of its id is the epoch."""
    headers = {MESSAGE_ID: message_id(identity, epoch)}
    return {**headers, EPOCH: str(epoch)} if epoch else headers
