"""The one load driver: any client's send, so many at once or at a steady rate, whichever system is behind it.

A send counts once its acknowledgement has come. Whatever it raises, a refusal as well as a lost connection, makes the
run void: a rate of refusals is not a rate.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count, takewhile
from typing import Final, NamedTuple

BODY_BYTES: Final = 1024


class Void(Exception):
    """A run that shows nothing; the sentence says why."""


class Load(NamedTuple):
    """What one load found."""

    sent: int
    seconds: float
    cpu: float  # seconds of this process
    began: dict[int, float]  # number -> when it was sent, in seconds since the epoch
    latencies: Sequence[float]  # seconds until the acknowledgement

    @property
    def per_second(self) -> float:
        """Acknowledged sends a second."""
        return self.sent / self.seconds


def order(number: int = 0) -> str:
    """Return a body of 1 KiB that holds the number, so that a handler can say which one came."""
    head = f'{{"order": "number-{number:012d}", "note": "'
    return head + "x" * (BODY_BYTES - len(head) - 2) + '"}'


def numbers_for(seconds: float) -> Iterator[int]:
    """Count from 0 until so much time has passed."""
    deadline = time.perf_counter() + seconds
    yield from takewhile(lambda _: time.perf_counter() < deadline, count())


async def drive(send: Callable[[int], Awaitable[object]], numbers: Iterable[int], *, at_once: int) -> Load:
    """Send every number from so many tasks, each of which waits for its acknowledgement before the next."""
    notes = _Notes()
    waiting = iter(numbers)

    async def work() -> None:
        for number in waiting:
            sent = notes.send(number)
            await send(number)
            notes.acknowledged(sent)

    await _counted(work() for _ in range(at_once))
    return notes.load()


async def drive_steadily(send: Callable[[int], Awaitable[object]], numbers: Sequence[int], *, rate: float) -> Load:
    """Send a number every 1/rate seconds, whatever becomes of those before it."""
    notes = _Notes()
    clock = asyncio.get_running_loop().time
    began = clock()

    async def one(place: int, number: int) -> None:
        await asyncio.sleep(began + place / rate - clock())
        sent = notes.send(number)
        await send(number)
        notes.acknowledged(sent)

    await _counted(one(place, number) for place, number in enumerate(numbers))
    return notes.load()


def drive_threads(send: Callable[[int], object], numbers: Iterable[int], *, at_once: int) -> Load:
    """Send every number from so many threads, for clients that block."""
    notes = _Notes()
    waiting = iter(list(numbers))  # a list's iterator may be shared by threads, a generator may not

    def work() -> None:
        for number in waiting:
            sent = notes.send(number)
            send(number)
            notes.acknowledged(sent)

    with ThreadPoolExecutor(at_once) as pool:
        for worker in [pool.submit(work) for _ in range(at_once)]:
            if (error := worker.exception()) is not None:
                raise _refused(error)
    return notes.load()


def percentiles(values: Iterable[float]) -> tuple[float, float]:
    """Return the p50 and the p99 of the values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]


class _Notes:
    """When each send of one load began, and how long it took."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}
        self._latencies: list[float] = []
        self._cpu, self._first = time.process_time(), time.perf_counter()

    def send(self, number: int) -> float:
        self._began[number] = time.time()
        return time.perf_counter()

    def acknowledged(self, sent: float) -> None:
        self._latencies.append(time.perf_counter() - sent)

    def load(self) -> Load:
        if not self._latencies:
            raise Void("nothing was sent")
        took, cpu = time.perf_counter() - self._first, time.process_time() - self._cpu
        return Load(len(self._latencies), took, cpu, self._began, self._latencies)


async def _counted(work: Iterable[Awaitable[None]]) -> None:
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await asyncio.gather(*tasks)
    except Exception as error:
        raise _refused(error) from error
    finally:
        for task in tasks:
            task.cancel()


def _refused(error: BaseException) -> Void:
    return Void(f"a send failed: {type(error).__name__}: {error}")
