"""Virtual time: an event loop whose clock jumps to what happens next, and a network in memory that loses and delays.

    python -m faults.virtual_time MODULE …      runs a module in a process whose clocks are all virtual

Everything that happens on the loop is decided by its `Random`, so a seed always has the same course.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
import os
import random
import runpy
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final, TypeVar, cast

T = TypeVar("T")

EPOCH: Final = 1_800_000_000  # seconds; when every run begins
_ROUNDS: Final = 5  # in which what still runs at the end of a course is ended
_HOP: Final = 0.003  # seconds, at most, until the loop hears of what a thread did
_NEXT: Final = 1e-6  # seconds: timers of the same moment have no order
_NOW = [0.0]  # seconds since then: of the one loop that runs
_ENTROPY = [random.Random(0)]  # what that loop's course takes for chance

LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)


def install() -> None:
    """Make clocks and randomness of this process the course's; before anything is imported that keeps one of them."""

    class Seeded(random.Random):
        """One that is given no seed gets one of the course's."""

        def __init__(self, seed: Any = None) -> None:
            super().__init__(_ENTROPY[0].random() if seed is None else seed)

    random.Random = Seeded  # type: ignore[assignment,misc]
    os.urandom = lambda size: bytes(_ENTROPY[0].randbytes(size))
    time.time = lambda: EPOCH + _NOW[0]
    time.time_ns = lambda: round((EPOCH + _NOW[0]) * 1e9)
    time.monotonic = time.perf_counter = lambda: _NOW[0]


class Crashed(Exception):
    """The process that was called has ended meanwhile."""


