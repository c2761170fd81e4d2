"""Sending: single sends at 1 to 256 connections, and the batch route.

The baselines: a server that only decodes, SQLite with nothing around it, and JetStream.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Final

from bench.jetstream import publishes_per_second
from bench.load import Figures
from bench.processes import Daemon, daemon, decode_only, load, output_of
from bench.raw_sqlite import rows_per_second
from bench.report import Limit, Measured, Ratio, judge, judge_limit, show
from embedded import EmbeddedNats

CONNECTIONS: Final = (1, 16, 64, 256)
STREAMS: Final = 4
LINES: Final = 20_000  # on each stream
_RAW_GOALS: Final = {1: 0.5}  # connections: of raw one-row commits
_DECODE_GOALS: Final = {64: 0.6}  # connections: of decode only
_P99_GOALS: Final = {64: 25.0}  # ms
_JETSTREAM_GOAL: Final = 2.5
_BATCH_GOAL: Final = 0.7


def single_sends(directory: Path, runs: int, seconds: float) -> None:
    """Measure `POST /v1/send`; each run takes every baseline right beside the daemon."""
    for connections in CONNECTIONS:
        found: dict[str, list[Figures]] = defaultdict(list)
        raw: list[float] = []
        commits: list[float] = []
        for run in range(runs):
            place = directory / f"send-{connections}-{run}"
            place.mkdir()
            with decode_only(place) as bare:
                found["decode"].append(load(bare, connections=connections, seconds=seconds, first=0))
            raw.append(rows_per_second(place, rows_a_commit=connections, seconds=seconds))
            with daemon(place) as daemon_:
                before = daemon_.commits
                found["send"].append(load(daemon_.socket, connections=connections, seconds=seconds, first=0))
                commits.append((daemon_.commits - before) / seconds)
        _show_sends(connections, found, raw, commits)


def _show_sends(connections: int, found: dict[str, list[Figures]], raw: list[float], commits: list[float]) -> None:
    sends = [figures.per_second for figures in found["send"]]
    decoded = [figures.per_second for figures in found["decode"]]
    refused = sum(figures.refused for figures in found["send"])
    print(f"single sends, {connections} connections" + (f" ({refused} REFUSED)" if refused else ""))
    latencies = ([figures.p50 for figures in found["send"]], [figures.p99 for figures in found["send"]])
    show(Measured("POST /v1/send", sends, *latencies, commits))
    show(Measured("aiohttp, decode only", decoded))
    show(Measured(f"raw SQLite, {connections} rows a commit", raw))
    judge(Ratio("of decode only", list(zip(sends, decoded, strict=True)), _DECODE_GOALS.get(connections)))
    judge(Ratio("of raw SQLite", list(zip(sends, raw, strict=True)), _RAW_GOALS.get(connections)))
    judge_limit(Limit("p99 of a send", median(latencies[1]) * 1e3, "ms", _P99_GOALS.get(connections)))


def against_jetstream(directory: Path, runs: int, seconds: float) -> None:
    """Measure 64 senders beside 64 JetStream publishers whose server syncs every message."""
    pairs, published = [], []
    for run in range(runs):
        place = directory / f"jetstream-{run}"
        place.mkdir()
        nats = EmbeddedNats(place / "nats")
        published.append(asyncio.run(publishes_per_second(nats.start(), at_once=64, seconds=seconds)))
        nats.stop()
        with daemon(place) as daemon_:
            sent = load(daemon_.socket, connections=64, seconds=seconds, first=0).per_second
        pairs.append((sent, published[-1]))
    print("beside JetStream, sync_interval always, 64 at once")
    show(Measured("JetStream, nats-py", published))
    judge(Ratio("sends, of JetStream", pairs, _JETSTREAM_GOAL))


def batch_sends(directory: Path, runs: int, seconds: float) -> None:
    """Measure `POST /v1/send/batch` on four streams."""
    streamed, raw, commits = [], [], []
    for run in range(runs):
        place = directory / f"batch-{run}"
        place.mkdir()
        raw.append(rows_per_second(place, rows_a_commit=256, seconds=seconds))
        with daemon(place) as daemon_:
            before = daemon_.commits
            streamed.append(stream(daemon_, first=0))
            commits.append((daemon_.commits - before) * streamed[-1] / (STREAMS * LINES))
    print(f"batch sends, {STREAMS} streams")
    show(Measured("POST /v1/send/batch", streamed, commits=commits))
    show(Measured("raw SQLite, 256 rows a commit", raw))
    judge(Ratio("of raw SQLite", list(zip(streamed, raw, strict=True)), _BATCH_GOAL))


def stream(daemon_: Daemon, *, first: int, lines: int = LINES) -> float:
    """Stream `lines` on each of the streams; messages a second. Raises `RuntimeError` if one was not kept."""
    words = ["--socket", str(daemon_.socket), "--connections", str(STREAMS), "--lines", str(lines)]
    found = json.loads(output_of(["bench.stream", *words, "--first", str(first)]))
    if found["kept"] != found["sent"]:
        raise RuntimeError(f"the daemon kept {found['kept']} of {found['sent']} lines")
    return float(found["per_second"])
