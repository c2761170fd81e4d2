"""Shares: how much of the daemon one uid may use while others are present, so that something is left for them.

`Limits` says how much a caller may ask for, and how slow it may be (docs/contract/send.md#send-27).

What is held (bytes, requests, waits, readers) is a `Budget`. A limit of the config is what one uid may hold. All
together may hold twice that, and each no more than is still free: a uid that is alone has the whole limit, and finds
room however much another uid holds.

The event loop's work goes by `Turns`, of which each uid has its part. Work is counted in bytes that are checked; a
request counts as `REQUEST` of them. A uid that has had its part waits for the next turn in a line of its own: the lines
share a turn, and a uid that is not in line need not wait. A caller that is alone loses nothing, since its turns are
larger, and the next follows at once. While another uid is present the lines rest between their turns: the outbox's
thread needs the interpreter for what is being written, and uids that come meanwhile are served first. A piece of work
that is larger than a turn rests as many turns, but small pieces of work need not wait for that.
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from postroom._wire.message import MAX_BODY_BYTES, MAX_REQUEST_BYTES
from postroom.chassis.runtime import spare_descriptors
from postroom.errors import TryAgain

NO_UID: Final = -1  # of a holder without a uid
_BUSY_RETRY: Final = 1.0  # seconds
TURN: Final = 8 * 1024  # bytes, about a millisecond
REQUEST: Final = 1536  # what reading and answering a request counts as
_ALONE_TURN: Final = 8 * TURN  # of a uid that is alone: every turn costs it an iteration of the event loop
_ALONE_REQUEST: Final = 512  # of a uid that is alone: another one waits for some ten milliseconds at most
REST: Final = 0.001  # seconds, after the work of one turn
_LONGEST_REST: Final = 0.032  # seconds, after one large piece of work
_PRESENT_SECONDS: Final = 1.0  # how long a uid counts as present after its last work
MIB: Final = 1024 * 1024

Bytes = Annotated[int, Meta(ge=1024)]
Count = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class Limits(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Limits on size, count and time; a caller that exceeds one is refused or disconnected, and nothing is written.

    What is held at once is per uid; all together may hold twice that, each no more than is still free.
    """

    body_bytes: Annotated[Bytes, Meta(description="Largest body of a message, in bytes (413).")] = MAX_BODY_BYTES
    request_bytes: Annotated[
        Bytes, Meta(description="Largest request, or line of a batch: the JSON around a body, in bytes (413).")
    ] = MAX_REQUEST_BYTES
    buffered_bytes: Annotated[
        Bytes, Meta(description="Bytes held in memory at once: of requests (429), of unread answers (disconnected).")
    ] = 64 * MIB
    requests_in_flight: Annotated[Count, Meta(description="Requests being answered at once (429).")] = 1024
    waits: Annotated[
        Count, Meta(description="Look-ups that wait for a send to settle, in addition to those requests (429).")
    ] = 1024
    connections: Annotated[
        Count, Meta(description="Open connections; always kept below the limit on file descriptors.")
    ] = 4096
    headers: Annotated[
        int, Meta(ge=16, description="Header fields of one request (400); ordinary clients send up to a dozen.")
    ] = 100
    header_seconds: Annotated[
        Seconds, Meta(description="Time for the head of a request, from its first byte, in seconds.")
    ] = 10.0
    body_seconds: Annotated[
        Seconds, Meta(description="Time for the body of a request, or for a line of a batch, in seconds.")
    ] = 30.0
    stall_seconds: Annotated[
        Seconds, Meta(description="Time without a byte within a body, or without a reply being read.")
    ] = 30.0
    idle_seconds: Annotated[
        Seconds, Meta(description="Time that a connection may idle between two requests, in seconds.")
    ] = 75.0

    def connection_cap(self) -> int:
        """Return how many connections may be open, so that file descriptors remain for everything else."""
        return min(self.connections, spare_descriptors())


