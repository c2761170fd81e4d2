"""Shares of a broker's scarce resources (requests at work, bytes of bodies, connections), granted in turn.

Turns rotate among the meshes that wait, and within a mesh among its members (docs/contract/accept.md#accept-43). A
holder of nothing may always have one request granted, however large, once there is room for it at all.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Final, NamedTuple, TypeVar

from postroom._wire.accept import OVERLOADED
from postroom.errors import TryAgain

WAIT_SECONDS: Final = 10.0  # for a share: no less than a round takes under load, and below a daemon's patience
_QUARTER: Final = 4
_SLICE_SECONDS: Final = 0.0005
_PRESENT_SECONDS: Final = 1.0  # how long a mesh counts as present after its last work
_REST_PER_SLICE: Final = 2  # the rest after a slice, in durations of that slice: one thing may take long
T = TypeVar("T")

_Holder = tuple[str, ...]  # (): all of them; (mesh,); (mesh, member)


class _Request(NamedTuple):
    """A request for some amount; `granted` is done once it is held, or was given up."""

    amount: int
    granted: asyncio.Future[None]


class Shares:
    """A resource of a `capacity`, in units of the caller's choice."""

    def __init__(self, capacity: int, wait_seconds: float | None = None) -> None:
        self._most = [max(1, capacity // _QUARTER**depth) for depth in range(3)]
        self._wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
        self._held: Counter[_Holder] = Counter()
        self._waiting: OrderedDict[str, OrderedDict[_Holder, deque[_Request]]] = OrderedDict()  # the next one first

    @asynccontextmanager
    async def hold(self, whose: tuple[str, str], amount: int = 1) -> AsyncIterator[None]:
        """Hold `amount` for the block, once it is the turn of `whose` (mesh, member).

        Raises `TryAgain` (503 `overloaded`) where that takes too long.
        """
        holders = (), whose[:1], whose
        _, (mesh,), member = holders
        request = _Request(amount, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(mesh, OrderedDict()).setdefault(member, deque()).append(request)
        self._deal()
        try:
            async with asyncio.timeout(self._wait_seconds):
                await request.granted
        except BaseException as error:
            if not request.granted.cancelled():  # granted at the same moment
                self._give_back(holders, amount)
            if not isinstance(error, TimeoutError):
                raise
            sentence = "the broker is working on as many requests of yours as it allows: try again"
            raise TryAgain.of(OVERLOADED, sentence, retryable=True, retry_after=1.0) from None
        try:
            yield
        finally:
            self._give_back(holders, amount)

    def _give_back(self, holders: tuple[_Holder, ...], amount: int) -> None:
        self._held.subtract(dict.fromkeys(holders, amount))
        for holder in holders:
            if not self._held[holder]:
                del self._held[holder]
        self._deal()

    def _deal(self) -> None:
        while self._deal_one():
            pass

    def _deal_one(self) -> bool:
        """Grant the next request for which there is room; a holder of a whole share is skipped, and keeps its turn."""
        for mesh, members in list(self._waiting.items()):
            member = self._next_of(members)
            if not members:
                del self._waiting[mesh]
            elif member is not None and self._may_hold((mesh,), members[member][0].amount):
                if not self._may_hold((), members[member][0].amount):
                    return False  # none may overtake it: a large request would never get its turn
                request = members[member].popleft()
                members.move_to_end(member)
                self._waiting.move_to_end(mesh)
                self._held.update(dict.fromkeys(((), (mesh,), member), request.amount))
                request.granted.set_result(None)
                return True
        return False

    def _next_of(self, members: OrderedDict[_Holder, deque[_Request]]) -> _Holder | None:
        """Return the first member with a request that its share allows; forgets requests that were given up."""
        for member, requests in list(members.items()):
            while requests and requests[0].granted.done():
                requests.popleft()
            if not requests:
                del members[member]
            elif self._may_hold(member, requests[0].amount):
                return member
        return None

    def _may_hold(self, holder: _Holder, amount: int) -> bool:
        held = self._held[holder]
        return not held or held + amount <= self._most[len(holder)]


class Slices:
    """The event loop's time: long work is done in slices with rests, in which everything else goes on.

    One slice of each mesh runs at a time, and four of all meshes: a mesh has a third of the time at most. One that is
    alone has all of it, and lets others start after every slice.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._turns = Shares(_QUARTER)
        self._clock = clock
        self._latest: str | None = None  # the mesh that had something to do last
        self._latest_since = 0.0

    async def each(self, whose: tuple[str, str], things: Iterable[T], work: Callable[[T], None]) -> None:
        """Do `work` with each of `things`, for `whose` (mesh, member); raises what `work` and `Shares.hold` raise."""
        things = iter(things)
        while True:
            async with self._turns.hold(whose):
                began = self._clock()
                if self._latest != whose[0]:
                    self._latest, self._latest_since = whose[0], began
                for thing in things:
                    work(thing)
                    if self._clock() - began > _SLICE_SECONDS:
                        break
                else:
                    return
                is_alone = began - self._latest_since > _PRESENT_SECONDS
                await asyncio.sleep(0 if is_alone else _REST_PER_SLICE * (self._clock() - began))
