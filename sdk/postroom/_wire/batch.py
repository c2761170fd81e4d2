"""`send_many`: a stream of messages through `POST /v1/send/batch`, NDJSON both ways (docs/contract/send.md#send-11).

Promises: every message gets exactly one result; at most `WINDOW` messages are sent and unanswered; a message that a
broken connection left unanswered goes out again under the same id, which makes the second try harmless at the daemon.
Fails with the `PostroomError` that outlasted the caller's patience; the results so far have been yielded by then.

The backlog is filled from the caller's iterable and emptied into one request after another. Each end waits for the
other, so a million lines are never in memory at once. What a broken connection left unanswered is given back and goes
out first. An ordinary iterable may block, so a thread walks it, and the event loop goes on.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

from postroom._wire.arguments import encode, with_id
from postroom._wire.message import SendRequest
from postroom._wire.retry import Patience
from postroom._wire.sends import BatchResult
from postroom._wire.transport import NDJSON, Transport
from postroom.errors import InvalidMessage, PostroomError, Problem, error_for

WINDOW: Final = 4096  # messages sent and unanswered
MAX_UNREAD: Final = 16  # pieces of the answer that the caller has not taken yet
IDLE_SECONDS: Final = 1.0  # a request without a line ends after so long
PATH: Final = "/v1/send/batch"
MAX_WAITING: Final = 4096  # lines
MAX_CHUNK_LINES: Final = 512
MAX_CHUNK_BYTES: Final = 256 * 1024
T = TypeVar("T")

MAX_AHEAD: Final = 1024  # items that the thread may be ahead


class Batch:
    """One `send_many`: the caller's messages, and what became of each."""

    def __init__(
        self, transport: Transport, messages: AsyncIterator[SendRequest], patience: Patience, headers: Mapping[str, str]
    ) -> None:
        """Send `headers` with each request."""
        self._transport = transport
        self._headers = headers
        self._messages = messages
        self._patience = patience
        self._backlog = Backlog()
        self._results: asyncio.Queue[list[BatchResult]] = asyncio.Queue()
        self._unread = asyncio.Semaphore(MAX_UNREAD)
        self._unanswered: deque[Line] = deque()
        self._answered = asyncio.Event()
        self._later: list[Line] = []  # answered with a problem that says to try again
        self._why_later: Problem | None = None

    async def results(self) -> AsyncGenerator[list[BatchResult], None]:
        """Yield results as they come; `line` says which message each is for, counted from 1."""
        working = asyncio.create_task(self._work())
        working.add_done_callback(lambda _: self._results.put_nowait([]))  # the end, whatever caused it
        try:
            while results := await self._results.get():
                self._unread.release()
                yield results
            await working
        finally:
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)

    async def _work(self) -> None:
        reading = asyncio.create_task(self._read_messages())
        try:
            while await self._backlog.filled():
                await self._one_request()
            await reading
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    async def _read_messages(self) -> None:
        """Put every message into the backlog, encoded; one that JSON cannot represent is refused alone."""
        number = 0
        try:
            async for message in self._messages:
                number += 1
                try:
                    line = Line(number, encode(with_id(message)) + b"\n")
                except InvalidMessage as error:
                    await self._publish([BatchResult(line=number, problem=error.problem)])
                else:
                    await self._backlog.put(line)
        finally:
            self._backlog.close()

    async def _publish(self, results: list[BatchResult]) -> None:
        """Pass results to the caller, once it has taken most of the earlier ones."""
        await self._unread.acquire()
        self._results.put_nowait(results)

    async def _one_request(self) -> None:
        """Send what waits in one request, for as long as that lasts; lines without a final answer wait again."""
        over = asyncio.Event()
        try:
            async with self._transport.open(
                "POST", PATH, data=self._body(over), headers=self._headers, media=NDJSON, expected=NDJSON
            ) as answer:
                async for lines in self._transport.lines(answer):
                    await self._settle_all(lines)
            if self._unanswered:
                raise self._transport.peer.lost()
            if self._why_later:
                raise error_for(self._why_later)
        except PostroomError as error:
            over.set()
            # let every line without a final answer wait again, in the caller's order
            waiting = sorted([*self._later, *self._unanswered])
            self._later.clear()
            self._unanswered.clear()
            self._why_later = None
            self._backlog.give_back(waiting)
            if self._backlog.waits or not error.retryable:
                await self._patience.pause(error)
        finally:
            over.set()

    async def _body(self, over: asyncio.Event) -> AsyncGenerator[bytes, None]:
        """Yield chunks of lines; the request ends when none come for a while, and the next line opens another.

        Once the request is `over` it must not take a line, which nobody would ever answer.
        """
        while not self._why_later and not over.is_set():
            if len(self._unanswered) >= WINDOW:
                self._answered.clear()
                await self._answered.wait()
            elif lines := self._backlog.take():
                self._unanswered.extend(lines)
                yield b"".join(line.data for line in lines)
            elif self._backlog.finished or not (await self._more_soon() or self._unanswered):
                return

    async def _more_soon(self) -> bool:
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                return await self._backlog.filled()
        except TimeoutError:
            return False

    async def _settle_all(self, answers: list[bytes]) -> None:
        """Match answers that came together with the oldest unanswered lines, and publish the results.

        Those before an invalid answer are published too; a line that has to be tried again has none yet.
        """
        results: list[BatchResult] = []
        try:
            for answer in answers:
                result = self._transport.decode(answer, BatchResult)
                if not self._unanswered or (result.result is None) == (result.problem is None):
                    detail = "it answered a line that was not sent, or did not answer with one result"
                    raise self._transport.peer.foreign(detail)
                line = self._unanswered.popleft()
                if result.problem is not None and result.problem.retryable:
                    self._later.append(line)
                    self._why_later = result.problem
                else:
                    result.line = line.number
                    results.append(result)
        finally:
            self._answered.set()
            if results:
                self._patience.restart()
                await self._publish(results)


