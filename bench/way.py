"""The whole way of a message, from its sender to its handler: ours, and each peer right after it in the same run."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.driver import Load, drive, drive_steadily, drive_threads, percentiles
from bench.processes import Meter
from bench.report import Measure, Results
from bench.systems import SYSTEMS, Missing, System

_AT_ONCE: Final = 64
_RATE: Final = 200  # sends a second
_WARM_UP: Final = 200  # messages that do not count
_SETTLE_SECONDS: Final = 0.5  # after the last message was handled: what is done for it later is part of its cost
_PAUSE_SECONDS: Final = (0.05, 0.15)  # before a lone message


class Trip(NamedTuple):
    """What one load of one system found."""

    per_second: float  # from the first send to the last message that was handled
    p50: float  # seconds
    p99: float
    cpu: Mapping[str, float]  # part -> seconds a message
    wakeups: Mapping[str, float]  # part -> how often a thread of it is woken for a message


class Usage(NamedTuple):
    """What the parts of a system have used so far."""

    cpu: Mapping[str, float]
    wakeups: Mapping[str, int]


async def full(place: Path, scale: float, results: Results) -> AsyncIterator[Measure]:
    """Send 3,000 messages, 64 at once, as fast as they are taken."""
    found: dict[str, Trip] = {}
    async for name, system in _systems(place, SYSTEMS, results):
        found[name] = await _full(system, _numbers(3000, scale))
    for name, trip in found.items():
        yield Measure(f"{name}: messages a second", trip.per_second, "/s")
        for each in _parts(name, trip):
            yield each
    for name, trip in found.items():
        if name != "Postroom":
            yield Measure(f"Postroom, of {name}", found["Postroom"].per_second / trip.per_second, "x")


async def steady(place: Path, scale: float, results: Results) -> AsyncIterator[Measure]:
    """Send 200 messages a second for five seconds."""
    found: dict[str, Trip] = {}
    async for name, system in _systems(place, SYSTEMS, results):
        found[name] = await _steady(system, _numbers(1000, scale))
    for each in _latencies(found):
        yield each
    for name, trip in found.items():
        for each in _parts(name, trip):
            yield each


async def lone(place: Path, scale: float, results: Results) -> AsyncIterator[Measure]:
    """Send 40 messages, each alone, after a pause of chance length."""
    found: dict[str, Trip] = {}
    async for name, system in _systems(place, SYSTEMS, results):
        found[name] = await _lone(system, _numbers(40, scale))
    for each in _latencies(found):
        yield each


def _numbers(count: int, scale: float) -> range:
    return range(_WARM_UP, _WARM_UP + max(1, round(count * scale)))


async def _systems(
    place: Path, names: Sequence[str] | Mapping[str, object], results: Results
) -> AsyncIterator[tuple[str, System]]:
    """Run one system after the other, warmed up; what this machine lacks is noted."""
    for name in names:
        try:
            async with SYSTEMS[name](place / name.replace(" ", "-")) as system:
                await drive(system.send, range(_WARM_UP), at_once=_AT_ONCE)
                await system.handled.until(_WARM_UP)
                yield name, system
        except Missing as error:
            results.missing.append(str(error))


async def _full(system: System, numbers: range) -> Trip:
    before = _usage(system)
    if system.blocking is None:
        load = await drive(system.send, numbers, at_once=_AT_ONCE)
    else:
        load = drive_threads(system.blocking, numbers, at_once=_AT_ONCE)
    await system.handled.until(numbers.stop)
    return await _trip(system, load, before)


async def _steady(system: System, numbers: range) -> Trip:
    before = _usage(system)
    load = await drive_steadily(system.send, numbers, rate=_RATE)
    await system.handled.until(numbers.stop)
    return await _trip(system, load, before)


async def _lone(system: System, numbers: range) -> Trip:
    before = _usage(system)

    async def send(number: int) -> None:
        await system.send(number)
        await system.handled.until(number + 1)
        await asyncio.sleep(random.uniform(*_PAUSE_SECONDS))  # noqa: S311 - no timer of anybody's is to fall in step

    return await _trip(system, await drive(send, numbers, at_once=1), before)


def _usage(system: System) -> Usage:
    meter = Meter(system.parts)
    return Usage(meter.cpu(), meter.wakeups())


async def _trip(system: System, load: Load, before: Usage) -> Trip:
    """Sum up what became of a load that was handled."""
    at = system.handled.at
    took = max(at[number] for number in load.began) - min(load.began.values())
    await asyncio.sleep(_SETTLE_SECONDS)
    after = _usage(system)
    cpu = {part: (used - before.cpu[part]) / load.sent for part, used in after.cpu.items()}
    wakeups = {part: (count - before.wakeups[part]) / load.sent for part, count in after.wakeups.items()}
    waited = percentiles(at[number] - began for number, began in load.began.items())
    return Trip(load.sent / took, *waited, cpu, wakeups)


def _latencies(found: Mapping[str, Trip]) -> Iterator[Measure]:
    for name, trip in found.items():
        yield Measure(f"{name}: p50", trip.p50 * 1e3, "ms")
        yield Measure(f"{name}: p99", trip.p99 * 1e3, "ms")
        if name != "Postroom":
            yield Measure(f"Postroom: p50, of {name}'s", found["Postroom"].p50 / trip.p50, "x")


def _parts(name: str, trip: Trip) -> Iterator[Measure]:
    """Say what a message costs, in all processes and in each."""
    yield Measure(f"{name}: CPU per message", sum(trip.cpu.values()) * 1e6, "µs")
    for part, seconds in trip.cpu.items():
        yield Measure(f"{name}: CPU per message", seconds * 1e6, "µs", part)
    yield Measure(f"{name}: wake-ups per message", sum(trip.wakeups.values()), "")
    for part, count in trip.wakeups.items():
        yield Measure(f"{name}: wake-ups per message", count, "", part)