class Life:
    """A process from its start to its crash: its tasks and its ends of connections."""

    def __init__(self, loop: Loop, name: str) -> None:
        self.name = name
        self.over = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.ends: list[End] = []
        self._loop = loop
        self._died: asyncio.Future[None] = loop.create_future()
        self._context = contextvars.copy_context()
        self._context.run(LIFE.set, self)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something as a task of the process."""
        return self._context.run(self._loop.create_task, work)

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the process makes of it; raises `Crashed` where it does not come to that."""
        if self.over:
            work.close()
            raise Crashed
        task = self.start(work)
        ends: set[asyncio.Future[Any]] = {task, self._died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if self.over:
            raise Crashed
        return task.result()

    async def until_over(self) -> None:
        await asyncio.shield(self._died)

    def crash(self) -> None:
        """End it at once: the kernel closes its connections, and nothing that it did is heard of any more."""
        self.over = True
        self._died.set_result(None)
        for end in self.ends:
            end.hang_up()
        for task in self.tasks:
            task.cancel()


class Loop(asyncio.SelectorEventLoop):
    """Waits for nothing: where nothing is ready, its clock jumps to the next timer."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(_Selector())
        _NOW[0] = 0.0
        self.chance = chance
        self.network = Network(self)
        self._heard_at = 0.0
        self.set_task_factory(cast(Any, _make_task))

    def time(self) -> float:
        """Return the virtual time."""
        return _NOW[0]

    async def pause(self, most: float) -> None:
        """Let at most so many seconds go by."""
        await asyncio.sleep(self.chance.uniform(0, most))

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """Hear of what a thread has done a moment later, in order."""
        self._heard_at = max(self._heard_at + _NEXT, self.time() + self.chance.uniform(0, _HOP))
        return self.call_at(self._heard_at, callback, *args, context=context)

    def run_in_executor(self, *_: Any) -> Any:  # type: ignore[override]
        """Refuse what would be in no order."""
        raise AssertionError("a thread in virtual time")

    async def create_connection(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Connect through the network in memory."""
        return await self.network.connect(protocol_factory, (host, port))

    async def create_server(self, protocol_factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        """Listen there."""
        return self.network.listen(protocol_factory, (host, port))


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "everybody waits, and for nothing"
        _NOW[0] += max(0.0, timeout)
        return []


def _make_task(
    loop: asyncio.AbstractEventLoop, work: Any, context: contextvars.Context | None = None
) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(work, loop=loop, context=context)
    life = LIFE.get() if context is None else context.get(LIFE)
    if life is not None:
        life.tasks.append(task)
        if life.over:
            task.cancel()
    return task


class End(asyncio.Transport):
    """One end of a connection, which belongs to the process that opened or accepted it."""

    peer: End

    def __init__(self, network: Network, life: Life | None, context: contextvars.Context) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self._network = network
        self._life = life
        self._context = context
        self._protocol: Any = None
        self._closing = self._lost = self._cut = False
        self._paused = False
        self._unread: deque[bytes] = deque()
        self._arrives = 0.0  # when the last that was sent arrives
        self.follows: End | None = None  # the end of a connection on which a proxy sent the same request again
        if life is not None:
            life.ends.append(self)

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._context.copy().run(protocol.connection_made, self)

    def write(self, data: Any) -> None:
        if data and not (self._closing or self._cut or (self._life is not None and self._life.over)):
            self._network.carry(self, bytes(data))

    def send(self, data: bytes, when: float) -> float:
        """Let data arrive at the peer then, or behind what was sent before; returns when that is."""
        self._arrives = max(self._arrives + _NEXT, when)
        self._at(self._arrives, self.peer, self.peer._receive, data)
        return self._arrives

    def hang_up(self) -> None:
        """Close it as the kernel does when the process ends: the peer hears of it behind what was sent."""
        if not self._closing:
            self._closing = True
            self._arrives = max(self._arrives + _NEXT, self._network.soon())
            self._at(self._arrives, self.peer, self.peer._hear_end)
            if self.follows is not None:
                self.follows.hang_up()

    def break_at(self, when: float) -> None:
        """Let the connection break then, for both; what is written until then is lost."""
        for end in (self, self.peer):
            end._cut = True
            self._at(when + _NEXT, end, end._lose, ConnectionResetError(errno.ECONNRESET, "the connection broke"))

    def close(self) -> None:
        if not self._closing:
            self.hang_up()
            self._at(self._network.loop.time(), self, self._lose, None)

    def abort(self) -> None:
        self.close()

    def is_closing(self) -> bool:
        return self._closing or self._lost

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        while self._unread and not self._paused:
            self._protocol.data_received(self._unread.popleft())

    def is_reading(self) -> bool:
        return not self._paused

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        del high, low

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return cast(asyncio.BaseProtocol, self._protocol)

    def can_write_eof(self) -> bool:
        return False

    def _at(self, when: float, end: End, callback: Callable[..., None], *arguments: object) -> None:
        self._network.loop.call_at(when, callback, *arguments, context=end._context.copy())

    @property
    def _deaf(self) -> bool:
        return self._lost or (self._life is not None and self._life.over)

    def _receive(self, data: bytes) -> None:
        if self._deaf or self._closing:
            return
        if self._paused:
            self._unread.append(data)
        else:
            self._protocol.data_received(data)

    def _hear_end(self) -> None:
        if not self._deaf and not self._closing and not self._protocol.eof_received():
            self.close()

    def _lose(self, error: Exception | None) -> None:
        self._closing = True
        if not self._deaf:
            self._lost = True
            self._protocol.connection_lost(error)
        self._lost = True


class Ghost(asyncio.Protocol):
    """Who sent a request a second time, and has no use for the answer."""


@dataclass(eq=False)
class Server:
    """What an event loop has for a listener, as far as it is used."""

    sockets: list[Any]
    close: Callable[[], None]

    def is_serving(self) -> bool:
        return True

    async def wait_closed(self) -> None: ...


class Network:
    """Carries what is written, in the order of each connection; while `rough` it refuses, stalls, cuts and doubles."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.rough = True
        self.note: Callable[[str], None] = lambda _: None
        self.struck: Callable[[str], None] = lambda _: None
        self._listeners: dict[object, tuple[Any, contextvars.Context, Life | None]] = {}

    def soon(self) -> float:
        return self.loop.time() + self.loop.chance.uniform(0.0001, 0.02)

    def listen(self, factory: Any, place: tuple[Any, Any]) -> Any:
        """Register a server, for as long as its process lives."""
        entry = (factory, contextvars.copy_context(), LIFE.get())
        self._listeners[place] = entry

        def close() -> None:
            if self._listeners.get(place) is entry:
                del self._listeners[place]

        return Server([SimpleNamespace(getsockname=lambda: place)], close)

    async def connect(self, factory: Any, place: tuple[Any, Any]) -> tuple[End, Any]:
        await asyncio.sleep(self.soon() - self.loop.time())
        found = self._listeners.get(place)
        if found is None or (found[2] is not None and found[2].over) or self.happens(0.03, "connection refused"):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        protocol = factory()
        near = self._open(found, LIFE.get())
        near.begin(protocol)
        return near, protocol

    def _open(self, listener: tuple[Any, contextvars.Context, Life | None], life: Life | None) -> End:
        """Let the server accept a connection; returns the caller's end."""
        accept, context, server = listener
        near = End(self, life, contextvars.copy_context())
        far = End(self, server, context)
        near.peer, far.peer = far, near
        far.begin(context.copy().run(accept))
        return near

    def carry(self, end: End, data: bytes) -> None:
        """Bring what was written to the peer, or not."""
        if end.peer.follows is not None:
            end.peer.follows.hang_up()
        when = self.soon()
        if self.happens(0.02, "stalled"):
            when += self.loop.chance.uniform(1, 90)
        if self.happens(0.02, "cut before"):
            end.break_at(when)
        elif self.happens(0.01, "cut within"):
            end.break_at(end.send(data[: self.loop.chance.randrange(len(data))], when))
        else:
            arrived = end.send(data, when)
            if self.happens(0.03, "cut after"):
                end.break_at(arrived + self.loop.chance.choice((0, self.loop.chance.uniform(0, 2))))
            elif data.startswith(b"POST /v1/accept ") and self.happens(0.04, "doubled"):
                self._double(end, data, arrived)
        self.note(f"carried {len(data)}")

    def _double(self, end: End, data: bytes, when: float) -> None:
        """Send a request again over another connection, as a proxy does that waits for either answer.

        It closes that one with the first answer, or with the caller's. (One that goes on sending what was answered, no
        daemon could be saved from.)
        """
        listener = next(iter(self._listeners.values()), None)
        if listener is not None and listener[2] is not None and not listener[2].over:
            again = self._open(listener, None)
            again.begin(Ghost())
            again.send(data, when + self.loop.chance.uniform(0, 5))
            end.follows = again

    def happens(self, probability: float, what: str) -> bool:
        """Tell whether a fault happens now: with this probability, and never when it is calm."""
        if not self.rough or self.loop.chance.random() >= probability:
            return False
        self.struck(what)
        return True


@contextmanager
def virtual_loop(chance: random.Random) -> Iterator[Loop]:
    """Lend a loop for one course of events; what still runs at the end is ended."""
    _ENTROPY[0] = random.Random(chance.random())
    random.seed(_ENTROPY[0].random())  # what draws from the module itself
    loop = Loop(chance)
    asyncio.set_event_loop(loop)
    try:
        yield loop
    finally:
        loop.set_exception_handler(lambda *_: None)
        for _ in range(_ROUNDS):  # what is cancelled at the end of a wait may not notice it
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(asyncio.sleep(1))
        asyncio.set_event_loop(None)
        loop.close()


if __name__ == "__main__":
    install()
    sys.modules["faults.virtual_time"] = sys.modules[__name__]  # there is one of these clocks
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