class Line(NamedTuple):
    """One line of a batch: its number in the caller's iterable, from 1, and its bytes with the line's end."""

    number: int
    data: bytes


class Backlog:
    """Lines on their way from the caller to the daemon."""

    def __init__(self) -> None:
        self._waiting: deque[Line] = deque()
        self._filled = asyncio.Event()  # a line waits, or no more will come
        self._drained = asyncio.Event()  # there is room
        self._drained.set()
        self._closed = False

    @property
    def waits(self) -> bool:
        """Whether a line waits."""
        return bool(self._waiting)

    @property
    def finished(self) -> bool:
        """Whether no line waits and none will come."""
        return self._closed and not self._waiting

    async def put(self, line: Line) -> None:
        """Add a line once there is room."""
        await self._drained.wait()
        self._waiting.append(line)
        self._update()

    def give_back(self, lines: Iterable[Line]) -> None:
        """Put lines that were taken but not answered back before all others, in their order."""
        self._waiting.extendleft(reversed(list(lines)))
        self._update()

    def close(self) -> None:
        """Say that no more lines will come, save those that are given back."""
        self._closed = True
        self._update()

    async def filled(self) -> bool:
        """Wait until a line waits (True) or none will come any more (False)."""
        await self._filled.wait()
        return bool(self._waiting)

    def take(self) -> list[Line]:
        """Take as many of the waiting lines as make one chunk; none where none wait."""
        taken: list[Line] = []
        size = 0
        while self._waiting and len(taken) < MAX_CHUNK_LINES and size < MAX_CHUNK_BYTES:
            taken.append(self._waiting.popleft())
            size += len(taken[-1].data)
        self._update()
        return taken

    def _update(self) -> None:
        has_filled, has_drained = bool(self._waiting) or self._closed, len(self._waiting) < MAX_WAITING
        for event, wanted in ((self._filled, has_filled), (self._drained, has_drained)):
            (event.set if wanted else event.clear)()


async def feed(items: Iterable[T] | AsyncIterable[T]) -> AsyncGenerator[T, None]:
    """Yield the items of any iterable; what the iterable raises is raised here."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    elif isinstance(items, Sequence):
        for item in items:
            yield item
    else:
        walk = _Walk(items)
        try:
            async for item in walk.items():
                yield item
        finally:
            walk.stop()


class _Walk(Generic[T]):
    """A daemon thread that walks `items`, at most `MAX_AHEAD` before its reader."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = items
        self._ahead: deque[T] = deque()
        self._room = threading.Semaphore(MAX_AHEAD)
        self._loop = asyncio.get_running_loop()
        self._more = asyncio.Event()
        self._stopped = False
        self._ended = False
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="postroom-feed", daemon=True).start()

    async def items(self) -> AsyncIterator[T]:
        """Yield what the thread finds, in order."""
        while True:
            await self._more.wait()
            self._more.clear()
            ended = self._ended  # read first: what was found before the end is still yielded
            while self._ahead:
                self._room.release()
                yield self._ahead.popleft()
            if ended:
                break
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Let the thread end at its next item."""
        self._stopped = True
        self._room.release()

    def _run(self) -> None:
        try:
            for item in self._items:
                self._room.acquire()
                if self._stopped:
                    return
                self._ahead.append(item)
                if len(self._ahead) == 1:
                    self._wake()
        except BaseException as error:  # noqa: BLE001 - raised again where the items are read
            self._error = error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._more.set)
        except RuntimeError:
            self._stopped = True  # the loop is closed: nobody reads any more