class Budget:
    """Units that may be held at once; what is taken has to be given back."""

    def __init__(self, size: int, full: str = "too many bytes are being received", code: str = "too_busy") -> None:
        """Let one uid hold `size` units; `full` is the sentence of the refusal."""
        self._size = size
        self._full = full
        self._code = code
        self._held: defaultdict[int, int] = defaultdict(int)
        self.held = 0  # by all together

    @property
    def left(self) -> int:
        """How much one uid could take if all that is held were its own."""
        return self._size - self.held

    def ask(self, count: int, uid: int = NO_UID) -> None:
        """Raise `TryAgain` (429) where `uid` may not have `count` more; nothing is taken."""
        self.take(count, uid)
        self.give_back(count, uid)

    def take(self, count: int, uid: int = NO_UID) -> None:
        """Hold `count` more; raises `TryAgain` (429), and takes nothing, where `uid` may not have them."""
        held = self._held.get(uid, 0) + count
        if held > 2 * self._size - self.held - count:
            raise TryAgain.of(self._code, self._full, retryable=True, retry_after=_BUSY_RETRY)
        self._held[uid] = held
        self.held += count

    def give_back(self, count: int, uid: int = NO_UID) -> None:
        """Hold `count` less."""
        self.held -= count
        self._held[uid] -= count
        if not self._held[uid]:
            del self._held[uid]

    @contextmanager
    def holding(self, count: int, uid: int = NO_UID) -> Iterator[None]:
        """Hold `count` for the block; raises `TryAgain` (429) where `uid` may not have them."""
        self.take(count, uid)
        try:
            yield
        finally:
            self.give_back(count, uid)


class Turns:
    """Lets work begin, uid by uid."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._spent: dict[int, int] = {}
        self._lines: dict[int, deque[tuple[asyncio.Future[None], int]]] = {}  # the next one first
        self._coming = False  # the next turn
        self._resting = False  # those in line
        self._large_resting = False  # work in line that is larger than a turn
        self._present: set[int] = set()  # uids with recent work
        self._before: set[int] = set()  # and those with work before that
        self._present_since = self._loop.time()
        self.size = _ALONE_TURN  # of a uid's part of a turn at present
        self.request = _ALONE_REQUEST  # what a request counts as at present

    async def take(self, uid: int, count: int) -> None:
        """Return when `uid` may have `count` bytes of work done, at once where it has had less than a turn."""
        if not self.may_have(uid, count):
            await self.line_up(uid, count)

    def may_have(self, uid: int, count: int) -> bool:
        """Take `count` bytes of work in this turn and return True; False where `uid` has to wait."""
        spent = self._spent.get(uid, 0)
        if uid not in self._present:
            self._present.add(uid)
            self._measure()
        if spent >= self.size or uid in self._lines:
            return False
        self._spent[uid] = spent + count
        self._arm()
        return True

    def line_up(self, uid: int, count: int) -> asyncio.Future[None]:
        """Put `uid` at the end of its line; the future is done when it may have `count` bytes of work done."""
        turn = self._loop.create_future()
        self._lines.setdefault(uid, deque()).append((turn, count))
        self._arm()
        return turn

    @property
    def alone(self) -> bool:
        """Whether only one uid has had work done lately."""
        return len(self._present | self._before) <= 1

    def _measure(self) -> None:
        self.size, self.request = (_ALONE_TURN, _ALONE_REQUEST) if self.alone else (TURN, REQUEST)

    def _arm(self) -> None:
        if not self._coming:
            self._coming = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        """Begin the next turn."""
        self._coming = False
        self._spent.clear()
        if (now := self._loop.time()) - self._present_since > _PRESENT_SECONDS:
            self._before, self._present, self._present_since = self._present, set(self._lines), now
            self._measure()
        if self._lines and not self._resting:
            self._serve_lines()

    def _serve_lines(self) -> None:
        """Let the lines share a turn, one piece of work each in rotation, and rest."""
        done = large = 0
        waiting = deque(self._lines)
        while waiting and done < self.size:
            uid = waiting.popleft()
            line = self._lines[uid]
            turn, count = line[0]
            if count > TURN and self._large_resting:
                continue
            line.popleft()
            del self._lines[uid]
            if line:
                self._lines[uid] = line  # after the others, which come first in the next turn
                waiting.append(uid)
            if not turn.done():
                turn.set_result(None)
                self._spent[uid] = self._spent.get(uid, 0) + count
                done += count
                large = max(large, count)
        if self.alone:
            if self._lines:
                self._arm()
            return
        if large > TURN:  # many small ones must not end the rest of a large one
            self._large_resting = True
            self._loop.call_later(min(REST * large / TURN, _LONGEST_REST), self._end_large_rest)
        if done:
            self._resting = True
            self._loop.call_later(min(REST * done / TURN, REST), self._end_rest)

    def _end_rest(self) -> None:
        self._resting = False
        self._arm()

    def _end_large_rest(self) -> None:
        self._large_resting = False
        self._arm()
