"""Damage done to an outbox's files, and the reckoning after its recovery: what was written is saved or said missing."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from outbox import Outbox
from outbox.recover import Recovery
from outbox.settled import text_of
from postroom._wire.ids import new_id
from postroom._wire.message import prepare
from postroom.chassis.exits import Exit
from support.outboxes import WHY, accepted, dead, done
from support.terminal import Terminal

PAGE: Final = 4096
SETTLED: Final = ("done", "aborted")
Files = dict[str, bytearray]  # by what they are called beyond outbox.db


class Written(NamedTuple):
    """A row, as far as a recovery must keep it."""

    seq: int
    row_id: str
    status: str
    fingerprint: bytes
    payload: bytes
    buried: bool


async def filled(directory: Path, rows: int, *, logged: bool) -> dict[str, bytes]:
    """Fill an outbox with rows of all kinds, and return its files, as a kill leaves them where `logged`."""
    outbox = await Outbox.open(directory)
    random = Random(rows)
    for number in range(rows):
        name = random.choice([new_id(), str(UUID(int=random.getrandbits(128))), f"order-{number}"])
        body = "x" * random.choice([10, 200, 1000, 6000])
        message = {"to": "topic:orders", "body": body, "client_message_id": name}
        await accepted(outbox, prepare(msgspec.json.encode(message)))
        if number == rows // 3:
            claimed = await outbox.claim(limit=rows, max_bytes=2**30)
            await outbox.settle([done(row.row_id) for row in claimed])
            await outbox.prune(2**62, **WHY)
    claimed = await outbox.claim(limit=rows // 3, max_bytes=2**30)
    await outbox.settle([(dead if place % 3 else done)(row.row_id) for place, row in enumerate(claimed[:-2])])
    for row in claimed[1:9:3]:
        await outbox.act("abort", row.row_id, **WHY)
        await outbox.act("requeue", claimed[claimed.index(row) + 1].row_id, **WHY)
    files = {part: Path(f"{directory}/outbox.db{part}").read_bytes() for part in ("", "-wal")} if logged else {}
    await outbox.close()
    return files or {"": Path(f"{directory}/outbox.db").read_bytes()}


def written(files: dict[str, bytes] | Files) -> dict[str, Written]:
    """Return the rows that a sound file has, by their client_message_ids."""
    with TemporaryDirectory() as directory:
        _lay(Path(directory), files)
        with closing(sqlite3.connect(f"{directory}/outbox.db")) as db:
            found = db.execute(
                "SELECT client_message_id, seq, id, status, request_fingerprint, payload, "
                "last_error IS 'unreadable: the row was damaged' FROM outbox_whole"
            ).fetchall()
    return {text_of(name): Written(seq, text_of(row_id), *others) for name, seq, row_id, *others in found}


def after(files: dict[str, bytes], damage: Callable[[Files], None]) -> tuple[int, Recovery, dict[str, Written]]:
    """Damage a copy of the files and recover it as an operator does; the exit code, and the rows of the new file."""
    damaged = {part: bytearray(content) for part, content in files.items()}
    damage(damaged)
    with TemporaryDirectory() as directory:
        _lay(Path(directory), damaged)
        operator = Terminal(
            POSTROOM_DAEMON_MESH="demo",
            POSTROOM_DAEMON_BROKER_URL="http://127.0.0.1:9",
            POSTROOM_DAEMON_BROKER_TOKEN_FILE=f"{directory}/token",
            POSTROOM_DAEMON_STATE_DIRECTORY=directory,
        )
        done = operator.run("outbox", "recover", "--yes", "--json")
        assert done.out, done.err
        recovery = Recovery(**done.json[0])
        kept = {part: Path(f"{recovery.damaged}{part}").read_bytes() for part in damaged}
        assert kept == damaged, "the damaged files were changed"
        with closing(sqlite3.connect(f"{directory}/outbox.db")) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        rows = written({"": Path(f"{directory}/outbox.db").read_bytes()})
    return done.code, recovery, rows


def reckon(before: dict[str, Written], code: int, recovery: Recovery, rows: dict[str, Written]) -> None:
    """Assert that each row was saved as it was, or is counted as missing, and that known ids stay used.

    The exit code is 0 only where all was saved: the rows, the lines of the log, and the newest state of each.
    """
    buried = {name for name, row in rows.items() if row.buried}
    saved = {name: row for name, row in rows.items() if name not in buried}
    assert rows.keys() <= before.keys()
    for name, row in saved.items():
        kept = before[name] if row.payload else before[name]._replace(payload=b"")
        if recovery.damaged_frames:  # the recovery says that rows may be older than they were
            kept = kept._replace(status=row.status, payload=kept.payload or row.payload)
        assert row == kept, name
        assert row.payload or row.status in SETTLED, name
    lost = before.keys() != saved.keys() or recovery.lost_log_lines or recovery.damaged_frames
    assert code == (Exit.FAILED if lost else Exit.OK)
    assert (len(saved), len(buried)) == (recovery.saved, recovery.buried)
    if recovery.missing is None:  # the newest page of the counters may be among those that the log lost
        assert recovery.damaged_frames
    else:
        assert recovery.missing == len(before) - len(saved)


def overwrite(part: str, start: int, content: bytes) -> Callable[[Files], None]:
    def damage(files: Files) -> None:
        files[part][start : start + len(content)] = content

    return damage


def at_random(seed: int) -> Callable[[Files], None]:
    """Overwrite a few bytes, or many, of any of the files: the same ones for each seed."""

    def damage(files: Files) -> None:
        random = Random(seed)
        content: Any = files[random.choice(sorted(files))]
        size = min(random.choice([1, 4, 16, 64, 512, PAGE]), len(content))
        start = random.randrange(len(content) - size + 1)
        content[start : start + size] = random.choice([random.randbytes(size), bytes(size), b"\xa5" * size])

    return damage


def _lay(directory: Path, files: dict[str, bytes] | Files) -> None:
    directory.chmod(0o700)
    for part, content in files.items():
        Path(f"{directory}/outbox.db{part}").write_bytes(content)
