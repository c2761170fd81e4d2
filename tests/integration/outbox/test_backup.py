"""A copy of a running outbox: whole, equal up to its moment, and never at the cost of sends (docs/backup.md)."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from support.outboxes import ALICE, OPERATOR, WHY, accepted, done, killed_at_a_rename, opened, send
from support.small_disk import run_on_a_small_disk
from support.waiting import until

from outbox import Accepted, Outbox, Unanswered
from outbox.backup import Backup, restore
from outbox.recover import recover
from postroom._wire.nouns import LogQuery
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import Conflict, InvalidMessage, PostroomError, TryAgain

OpenOutbox = Callable[..., Awaitable[Outbox]]


async def write_out(copy: Backup, target: Path) -> None:
    content = b""
    while piece := await copy.piece(len(content)):
        content += piece
    assert len(content) == copy.size
    target.write_bytes(content)


async def copied(source: Outbox, target: Path) -> None:
    """Write a backup to a file."""
    async with source.backup(**WHY) as copy:
        await write_out(copy, target)


async def test_a_backup_is_equal_up_to_its_moment_while_sends_go_on(outbox: Outbox, tmp_path: Path) -> None:
    for start in range(0, 3000, 500):
        await accepted(outbox, *(send(f"old-{start + each}", "x" * 1000) for each in range(500)))
    answered: list[str] = []
    going = True

    async def load(name: str) -> None:
        while going:
            row = f"{name}-{len(answered)}"
            await accepted(outbox, send(row, "y" * 500))
            answered.append(row)
            await outbox.settle([done(each.row_id) for each in await outbox.claim(limit=5)])

    senders = [asyncio.create_task(load(name)) for name in "abc"]
    await until(lambda: len(answered) >= 50)
    before = list(answered)
    async with outbox.backup(**WHY) as copy:
        during = list(answered)
        await write_out(copy, tmp_path / "copy.db")
    going = False
    await asyncio.gather(*senders)
    assert len(during) > len(before), "nothing was sent while the copy was made"
    with opened(tmp_path / "copy.db") as db:
        kept = [name for (name,) in db.execute("SELECT client_message_id FROM outbox ORDER BY seq")]
        assert {*before} <= {*kept}
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        counted = dict(db.execute("SELECT status, count(*) FROM outbox GROUP BY status").fetchall())
        tally = db.execute("SELECT pending, inflight, done FROM tally").fetchone()
        assert tally == tuple(counted.get(each, 0) for each in ("pending", "inflight", "done"))
    with opened(outbox._store.path) as db:  # the same rows in the same order, and then those that came later
        now = [name for (name,) in db.execute("SELECT client_message_id FROM outbox ORDER BY seq")]
    assert now[: len(kept)] == kept


async def test_a_backup_opens_as_an_outbox_with_payloads_and_with_who_made_it(outbox: Outbox, tmp_path: Path) -> None:
    (row,) = await accepted(outbox, send("kept", "a body"))
    await outbox.set_relay_control(None, paused=True, **WHY)
    (tmp_path / "there").mkdir(mode=0o700)
    await copied(outbox, tmp_path / "there" / "outbox.db")
    await accepted(outbox, send("later"))
    async with await Outbox.open(tmp_path / "there") as restored:
        assert (await restored.find_all(["later"])) == []
        (claimed,) = await restored.claim()
        assert (claimed.row_id, claimed.payload) == (row.row_id, send("kept", "a body").payload)
        assert (await restored.relay_controls())[""].paused
        log = (await restored.operations(LogQuery())).lines
    assert [(line.verb, line.reason, line.actor) for line in log if line.verb == "backup"] == [
        ("backup", WHY["reason"], str(OPERATOR))
    ]


async def test_a_backup_leaves_nothing_behind_and_a_killed_ones_file_is_no_hindrance(
    outbox: Outbox, state: Path, tmp_path: Path
) -> None:
    (state / "outbox.db.backup").write_text("of a daemon that was killed")
    before = {file.name for file in state.iterdir()} - {"outbox.db.backup"}
    await copied(outbox, tmp_path / "copy.db")
    assert {file.name for file in state.iterdir()} == before


async def test_a_start_removes_what_was_killed_before_it_was_whole(open_outbox: OpenOutbox, state: Path) -> None:
    """It may be as large as the outbox, and has bodies of messages."""
    await (await open_outbox()).close()
    before = {file.name for file in state.iterdir()}
    for kind in ("backup", "recovering", "recovering-wal", "restoring", "restoring-wal", "restoring-shm"):
        (state / f"outbox.db.{kind}").write_text("of a command that was killed")
    await (await open_outbox()).close()
    assert {file.name for file in state.iterdir()} == before


async def test_one_backup_is_made_at_a_time_and_needs_a_reason(outbox: Outbox, tmp_path: Path) -> None:
    async with outbox.backup(**WHY):
        with pytest.raises(TryAgain, match="another backup") as refused:
            await copied(outbox, tmp_path / "copy.db")
        assert (refused.value.code, refused.value.retryable) == ("too_busy", True)
    with pytest.raises(InvalidMessage, match="reason"):
        async with outbox.backup(caller=ALICE, reason=" "):
            pass
    await copied(outbox, tmp_path / "copy.db")


async def test_a_backup_that_takes_too_long_ends(
    outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.backup._SECONDS", -1.0)
    with pytest.raises(TryAgain, match="not done within") as refused:
        await copied(outbox, tmp_path / "copy.db")
    assert (refused.value.code, refused.value.retryable) == ("outbox_busy", True)
    assert len(await accepted(outbox, send("after"))) == 1


async def test_a_damaged_outbox_makes_no_backup(open_outbox: OpenOutbox, database: Path, tmp_path: Path) -> None:
    async with await open_outbox() as first:
        await accepted(first, *(send(f"id-{number}", "x" * 3000) for number in range(50)))
    with opened(database) as db:
        where = "SELECT pgoffset, pgsize FROM dbstat WHERE name = 'outbox_payload' AND pagetype = 'leaf' LIMIT 1"
        at, size = db.execute(where).fetchone()
    with database.open("r+b") as file:
        file.seek(at)
        file.write(b"\xa5" * size)
    async with await open_outbox() as damaged:
        with pytest.raises(PostroomError, match=r"damaged .*postroom outbox recover") as refused:
            await copied(damaged, tmp_path / "copy.db")
        assert refused.value.code == "outbox_error"


# The way back


async def test_a_restored_outbox_is_the_backup_and_what_was_there_stays_as_it_was(
    open_outbox: OpenOutbox, state: Path, database: Path, tmp_path: Path
) -> None:
    async with await open_outbox() as outbox:
        await accepted(outbox, send("kept"))
        await copied(outbox, tmp_path / "copy.db")
        await accepted(outbox, send("later"))
    before = database.read_bytes()
    Path(f"{database}-wal").write_bytes(b"a log that is not of the backup")
    aside = restore(state, tmp_path / "copy.db", "the disk was lost")
    assert aside is not None
    assert (aside.read_bytes(), Path(f"{aside}-wal").read_bytes()) == (before, b"a log that is not of the backup")
    assert database.stat().st_mode & 0o777 == 0o600
    async with await open_outbox() as outbox:
        assert await outbox.row("kept")
        (again,) = await accepted(outbox, send("later"))  # its id is free again
        assert again.inserted
        log = (await outbox.operations(LogQuery())).lines
    assert [(line.verb, line.reason) for line in log] == [("restore", "the disk was lost"), ("backup", WHY["reason"])]


async def test_a_row_that_waits_in_a_restored_outbox_is_asked_for_before_it_is_requeued(
    open_outbox: OpenOutbox, state: Path, tmp_path: Path
) -> None:
    async def look_up(rows: Sequence[Unanswered]) -> list[Accepted | None]:
        return [Accepted("BROKER-1", 7) if row.client_message_id == "since" else None for row in rows]

    async with await open_outbox() as outbox:
        await accepted(outbox, send("since"), send("waits"))
        await copied(outbox, tmp_path / "copy.db")
        first, _ = await outbox.claim()
        await outbox.settle([done(first.row_id)])
    restore(state, tmp_path / "copy.db", "the disk was lost")
    async with await open_outbox() as outbox:
        with pytest.raises(Conflict) as refusal:  # nobody can ask yet
            await outbox.act("requeue", "since", **WHY)
        assert refusal.value.code == "outcome_unknown"
    async with await open_outbox(look_up=look_up) as outbox:
        with pytest.raises(Conflict) as refusal:
            await outbox.act("requeue", "since", **WHY)
        assert refusal.value.code == "already_accepted"
        assert (await outbox.row("since")).status == "done"
        await outbox.act("requeue", "waits", **WHY)
        assert (await outbox.row("waits")).status == "aborted"


async def test_a_backup_is_restored_where_there_is_no_outbox(outbox: Outbox, tmp_path: Path) -> None:
    await accepted(outbox, send("kept"))
    await copied(outbox, tmp_path / "copy.db")
    assert restore(tmp_path / "new", tmp_path / "copy.db", "a new host") is None
    assert [file.name for file in (tmp_path / "new").glob("*.db*")] == ["outbox.db"]


@pytest.mark.usefixtures("outbox")
async def test_no_outbox_is_replaced_while_a_daemon_has_it(state: Path, tmp_path: Path) -> None:
    with pytest.raises(Fatal, match="is in use by process") as refused:
        restore(state, tmp_path / "copy.db", "a mistake")
    assert refused.value.exit_code == Exit.UNAVAILABLE


@pytest.mark.usefixtures("killed")
@pytest.mark.parametrize("verb", ["restore", "recover"])
def test_a_verb_under_way_names_its_own_process_and_not_the_daemon_that_was_killed(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """Who is told to stop a process by its number may stop whatever has that number now."""
    (state / "outbox.lock").write_text("4711")

    def meanwhile(*_: object, **__: object) -> None:
        with pytest.raises(Fatal, match=f"is in use by process {os.getpid()}:"):
            restore(state, tmp_path / "copy.db", "at once")
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr("outbox.backup.shutil.copyfileobj", meanwhile)
    monkeypatch.setattr("outbox.recover._salvage", meanwhile)
    with pytest.raises(Fatal, match="broken"):
        restore(state, tmp_path / "copy.db", "first") if verb == "restore" else recover(state)


@pytest.mark.parametrize(
    "spoilt", ["cut", "page", "empty", "text", "another program's", "unmarked", "missing", "with a log"]
)
async def test_what_is_no_whole_backup_changes_nothing(
    open_outbox: OpenOutbox, state: Path, database: Path, tmp_path: Path, spoilt: str
) -> None:
    copy = tmp_path / "copy.db"
    async with await open_outbox() as outbox:
        await accepted(outbox, *(send(f"id-{number}", "x" * 3000) for number in range(50)))
        await copied(outbox, copy)
    before, content = database.read_bytes(), copy.read_bytes()
    match spoilt:
        case "cut":
            copy.write_bytes(content[: len(content) // 2])
        case "page":
            copy.write_bytes(content[:-8192] + b"\xa5" * 4096 + content[-4096:])
        case "empty":
            copy.write_bytes(b"")
        case "text":
            copy.write_text("no database at all")
        case "another program's":
            copy.write_bytes(content[:68] + b"NOPE" + content[72:])
        case "unmarked":
            copy.unlink()
            with closing(sqlite3.connect(copy)) as db:
                db.execute("CREATE TABLE orders (id)")
        case "missing":
            copy.unlink()
        case "with a log":
            Path(f"{copy}-wal").touch()
    with pytest.raises(Fatal) as refused:
        restore(state, copy, "a mistake")
    assert refused.value.exit_code == Exit.CONFIG
    assert str(copy) in str(refused.value)
    assert ("take another" in str(refused.value)) == (spoilt not in ("missing", "with a log"))
    assert "is empty" not in str(refused.value)
    assert database.read_bytes() == before
    assert not list(state.glob("*.restoring*"))
    async with await open_outbox() as outbox:
        assert (await outbox.counts()).rows["pending"] == 50


async def test_what_has_no_end_is_not_restored(open_outbox: OpenOutbox, state: Path, tmp_path: Path) -> None:
    async with await open_outbox() as outbox:
        await accepted(outbox, send("kept"))
    os.mkfifo(tmp_path / "pipe")
    for endless in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(Fatal, match=f"{endless} is not a file") as refused:
            restore(state, endless, "a mistake")
        assert refused.value.exit_code == Exit.CONFIG
    assert not list(state.glob("*.restoring*"))


async def test_a_restore_that_fails_half_way_says_where_the_outbox_is_and_can_be_repeated(
    open_outbox: OpenOutbox, state: Path, database: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with await open_outbox() as outbox:
        await accepted(outbox, send("kept"))
        await copied(outbox, tmp_path / "copy.db")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if target == database:
            raise OSError(errno.EIO, "Input/output error")
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", fail)
        with pytest.raises(Fatal) as failed:
            restore(state, tmp_path / "copy.db", "the disk was lost")
    (aside,) = state.glob("outbox.db.damaged-*")
    assert f"the old outbox is {aside}, try again" in str(failed.value)
    restore(state, tmp_path / "copy.db", "the disk was lost")
    async with await open_outbox() as outbox:
        assert await outbox.row("kept")


@pytest.fixture
async def killed(open_outbox: OpenOutbox, database: Path, tmp_path: Path) -> Path:
    """An outbox as a kill leaves it, with rows that only its log has; returns a backup from before these."""
    copy = tmp_path / "copy.db"
    async with await open_outbox() as outbox:
        await accepted(outbox, send("kept"))
        await copied(outbox, copy)
        await accepted(outbox, *(send(f"later-{number}") for number in range(20)))
        files = {part: Path(f"{database}{part}").read_bytes() for part in ("", "-wal")}
    for part, content in files.items():
        Path(f"{database}{part}").write_bytes(content)
    return copy


async def test_the_log_of_an_outbox_that_is_gone_is_not_read_into_the_restored_one(
    killed: Path, open_outbox: OpenOutbox, state: Path, database: Path
) -> None:
    log = Path(f"{database}-wal").read_bytes()
    database.unlink()
    with pytest.raises(Fatal, match=f"{database} is damaged .it is gone or empty, but its log") as refused:
        await open_outbox()
    assert (refused.value.exit_code, Path(f"{database}-wal").read_bytes()) == (Exit.CONFIG, log)
    restore(state, killed, "the disk was lost")
    async with await open_outbox() as outbox:
        assert (await outbox.counts()).rows["pending"] == 1
    assert [file.read_bytes() for file in state.glob("outbox.db.damaged-*-wal")] == [log]


@pytest.mark.parametrize("renames", range(4))
async def test_a_restore_that_is_killed_is_done_again_and_what_was_there_stays_together(
    killed: Path, open_outbox: OpenOutbox, state: Path, database: Path, renames: int
) -> None:
    before = [Path(f"{database}{part}").read_bytes() for part in ("", "-wal")]
    code = "from outbox.backup import restore\nrestore(*paths, 'the disk was lost')"
    await killed_at_a_rename(renames, code, state, killed)
    if not database.exists():
        with pytest.raises(Fatal, match="or repeat the `postroom outbox restore` that was interrupted"):
            await open_outbox()
    restore(state, killed, "the disk was lost")
    async with await open_outbox() as outbox:
        assert (await outbox.counts()).rows["pending"] == 1
    (aside,) = (file for file in state.glob("outbox.db.damaged-*") if file.suffix[-1].isdigit())
    assert [Path(f"{aside}{part}").read_bytes() for part in ("", "-wal")] == before


async def test_nothing_is_restored_without_a_reason(outbox: Outbox, state: Path, tmp_path: Path) -> None:
    await copied(outbox, tmp_path / "copy.db")
    await outbox.close()
    with pytest.raises(InvalidMessage, match="reason"):
        restore(state, tmp_path / "copy.db", " ")


FULL_DISK = """
import asyncio, contextlib, os, sys
from pathlib import Path
import outbox.backup
from postroom.chassis import logs
from support.outboxes import ALICE, WHY, accepted, send
from outbox import Outbox
from postroom.errors import PostroomError

async def refusal(source):
    try:
        async with source.backup(**WHY):
            return "made"
    except PostroomError as error:
        return f"{error.code}:{'needs' in str(error)}"

async def main(directory):
    source = await Outbox.open(directory / "state")
    for start in range(0, 2000, 500):
        await accepted(source, *(send(f"{start + each}", "x" * 1500) for each in range(500)))
    said = [await refusal(source)]
    outbox.backup._KEPT_FREE = -2**40  # as if others took the room meanwhile
    said.append(await refusal(source))
    await accepted(source, send("after"))
    said.append(str(source.healthy))
    os.truncate(directory / "ballast", 0)
    said.append(await refusal(source))
    await source.close()
    print(*said)

directory = Path(sys.argv[1])
(directory / "ballast").write_bytes(b"x" * 6 * 1024 * 1024)
logs.configure("critical")
asyncio.run(main(directory))
"""


async def test_a_backup_takes_no_room_that_sends_need_and_ends_where_there_is_none(tmp_path: Path) -> None:
    said = await run_on_a_small_disk(tmp_path, FULL_DISK, megabytes=16)
    assert said == ["disk_full:True disk_full:False True made"]
