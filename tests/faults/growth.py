"""What grows with what a daemon holds: its memory, and the time until it accepts again after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import shutil
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final
from uuid import UUID

from support.mailroom import TOPIC, LoneDaemon

from faults.campaign import Run, goal
from outbox import Outbox
from outbox.settled import QUERIES, checksum_of, key_of, number_of, pack, read_salt
from postroom import AsyncClient, PostroomError, new_id
from postroom._wire.sql import load_queries

MIB: Final = 1024 * 1024
_MANY: Final = 3_000_000  # rows
_SOME: Final = 100_000
_CHUNK: Final = 100_000  # rows of one transaction
_LOOK_SECONDS: Final = 0.005
_SENDS: Final = 200  # messages that a daemon takes between two kills, or before its memory is looked at
_RECOVERED: Final = {_SOME: 1.5, _MANY: 5.0}  # seconds until it accepts, in 99 of 100
_KILLS_OF_MANY: Final = 5  # of so many the kills with few rows are, one is with many
_ROWS_IN: Final = 150 * MIB  # bytes of memory that a daemon with many rows may take
_CLIENTS_IN: Final = 256 * MIB
_IDLE: Final = 1000  # connections
_SLOW: Final = 500
_SLOW_BODY: Final = 100_000  # bytes that a slow client promises, and sends half of


@goal("F13", "from kill -9 to accepting", alone=True)
async def recovery(run: Run) -> None:
    """Kill a daemon with few and with many rows, and time its return."""
    for rows, kills in ((_SOME, run.size.trials), (_MANY, max(1, run.size.trials // _KILLS_OF_MANY))):
        held = max(1, round(rows * run.scale))
        daemon = LoneDaemon(run.place())
        daemon.state.mkdir(mode=0o700)
        shutil.copyfile(await _filled(run, held), daemon.state / "outbox.db")
        await daemon.start()
        seconds = []
        try:
            for _ in range(kills):
                async with AsyncClient(daemon.socket) as client:
                    for _ in range(run.chance.randrange(_SENDS)):
                        await client.send(TOPIC, "before the kill")
                daemon.process.kill()
                run.struck["kill -9"] += 1
                seconds.append(await _back(daemon))
                run.trials += 1
        finally:
            daemon.stop()
        seconds.sort()
        slowest = seconds[len(seconds) * 99 // 100]
        run.figures.append(f"{held:,} rows: median {seconds[len(seconds) // 2]:.2f} s, p99 {slowest:.2f} s")
        run.check(slowest <= _RECOVERED[rows], f"with {held:,} rows it accepts after {slowest:.2f} s")


async def _back(daemon: LoneDaemon) -> float:
    """Start it and return how long it takes until a send is acknowledged."""
    began = time.monotonic()
    daemon.process.start()
    async with AsyncClient(daemon.socket, patience=0) as client:
        while True:
            try:
                await client.send(TOPIC, "after the kill")
            except PostroomError:
                await asyncio.sleep(_LOOK_SECONDS)
            else:
                return time.monotonic() - began


@goal("F12", "memory", alone=True)
async def memory(run: Run) -> None:
    """Look at the memory of a daemon with many rows, and of one with many idle and slow clients."""
    held = max(1, round(_MANY * run.scale))
    full = LoneDaemon(run.place())
    full.state.mkdir(mode=0o700)
    shutil.copyfile(await _filled(run, held), full.state / "outbox.db")
    await full.start()
    try:
        async with AsyncClient(full.socket) as client:
            for _ in range(_SENDS):
                await client.send(TOPIC, "one more")
            await client.health()
        used = _peak_memory(full.process.pid)
    finally:
        full.stop()
    run.struck["row held"] += held
    run.figures.append(f"{used // MIB} MB with {held:,} rows")
    run.check(used <= _ROWS_IN, f"{used // MIB} MB with {held:,} rows")

    crowded = LoneDaemon(run.place())
    await crowded.start()
    try:
        with contextlib.ExitStack() as undo:
            for number in range(_IDLE + _SLOW):
                connection = undo.enter_context(socket.socket(socket.AF_UNIX))
                connection.connect(str(crowded.socket))
                if number >= _IDLE:
                    connection.sendall(_half_a_request())
            async with AsyncClient(crowded.socket) as client:
                for _ in range(_SENDS):
                    await client.send(TOPIC, "among others")
            used = _peak_memory(crowded.process.pid)
    finally:
        crowded.stop()
    run.trials = 1
    run.struck["client, idle or slow"] += _IDLE + _SLOW
    run.figures.append(f"{used // MIB} MB with {_IDLE:,} idle and {_SLOW:,} slow clients")
    run.check(used <= _CLIENTS_IN, f"{used // MIB} MB with {_IDLE:,} idle and {_SLOW:,} slow clients")


def _half_a_request() -> bytes:
    head = f"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Length: {_SLOW_BODY}\r\n\r\n"
    return head.encode() + b'{"to":"topic:orders","body":"'.ljust(_SLOW_BODY // 2, b"x")


def _peak_memory(pid: int) -> int:
    """Return the most resident memory that a process ever had, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024


async def _filled(run: Run, rows: int) -> Path:
    """Return an outbox with so many rows of old, made once in a campaign."""
    directory = run.servers.directory / f"outbox-{rows}"
    if not directory.exists():
        await (await Outbox.open(directory)).close()
        with closing(sqlite3.connect(directory / "outbox.db", isolation_level=None)) as db:
            db.execute("PRAGMA synchronous = OFF")
            salt = read_salt(db)
            common = number_of(db, (TOPIC, "next", "1000:1000", ""))
            for first in range(1, rows + 1, _CHUNK):
                db.execute("BEGIN")
                ids = [new_id() for _ in range(min(_CHUNK, rows + 1 - first))]
                db.executemany(QUERIES["move"], _settled(ids, first, common))
                db.executemany(QUERIES["key"], sorted((key_of(name, salt), first + n) for n, name in enumerate(ids)))
                db.execute("COMMIT")
            db.execute(load_queries("outbox", "sql/recover.sql")["recount"])
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return directory / "outbox.db"


def _settled(ids: list[str], first: int, common: int) -> Iterator[tuple[object, ...]]:
    now = time.time_ns() // 1_000_000 - 10 * 86_400_000
    for number, name in enumerate(ids, first):
        broker_id = pack(str(UUID(int=number)))
        fingerprint = hashlib.sha256(name.encode()).digest()
        row = (number, pack(new_id()), pack(name), fingerprint, common, 1, now, 50, 1000)
        values = (*row, None, broker_id, number, None, None, None, None)
        yield (*values, checksum_of(values))
