"""Sending to a daemon whose broker is never there: single sends, random ids, the batch route, a large outbox."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from bench.driver import Void, percentiles
from bench.processes import Daemon, daemon, decode_only, load, output_of
from bench.raw_sqlite import rows_per_second
from bench.report import Measure, Results
from outbox import Outbox, OutboxSettings
from outbox.outbox import CLAIM_AT_ONCE, CLAIM_ROWS

STREAMS: Final = 4
LINES: Final = 20_000  # on each stream
_SECONDS: Final = 5.0  # of each load
_CONNECTIONS: Final = {1: "one connection", 64: "64 connections"}
_RAW: Final = {1: "of raw one-row commits", 64: "of raw SQLite, 64 rows a commit"}
_BACKLOGS: Final = (1_000_000, 3_000_000)
_CLAIMS: Final = 200  # of each size


async def single(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Send over one connection and over 64: beside a server that only decodes, and SQLite with a bare table."""
    seconds = _SECONDS * scale
    for connections, name in _CONNECTIONS.items():
        here = place / str(connections)
        here.mkdir()
        with decode_only(here) as bare:
            decoded = load(bare, connections=connections, seconds=seconds, first=0)
        raw = rows_per_second(here, rows_a_commit=connections, seconds=seconds)
        with daemon(here / "daemon") as daemon_:
            found = load(daemon_.socket, connections=connections, seconds=seconds, first=0)
        yield Measure(f"{name}, sends", found.per_second, "/s")
        yield Measure(f"{name}, p50", found.p50 * 1e3, "ms")
        yield Measure(f"{name}, p99", found.p99 * 1e3, "ms")
        yield Measure(f"{name}, of decode only", found.per_second / decoded.per_second, "x")
        yield Measure(f"{name}, {_RAW[connections]}", found.per_second / raw, "x")


async def random_ids(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Send over 64 connections with ids in no order, beside ids in time order."""
    with daemon(place / "ordered") as daemon_:
        ordered = load(daemon_.socket, connections=64, seconds=_SECONDS * scale, first=0)
    with daemon(place / "random") as daemon_:
        found = load(daemon_.socket, connections=64, seconds=_SECONDS * scale, first=0, random_ids=True)
    yield Measure("random ids, sends", found.per_second, "/s")
    yield Measure("random ids, p99", found.p99 * 1e3, "ms")
    yield Measure("random ids, of ids in time order", found.per_second / ordered.per_second, "x")


async def batch(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Stream lines into the batch route over four connections, beside SQLite with 256 rows per commit."""
    raw = rows_per_second(place, rows_a_commit=256, seconds=_SECONDS * scale)
    with daemon(place / "daemon") as daemon_:
        streamed = stream(daemon_, first=0, lines=round(LINES * scale))
    yield Measure("batch sends", streamed, "/s")
    yield Measure("of raw SQLite, 256 rows a commit", streamed / raw, "x")


async def backlog(place: Path, scale: float, _results: Results) -> AsyncIterator[Measure]:
    """Send into an outbox with millions of rows, beside an empty one, and claim from it."""
    filled, seconds = 0, _SECONDS * scale
    for rows in _BACKLOGS:
        name, here = f"{rows:,} rows", place / "filled"
        with daemon(here) as full:
            wanted = round(rows * scale)
            stream(full, first=filled, lines=(wanted - filled) // STREAMS)
            filled = wanted
            for run in range(3):
                with daemon(place / f"empty-{rows}-{run}") as empty:
                    alone = load(empty.socket, connections=64, seconds=seconds, first=0)
                found = load(full.socket, connections=64, seconds=seconds, first=filled)
                filled += found.answers + 64
                yield Measure(f"{name}, p99", found.p99 * 1e3, "ms")
                yield Measure(f"{name}, sends of the empty outbox", found.per_second / alone.per_second, "x")
            yield Measure(f"{name}, resident memory", full.resident_bytes / 2**20, "MiB")
        for size, what in ((CLAIM_AT_ONCE, "a claim's transaction"), (CLAIM_ROWS, "a whole claim")):
            yield Measure(
                f"{name}, {what}, p99", await _claims(here / "state", size, max(1, round(_CLAIMS * scale))) * 1e3, "ms"
            )


async def _claims(state: Path, rows: int, count: int) -> float:
    """Claim so often from a stopped daemon's outbox; return the p99 in seconds."""
    outbox = await Outbox.open(state, OutboxSettings(max_bytes=64 * 2**30))
    took = []
    try:
        for _ in range(count):
            began = time.perf_counter()
            claimed = await outbox.claim(limit=rows)
            took.append(time.perf_counter() - began)
            if len(claimed) != rows:
                raise Void(f"a claim of {rows} rows found {len(claimed)}")
    finally:
        await outbox.close()
    return percentiles(took)[1]


def stream(daemon_: Daemon, *, first: int, lines: int = LINES) -> float:
    """Stream `lines` on each of the streams; messages a second. Raises `Void` if one was not kept."""
    words = ["--socket", str(daemon_.socket), "--connections", str(STREAMS), "--lines", str(lines)]
    found = json.loads(output_of(["bench.stream", *words, "--first", str(first)]))
    if found["kept"] != found["sent"]:
        raise Void(f"the daemon kept {found['kept']} of {found['sent']} lines")
    return float(found["per_second"])
