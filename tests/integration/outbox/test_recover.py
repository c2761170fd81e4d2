"""Recovery: what can be read is saved, what cannot stays used, and the damaged file stays as it is."""

import asyncio
import errno
import hashlib
import sqlite3
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import closing
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import pytest
from support.outboxes import START, WHY, accepted, counted, done, killed_at_a_rename, opened, retry, row_in, send

from outbox import Outbox
from outbox.model import SCHEMA, Post
from outbox.recover import recover
from postroom._wire.message import SendRequest, prepare
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.wal import Log

OpenOutbox = Callable[..., Awaitable[Outbox]]
PAGE = 4096


@pytest.fixture
async def filled(open_outbox: OpenOutbox) -> None:
    """A stopped outbox with a row in each state, three hundred pending ones, and a log."""
    outbox = await open_outbox()
    for status in ("done", "dead", "aborted", "inflight"):
        await row_in(outbox, status, status)
    await accepted(outbox, *(send(f"id-{number:03d}", "x" * 1000) for number in range(300)))
    await outbox.set_relay_control("dm:bob", paused=True, **WHY)
    await outbox.close()


def pages_of(database: Path, text: bytes) -> list[int]:
    """Number the pages, from 0, that hold `text`."""
    content = database.read_bytes()
    return [start // PAGE for start in range(0, len(content), PAGE) if text in content[start : start + PAGE]]


def overwrite(database: Path, page: int) -> None:
    with database.open("r+b") as file:
        file.seek(page * PAGE)
        file.write(b"\xa5" * PAGE)


@pytest.mark.usefixtures("filled")
async def test_a_sound_outbox_is_recovered_whole(state: Path, database: Path, open_outbox: OpenOutbox) -> None:
    before = counted(database)
    recovery = recover(state, clock=lambda: START)
    assert (recovery.saved, recovery.missing, recovery.buried, recovery.log_lines, recovery.lost_log_lines) == (
        *(304, 0, 0),
        *(2, 0),
    )
    assert counted(database) == before
    outbox = await open_outbox()
    assert (await outbox.counts()).rows == {"pending": 301, "inflight": 0, "done": 1, "dead": 1, "aborted": 1}
    assert (await outbox.relay_controls())["dm:bob"].paused
    assert (await outbox.row("id-000")).unanswered_at is None
    assert [line.verb for line in (await outbox.inspect("aborted")).log] == ["abort"]
    await outbox.close()


async def test_rows_with_a_not_before_at_either_end_of_the_calendar_are_saved(
    state: Path, open_outbox: OpenOutbox
) -> None:
    outbox = await open_outbox()
    times = [datetime.min.replace(tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)]
    requests = [SendRequest(to="topic:orders", not_before=time, client_message_id=str(time.year)) for time in times]
    await accepted(outbox, *map(prepare, requests))
    await outbox.close()

    recovery = recover(state, clock=lambda: START)
    assert (recovery.saved, recovery.missing) == (2, 0)
    outbox = await open_outbox()
    assert [(await outbox.row(str(time.year))).not_before for time in times] == times
    await outbox.close()


async def test_the_failed_posts_of_a_row_are_saved(state: Path, open_outbox: OpenOutbox) -> None:
    async with await open_outbox() as outbox:
        row_id = await row_in(outbox, "inflight")
        await outbox.settle([retry(row_id)], Post(START, 30, "https://broker.example.com"))
        before = (await outbox.inspect(row_id)).failed_posts
    assert (len(before), recover(state).whole) == (1, True)
    async with await open_outbox() as outbox:
        assert (await outbox.inspect(row_id)).failed_posts == before


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize("content", [b"1000:1000", b'xx"'], ids=["a page of rows", "a page of payloads"])
async def test_rows_of_a_broken_page_stay_used(
    state: Path, database: Path, open_outbox: OpenOutbox, content: bytes
) -> None:
    overwrite(database, pages_of(database, content)[3])
    damaged_sum = hashlib.sha256(database.read_bytes()).digest()
    recovery = recover(state, clock=lambda: START)
    assert recovery.buried > 0
    assert recovery.saved + recovery.buried == 304
    assert hashlib.sha256(recovery.damaged.read_bytes()).digest() == damaged_sum
    with pytest.raises(Fatal, match="--accept-lost-ids") as refused:
        await open_outbox()
    assert refused.value.exit_code == Exit.CONFIG
    await (await open_outbox(accept_lost_ids=True)).close()
    outbox = await open_outbox()  # it is accepted once
    rows = await accepted(outbox, *(send(f"id-{number:03d}", "x" * 1000) for number in range(300)))
    assert not any(row.inserted for row in rows)
    lost = [row for row in rows if row.status == "aborted"]
    assert len(lost) == recovery.buried
    assert {row.last_error for row in lost} == {"unreadable: the row was damaged"}
    assert (await outbox.prune(START * 2, **WHY))[0] <= 2
    await outbox.close()


@pytest.mark.usefixtures("filled")
async def test_pages_of_text_that_do_not_add_up_cost_little_more_than_sound_ones(state: Path, database: Path) -> None:
    began = time.process_time()
    recover(state)
    sound = time.process_time() - began
    content = database.read_bytes()
    database.write_bytes(content[:PAGE] + b"x" + content[PAGE:])
    began = time.process_time()
    recovery = recover(state)
    assert time.process_time() - began < 30 * sound
    assert (recovery.saved > 100, recovery.whole) == (True, False)


@pytest.mark.usefixtures("filled")
async def test_a_broken_index_loses_no_row(state: Path, database: Path) -> None:
    with opened(database) as db:
        (root,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'sqlite_autoindex_outbox_2'").fetchone()
    overwrite(database, root - 1)
    recovery = recover(state)
    assert (recovery.saved, recovery.missing) == (304, 0)


@pytest.mark.usefixtures("filled")
def test_what_damage_made_impossible_is_left_out(state: Path, database: Path) -> None:
    with sqlite3.connect(database) as damaging:
        damaging.execute("PRAGMA ignore_check_constraints = ON")
        impossible = "INSERT INTO operator_log (at, verb, actor, reason) VALUES (?, 'abort', 'uid:0', ' ')"
        damaging.execute(impossible, (START,))
        damaging.execute("INSERT INTO relay_control VALUES ('dm:eve', 1, -1.0)")
    damaging.close()
    recovery = recover(state)
    assert (recovery.saved, recovery.log_lines, recovery.lost_log_lines) == (304, 2, 1)
    with closing(sqlite3.connect(database)) as recovered:
        assert recovered.execute("SELECT destination FROM relay_control").fetchall() == [("dm:bob",)]


@pytest.mark.parametrize("status", ["pending", "done"])
async def test_a_row_whose_fingerprint_is_damaged_is_not_saved_with_it(
    state: Path, database: Path, open_outbox: OpenOutbox, status: str
) -> None:
    sends = [prepare(SendRequest(to="topic:orders", body=f"message {number}")) for number in range(301)]
    outbox = await open_outbox()
    (row,) = await accepted(outbox, sends[0])
    if status == "done":
        await outbox.claim()
        await outbox.settle([done(row.row_id)])
    await accepted(outbox, *sends[1:])
    await outbox.close()
    content = database.read_bytes()
    assert content.count(sends[0].fingerprint) == 1
    database.write_bytes(content.replace(sends[0].fingerprint, bytes(32)))
    recovery = recover(state)
    assert (recovery.saved, recovery.missing, recovery.buried) == (300, 1, 1)


@pytest.mark.usefixtures("filled")
async def test_a_file_without_its_first_page_is_saved_whole(
    state: Path, database: Path, open_outbox: OpenOutbox
) -> None:
    before = counted(database)
    overwrite(database, 0)
    recovery = recover(state)
    assert (recovery.saved, recovery.missing, recovery.whole) == (304, 0, True)
    assert counted(database) == before
    outbox = await open_outbox()
    (again,) = await accepted(outbox, send("id-000", "x" * 1000))
    assert not again.inserted
    await outbox.close()


@pytest.mark.parametrize("content", [b"", b"this is not an outbox" * 500, bytes(40 * PAGE)])
def test_where_nothing_says_how_many_rows_there_were_that_is_unknown_and_no_success(
    state: Path, database: Path, content: bytes
) -> None:
    state.mkdir(mode=0o700)
    database.write_bytes(content)
    recovery = recover(state)
    assert (recovery.saved, recovery.missing, recovery.whole) == (0, None, False)
    assert recovery.damaged.read_bytes() == content


@pytest.mark.usefixtures("filled")
async def test_two_recoveries_overwrite_nothing(state: Path) -> None:
    first = recover(state, clock=lambda: START)
    second = recover(state, clock=lambda: START)
    assert first.damaged != second.damaged
    assert first.damaged.exists()
    assert second.damaged.exists()


@pytest.mark.usefixtures("filled")
async def test_a_second_recovery_does_not_forget_what_the_first_could_not_save(
    state: Path, database: Path, open_outbox: OpenOutbox
) -> None:
    overwrite(database, pages_of(database, b"1000:1000")[3])
    missing = recover(state).missing
    assert missing
    again = recover(state)
    assert (again.missing, again.unaccepted, again.whole) == (0, True, False)
    with pytest.raises(Fatal, match=f"{missing} rows are missing .*--accept-lost-ids"):
        await open_outbox()
    await (await open_outbox(accept_lost_ids=True)).close()
    assert recover(state).whole
    await (await open_outbox()).close()
    with opened(database) as db:
        noted = db.execute("SELECT missing, accepted_at IS NOT NULL FROM outbox_recovery ORDER BY at").fetchall()
    assert noted == [(missing, 1), (0, 0), (0, 0)]


@pytest.mark.usefixtures("with_a_log")
@pytest.mark.parametrize("part", ["", "-wal"], ids=["the file", "its log"])
async def test_no_link_is_followed(state: Path, database: Path, tmp_path: Path, part: str) -> None:
    real = Path(f"{database}{part}").rename(tmp_path / "elsewhere")
    Path(f"{database}{part}").symlink_to(real)
    with pytest.raises(Fatal, match="is a symbolic link: remove it") as refusal:
        recover(state)
    assert refusal.value.exit_code == Exit.CONFIG
    assert not list(state.glob("*.damaged-*"))


async def test_an_outbox_in_use_is_not_recovered(outbox: Outbox, state: Path) -> None:
    with pytest.raises(Fatal, match="is in use") as refusal:
        recover(state)
    assert refusal.value.exit_code == Exit.UNAVAILABLE
    await accepted(outbox, send())


@pytest.mark.usefixtures("filled")
def test_what_a_later_release_has_written_is_left_to_that(state: Path, database: Path) -> None:
    with closing(sqlite3.connect(database)) as db:
        db.execute("CREATE TABLE later (id TEXT PRIMARY KEY)")
        db.execute(f"PRAGMA user_version = {SCHEMA.version + 1}")
    before = database.read_bytes()
    with pytest.raises(Fatal, match="of the newer program that wrote it") as refused:
        recover(state)
    assert refused.value.exit_code == Exit.CONFIG
    assert database.read_bytes() == before
    assert not list(state.glob("*recovering*"))


def columns_by_step(steps: Mapping[int, str]) -> list[dict[str, list[str]]]:
    """Return the tables that there are after each step, each with its columns."""
    found = []
    with closing(sqlite3.connect(":memory:")) as db:
        for number in sorted(steps):
            db.executescript(steps[number])
            tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
            found.append({name: [row[1] for row in db.execute("PRAGMA table_xinfo(" + name + ")")] for name in tables})
    return found


def changes_a_table(steps: Mapping[int, str]) -> bool:
    """Tell whether a step changes the columns of a table that was there before it."""
    return any(
        after.get(name) != was for before, after in pairwise(columns_by_step(steps)) for name, was in before.items()
    )


def test_no_step_changes_the_columns_of_a_table_since_rows_are_known_by_them() -> None:
    assert not changes_a_table(SCHEMA.steps)
    later = SCHEMA.version + 1
    assert not changes_a_table({**SCHEMA.steps, later: "CREATE TABLE later (id TEXT PRIMARY KEY)"})
    assert changes_a_table({**SCHEMA.steps, later: "ALTER TABLE outbox ADD COLUMN later TEXT"})


def test_nothing_is_recovered_from_nothing(state: Path) -> None:
    with pytest.raises(Fatal, match="there is no outbox"):
        recover(state)


@pytest.fixture
async def with_a_log(filled: None, state: Path, open_outbox: OpenOutbox) -> None:  # noqa: ARG001 - it has to be there
    """The same, killed with a row that only the write-ahead log holds."""
    outbox = await open_outbox()
    await accepted(outbox, send("in-the-log"))
    copies = {file.name: file.read_bytes() for file in state.iterdir() if file.name.startswith("outbox.db")}
    await outbox.close()
    for name, content in copies.items():
        (state / name).write_bytes(content)


@pytest.mark.usefixtures("with_a_log")
async def test_rows_that_only_the_write_ahead_log_holds_are_saved(state: Path, database: Path) -> None:
    recovery = recover(state)
    assert recovery.saved == 305
    assert counted(database)["pending"] == 302


def cut_off(log: Path, transactions: int) -> None:
    """Cut the last transactions off a log."""
    with log.open("r+b") as file:
        commits = [frame.place for frame in Log(file.fileno()).frames() if frame.commits]
        file.truncate(32 + (commits[-1 - transactions] + 1) * (24 + PAGE))


@pytest.mark.parametrize("cut", [0, 3], ids=["whole", "cut"])
async def test_where_transactions_were_cut_off_a_log_the_number_of_missing_rows_is_unknown(
    state: Path, database: Path, open_outbox: OpenOutbox, cut: int
) -> None:
    outbox = await open_outbox()
    for number in range(6):
        await accepted(outbox, send(f"id-{number}"))
    copies = {file.name: file.read_bytes() for file in state.glob("outbox.db*")}
    await outbox.close()
    for name, content in copies.items():
        (state / name).write_bytes(content)
    cut_off(Path(f"{database}-wal"), cut)
    recovery = recover(state)
    assert (recovery.saved, recovery.missing, recovery.whole) == (6 - cut, None if cut else 0, not cut)
    if cut:
        with pytest.raises(Fatal, match="--accept-lost-ids"):
            await open_outbox()


async def test_the_log_of_another_outbox_is_refused_and_left_out_of_a_recovery(
    state: Path, database: Path, tmp_path: Path, open_outbox: OpenOutbox
) -> None:
    with opened(tmp_path / "new.db") as db:
        SCHEMA.migrate(db, database)
        (page,) = db.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'outbox_salt'").fetchone()
    assert page == SCHEMA.own_page
    async with await open_outbox() as outbox:
        await accepted(outbox, send("own"))
    before = database.read_bytes()
    async with await Outbox.open(tmp_path / "another") as another:
        await accepted(another, send("another's"))
        log = (tmp_path / "another" / "outbox.db-wal").read_bytes()
    (state / "outbox.db-wal").write_bytes(log)
    for _ in range(2):
        with pytest.raises(Fatal, match=r"that of another file.*postroom outbox recover") as refusal:
            await open_outbox()
        assert (refusal.value.exit_code, database.read_bytes()) == (Exit.CONFIG, before)
    recovery = recover(state)
    assert (recovery.saved, recovery.missing) == (1, None)
    async with await open_outbox(accept_lost_ids=True) as outbox:
        assert await outbox.row("own")


@pytest.mark.usefixtures("with_a_log")
@pytest.mark.parametrize("left", [None, b""], ids=["without the file", "beside an empty file"])
async def test_a_log_alone_is_not_deleted_by_a_start_and_its_rows_are_saved(
    state: Path, database: Path, open_outbox: OpenOutbox, left: bytes | None
) -> None:
    log = Path(f"{database}-wal").read_bytes()
    database.unlink() if left is None else database.write_bytes(left)
    with pytest.raises(Fatal, match="postroom outbox recover") as refusal:
        await open_outbox()
    assert (refusal.value.exit_code, Path(f"{database}-wal").read_bytes()) == (Exit.CONFIG, log)
    recovery = recover(state)
    assert recovery.saved > 0
    assert (recovery.missing or 0) + recovery.saved == 305
    assert Path(f"{recovery.damaged}-wal").read_bytes() == log
    async with await open_outbox(accept_lost_ids=True) as outbox:
        assert await outbox.row("in-the-log")


@pytest.mark.usefixtures("filled")
async def test_what_an_earlier_recovery_set_aside_does_not_show_what_an_outbox_lost_since(
    state: Path, database: Path, open_outbox: OpenOutbox
) -> None:
    recover(state)
    async with await open_outbox() as outbox:
        await accepted(outbox, send("later"))
    database.unlink()
    for _ in range(2):
        with pytest.raises(Fatal, match="postroom outbox recover"):
            await open_outbox()
    recovery = recover(state)
    assert (recovery.saved, recovery.missing, recovery.whole) == (304, None, False)
    with pytest.raises(Fatal, match="--accept-lost-ids"):
        await open_outbox()
    async with await open_outbox(accept_lost_ids=True) as outbox:
        rows = [await outbox.row(name) for name in ("id-000", "dead", "done")]
        assert [row.unanswered_at is not None for row in rows] == [True, False, False]  # it may have been accepted


@pytest.mark.usefixtures("filled")
async def test_a_recovery_that_fails_leaves_the_outbox_where_it_was(
    state: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_a_full_disk(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    overwrite(database, pages_of(database, b"1000:1000")[3])
    before = database.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("outbox.recover.room_of", on_a_full_disk)
        with pytest.raises(Fatal, match="free some space") as refused:
            recover(state)
    assert refused.value.exit_code == Exit.TRY_AGAIN
    assert database.read_bytes() == before
    assert not [*state.glob("*.damaged-*"), *state.glob("*.recovering*")]
    recovery = recover(state)
    assert recovery.saved + recovery.buried == 304
    assert not list(state.glob("*.recovering*"))


LIMITED = """
import resource, sys
from pathlib import Path
from postroom.chassis.exits import Fatal
from outbox.recover import recover

resource.setrlimit(resource.RLIMIT_FSIZE, (4 * 4096, 4 * 4096))
try:
    recover(Path(sys.argv[1]))
except Fatal as fatal:
    sys.stderr.write(str(fatal))
    sys.exit(int(fatal.exit_code))
"""


@pytest.mark.usefixtures("filled")
async def test_a_new_file_that_cannot_be_written_is_74_and_a_sentence(state: Path, database: Path) -> None:
    before = database.read_bytes()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LIMITED, str(state)), stderr=asyncio.subprocess.PIPE
    )
    _, said = await process.communicate()
    assert (process.returncode, b"Traceback" in said) == (Exit.IO_ERROR, False)
    assert b"check the disk" in said
    assert database.read_bytes() == before
    assert not list(state.glob("*.recovering*"))


@pytest.mark.usefixtures("with_a_log")
@pytest.mark.parametrize("renames", range(4))
async def test_a_recovery_that_is_killed_is_done_again(
    state: Path, database: Path, open_outbox: OpenOutbox, renames: int
) -> None:
    await killed_at_a_rename(renames, "from outbox.recover import recover\nrecover(*paths)", state)
    if renames:
        with pytest.raises(Fatal, match="postroom outbox recover") as refusal:
            await open_outbox()
        assert refusal.value.exit_code == Exit.CONFIG
        assert not database.exists()
    again = recover(state)
    assert (again.saved, again.missing) == (305, 0)
    assert counted(database)["pending"] == 302
    assert len([file for file in state.glob("*.damaged-*") if file.name.endswith("-wal")]) == 1
