"""What every SQLite file of ours can rely on, whoever's it is: kills, full and failing disks, damage, many at once."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import sys
import threading
from contextlib import closing
from importlib.metadata import requires
from pathlib import Path
from unittest.mock import Mock

import aiosqlite
import pytest
from structlog.testing import capture_logs
from support.small_disk import run, run_on_a_small_disk
from support.stores import (
    SCHEMA,
    Closed,
    Refused,
    Spoiled,
    Unknown,
    numbers,
    open_store,
    opened_store,
    write,
)
from support.waiting import until

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import Schema, open_copy
from postroom.chassis.store import Connection, OwnedFile, Write
from postroom.chassis.wal import PAGE

FRAME = 24 + PAGE


def seen(database: Path) -> set[int]:
    """What another process would find."""
    with closing(sqlite3.connect(database)) as db:
        return {number for (number,) in db.execute("SELECT number FROM note")}


def killed(directory: Path) -> None:
    """Leave the lock file as a killed owner does."""
    (directory / "notes.lock").write_text("4711")


# Writing


async def test_an_answer_comes_after_the_commit_and_many_share_one(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:

        async def one(number: int) -> bool:
            return await write(store, number) in seen(store.path)

        assert all(await asyncio.gather(*(one(number) for number in range(1, 301))))
        assert store.operations == 300
        assert store.transactions < 100


async def test_a_patient_operation_shares_the_next_ones_commit_and_is_done_without_one_in_time(tmp_path: Path) -> None:
    def insert(number: int) -> Write:
        return Write(lambda db: db.execute("INSERT INTO note VALUES (?, '')", (number,)).rowcount, 0)

    async with opened_store(tmp_path) as store:
        before = store.transactions
        patient = store.submit(insert(1), patience=600)
        await write(store, 2)
        assert (patient.done(), store.transactions - before, seen(store.path)) == (True, 1, {1, 2})
        await store.submit(insert(3), patience=0.001)
        patient = store.submit(insert(4), patience=600)
    assert (await patient, seen(store.path)) == (1, {1, 2, 3, 4})


async def test_an_operation_that_fails_fails_alone(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        await write(store, 1)
        outcomes = await asyncio.gather(*(write(store, number) for number in (2, 1, 3, 1)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, Refused, int, Refused]
        assert await numbers(store) == [1, 2, 3]
        assert store.healthy


async def test_closing_finishes_what_is_queued_and_then_takes_nothing(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    queued = [write(store, number) for number in range(1, 51)]
    await asyncio.sleep(0)
    await store.close()
    await store.close()
    assert len(await asyncio.gather(*queued)) == 50
    with pytest.raises(Closed):
        await write(store, 51)
    with pytest.raises(Closed):
        await store.read(lambda db: db.total_changes)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.db", "notes.lock"]
    assert (tmp_path / "notes.lock").read_text().strip() == "closed"


async def test_whoever_gives_up_waiting_stops_nobody(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        given_up = write(store, 1)
        await asyncio.sleep(0)
        given_up.cancel()
        assert await write(store, 2) == 2


# Copying


async def test_a_copy_is_the_file_at_its_end_and_what_is_written_meanwhile_waits_for_a_few_pages(
    tmp_path: Path,
) -> None:
    async with opened_store(tmp_path) as store:
        await asyncio.gather(*(write(store, number, "x" * 4000) for number in range(1, 501)))
        with closing(open_copy(tmp_path / "copy")) as copy:
            loop = asyncio.get_running_loop()
            steps = submitted = 0
            answered: list[int] = []
            come = threading.Event()

            async def change() -> None:
                """Change a page that was copied long ago, and add one."""
                nonlocal submitted
                submitted += 1
                first = store.submit(Write(lambda db: db.execute("UPDATE note SET text = 'new' WHERE number = 1"), 0))
                more = write(store, 500 + submitted)
                await asyncio.sleep(0)
                come.set()
                await first
                answered.append(await more)

            def go_on() -> None:
                nonlocal steps
                steps += 1
                if steps == 4:
                    asyncio.run_coroutine_threadsafe(change(), loop)
                    assert come.wait(60)
                if steps == 6:
                    assert asyncio.run_coroutine_threadsafe(until(lambda: bool(answered)), loop).result(60) is None

            await store.copy(copy, go_on)
            assert steps > 7
            assert copy.execute("SELECT count(*), max(number) FROM note").fetchone() == (501, 501)
            assert copy.execute("SELECT text FROM note WHERE number = 1").fetchone() == ("new",)
            assert await write(store, 600) == 600
            assert copy.execute("SELECT max(number) FROM note").fetchone() == (501,)


async def test_a_store_that_closes_waits_for_no_copy(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        await asyncio.gather(*(write(store, number, "x" * 4000) for number in range(1, 501)))
        loop, closing_ = asyncio.get_running_loop(), list[asyncio.Task[None]]()
        with closing(open_copy(tmp_path / "copy")) as copy:
            begun = threading.Event()

            async def close() -> None:
                closing_.append(asyncio.create_task(store.close()))
                await asyncio.sleep(0)
                begun.set()

            def go_on() -> None:
                if not begun.is_set():
                    asyncio.run_coroutine_threadsafe(close(), loop)
                    assert begun.wait(60)

            with pytest.raises(Closed):
                await store.copy(copy, go_on)
        await closing_[0]


async def test_what_fails_under_a_copy_fails_the_store_as_ever(tmp_path: Path) -> None:
    store = await open_store(tmp_path)
    await asyncio.gather(*(write(store, number, "x" * 4000) for number in range(1, 501)))
    loop = asyncio.get_running_loop()
    failing = list[asyncio.Task[int]]()
    with closing(open_copy(tmp_path / "copy")) as copy:
        begun = threading.Event()

        def fail(_: sqlite3.Connection) -> int:
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

        async def submit() -> None:
            failing.append(asyncio.create_task(store.write(fail)))
            await asyncio.sleep(0)
            begun.set()

        def go_on() -> None:
            if not begun.is_set():
                asyncio.run_coroutine_threadsafe(submit(), loop)
                assert begun.wait(60)

        with pytest.raises(Closed):
            await store.copy(copy, go_on)
    with pytest.raises(Unknown):
        await failing[0]
    assert store.failed.is_set()
    await store.close()


# Kills

KILLED = """
import asyncio, os, signal, sqlite3, sys
from pathlib import Path
from postroom.chassis import logs, sqlite, store
from support.stores import numbers, open_store, write

def fatal(last, count=[0]):
    count[0] += 1
    if count[0] == last:
        os.kill(os.getpid(), signal.SIGKILL)

async def use(directory, answered):
    store = await open_store(directory, checkpoint_bytes=4096)
    for group in range(4):
        writes = [write(store, None, "x" * 2000) for _ in range(3)]
        for one in writes:
            os.write(answered, b"%d\\n" % await one)
    await store.close()

def killed_at(step, directory, answered):
    process = os.fork()
    if process:
        return os.waitpid(process, 0)[1] == signal.SIGKILL

    class Deadly(sqlite3.Connection):
        def execute(self, *statement):
            fatal(step)
            cursor = super().execute(*statement)
            fatal(step)
            return cursor

    def around(module, name):
        function = getattr(module, name)
        def call(*arguments, **more):
            fatal(step)
            result = function(*arguments, **more)
            fatal(step)
            return result
        setattr(module, name, call)

    connect = sqlite3.connect
    sqlite3.connect = lambda *arguments, **more: connect(*arguments, factory=Deadly, **more)
    for name in ("fsync", "ftruncate", "pwrite", "close"):
        around(store.os, name)
    asyncio.run(use(directory, answered))
    os._exit(0)

async def check(directory, answered):
    store = await open_store(directory)
    kept = set(await numbers(store))
    await store.close()
    return answered - kept

logs.configure("critical")
step, lost, kills = 0, 0, 0
while True:
    step += 1
    directory = Path(sys.argv[1]) / str(step)
    with open(f"{directory}.answered", "wb") as answered:
        died = killed_at(step, directory, answered.fileno())
    answered = set(map(int, Path(f"{directory}.answered").read_text().split()))
    lost += len(asyncio.run(check(directory, answered)))
    if not died:
        break
    kills += 1
print(lost, len(answered), kills)
"""


async def test_what_was_answered_is_there_wherever_the_process_is_killed(tmp_path: Path) -> None:
    """Before and after each statement and each step at the lock file, from opening to closing."""
    ((lost, answered, kills),) = [line.split() for line in await run(sys.executable, "-c", KILLED, str(tmp_path))]
    assert (lost, answered) == ("0", "12")
    assert int(kills) > 80


# Disks

FULL_DISK = """
import asyncio, sys
from pathlib import Path
from postroom.chassis import logs
from support.stores import Refused, numbers, open_store, write

async def main(directory):
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(256 * 1024))
    store = await open_store(directory / "state")
    number = 1
    try:
        while True:
            await write(store, number, "x" * 20_000)
            number += 1
    except Refused as refused:
        print(refused, store.healthy)
    ballast.unlink()
    await write(store, number, "x" * 20_000)
    print(len(await numbers(store)) == number)
    await store.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_full_disk_refuses_and_the_store_goes_on_when_space_is_back(tmp_path: Path) -> None:
    assert await run_on_a_small_disk(tmp_path, FULL_DISK) == ["database or disk is full True", "True"]


START_ON_A_FULL_DISK = """
import asyncio, sys
from pathlib import Path
from postroom.chassis import logs
from postroom.chassis.exits import Fatal
from support.stores import open_store

async def start(directory, ballast):
    codes = set()
    while True:  # a page more of space each time, so that each of the writes of a start is the one that fails
        try:
            store = await open_store(directory / "state")
        except Fatal as fatal:
            codes.add(int(fatal.exit_code))
        else:
            await store.close()
            return codes
        with ballast.open("r+b") as file:
            file.truncate(ballast.stat().st_size - 4096)

async def main(directory):
    ballast = directory / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    codes = await start(directory, ballast)
    print("refused", bool(codes), "tried again", codes <= {74, 75})

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_start_on_a_full_disk_ends_so_that_it_is_tried_again(tmp_path: Path) -> None:
    assert await run_on_a_small_disk(tmp_path, START_ON_A_FULL_DISK) == ["refused True tried again True"]


START_WHERE_NO_FILE_FITS = """
import asyncio, sys
from pathlib import Path
from postroom.chassis import logs
from postroom.chassis.exits import Fatal
from support.stores import open_store

async def main(directory):
    ballast = []
    try:
        while True:
            (directory / str(len(ballast))).touch()
            ballast.append(directory / str(len(ballast)))
    except OSError:
        pass
    codes = []
    while True:  # each of the files of a store is the one that does not fit
        try:
            store = await open_store(directory / "state")
        except Fatal as fatal:
            codes.append(int(fatal.exit_code))
        else:
            await store.close()
            break
        ballast.pop().unlink()
    print(*codes)

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_start_where_no_further_file_fits_ends_so_that_it_is_tried_again(tmp_path: Path) -> None:
    output = await run_on_a_small_disk(tmp_path, START_WHERE_NO_FILE_FITS, files=20)
    assert output == ["75 75 75 75 75"]  # the directory, the lock, the file, its log, its index


FAILING_DISK = """
import asyncio, resource, sys
from pathlib import Path
from postroom.chassis import logs
from support.stores import open_store, write

async def main(directory):
    store = await open_store(directory)
    await write(store, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (store.wal_bytes + 4096, resource.RLIM_INFINITY))  # then EFBIG
    outcomes = await asyncio.gather(
        *(write(store, number, "x" * 50_000) for number in (2, 3)), store.run(lambda db: 0), return_exceptions=True
    )
    print(*(type(outcome).__name__ for outcome in outcomes), store.failed.is_set(), store.healthy)
    try:
        await write(store, 4)
    except Exception as error:
        print(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await store.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_after_an_error_of_the_disk_nobody_knows_and_the_store_ends(tmp_path: Path) -> None:
    output = await run(sys.executable, "-c", FAILING_DISK, str(tmp_path))
    assert output == ["Unknown Unknown int True False", "Unknown"]
    assert (tmp_path / "notes.lock").read_text() != ""
    async with opened_store(tmp_path) as store:  # which checks the file
        assert 1 in await numbers(store)


async def test_a_file_that_breaks_under_a_reader_ends_the_store(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        await asyncio.gather(*(write(store, number, "x" * 1000) for number in range(1, 101)))
        await store.run(lambda db: db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
        overwrite(store.path, store.path.stat().st_size // PAGE // 2 * PAGE, PAGE)
        with pytest.raises(Refused, match="malformed"):
            await store.read(lambda db: db.execute("SELECT sum(length(text)) FROM note").fetchall())
        assert store.failed.is_set()
        with pytest.raises(Unknown):
            await write(store, 101)


# Damage


def overwrite(file: Path, start: int, size: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(start)
        stream.write(b"\xa5" * size)


@pytest.mark.parametrize("how", ["a page", "the header"])
async def test_a_damaged_file_is_found_after_an_unclean_stop(tmp_path: Path, how: str) -> None:
    async with opened_store(tmp_path) as store:
        await asyncio.gather(*(write(store, number, "x" * 1000) for number in range(1, 101)))
    middle = store.path.stat().st_size // PAGE // 2 * PAGE
    overwrite(store.path, middle if how == "a page" else 0, PAGE)
    before = store.path.read_bytes()
    killed(tmp_path)
    for _ in range(2):
        with pytest.raises(Spoiled):
            await open_store(tmp_path)
        assert store.path.read_bytes() == before


async def test_a_sound_file_is_opened_after_an_unclean_stop(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        await write(store, 1)
    killed(tmp_path)
    async with opened_store(tmp_path) as store:
        assert await numbers(store) == [1]


async def test_a_disk_that_fails_as_a_store_is_closed_leaves_it_unlocked_and_to_be_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await open_store(tmp_path)
    await write(store, 1)
    with monkeypatch.context() as failing:
        failing.setattr("postroom.chassis.store.os.pwrite", Mock(side_effect=OSError(errno.EIO, "no disk")))
        await store.close()
    again = OwnedFile(tmp_path, "notes")
    assert again.unclean
    again.end(clean=False)
    async with opened_store(tmp_path) as store:
        assert await numbers(store) == [1]


async def test_a_new_file_takes_the_place_of_one_that_was_moved_away(tmp_path: Path) -> None:
    (tmp_path / "notes.db").write_bytes(b"this is not a store" * 500)
    async with opened_store(tmp_path, damaged=lambda path, _: path.rename(tmp_path / "aside")) as store:
        assert await numbers(store) == []
    assert (tmp_path / "aside").read_bytes() == b"this is not a store" * 500


async def left_in_the_log(tmp_path: Path, transactions: int) -> tuple[bytes, bytes]:
    """Return a file and a log with this many transactions, as a kill leaves them."""
    async with opened_store(tmp_path / "whole") as store:
        for number in range(1, transactions + 1):
            await write(store, number, "x" * 1000)
        return store.path.read_bytes(), Path(f"{store.path}-wal").read_bytes()


async def found(directory: Path, database: bytes, log: bytes) -> set[int]:
    """Return what a store has that finds these files."""
    directory.mkdir()
    killed(directory)
    (directory / "notes.db").write_bytes(database)
    (directory / "notes.db-wal").write_bytes(log)
    async with opened_store(directory) as store:
        return set(await numbers(store))


async def test_a_damaged_log_is_never_cut_short_in_silence(tmp_path: Path) -> None:
    """Whichever frame is damaged, a transaction that others follow is missed; the last one may never have ended."""
    database, log = await left_in_the_log(tmp_path, 8)
    frames = range(len(log) // FRAME)
    commits = [frame for frame in frames if any(log[32 + frame * FRAME + 4 : 32 + frame * FRAME + 8])]
    assert len(commits) >= 8
    everything = await found(tmp_path / "sound", database, log)
    for frame in frames:
        for offset in (0, 8, 20, 200):  # of the page number, the salts, the checksums, the page
            start = 32 + frame * FRAME + offset
            broken = log[:start] + bytes(255 - each for each in log[start : start + 4]) + log[start + 4 :]
            place = tmp_path / f"{frame}-{offset}"
            if frame <= commits[-2]:
                with pytest.raises(Spoiled, match="write-ahead log"):
                    await found(place, database, broken)
                assert (place / "notes.db-wal").read_bytes() == broken
            else:
                assert await found(place, database, broken) >= everything - {8}


@pytest.mark.parametrize("offset", [0, 16, 24])
async def test_a_damaged_header_of_a_log_does_not_make_it_empty(tmp_path: Path, offset: int) -> None:
    database, log = await left_in_the_log(tmp_path, 2)
    with pytest.raises(Spoiled, match="the header of the write-ahead log"):
        await found(tmp_path / "broken", database, log[:offset] + b"\xa5\xa5" + log[offset + 2 :])


async def test_a_log_that_ends_anywhere_is_taken_for_cut_off_by_a_kill(tmp_path: Path) -> None:
    database, log = await left_in_the_log(tmp_path, 3)
    ends = [end for end in range(32, len(log), FRAME) if any(log[end + 4 : end + 8])]  # of transactions
    for size in range(0, len(log), 997):
        if size < ends[0] + FRAME:  # the schema was on disk before the lock named an owner
            with pytest.raises(Spoiled, match="it is empty, though it was in use"):
                await found(tmp_path / str(size), database, log[:size])
        else:
            kept = await found(tmp_path / str(size), database, log[:size])
            assert kept == set(range(1, len(kept) + 1))


# Opening


async def test_a_file_has_one_owner(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        for _ in range(3):
            with pytest.raises(Fatal, match="is in use by process") as refusal:
                await open_store(tmp_path)
            assert refusal.value.exit_code == Exit.UNAVAILABLE
            assert str(tmp_path) in str(refusal.value)
        await write(store, 1)


RACING = """
import asyncio, sys
from pathlib import Path
from postroom.chassis.exits import Fatal
from support.stores import open_store, write

async def main(directory):
    won = 0
    while won < 10:
        try:
            store = await open_store(directory)
        except Fatal:
            await asyncio.sleep(0)
            continue
        await write(store, None)
        await store.close()
        won += 1

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_processes_that_open_it_at_once_have_it_one_after_another(tmp_path: Path) -> None:
    await asyncio.gather(*(run(sys.executable, "-c", RACING, str(tmp_path)) for _ in range(4)))
    async with opened_store(tmp_path) as store:
        assert await numbers(store) == list(range(1, 41))
        assert await store.read(lambda db: db.execute("SELECT count(*) FROM opening").fetchone()) == (41,)


async def test_those_who_share_a_file_bring_it_to_its_schema_once(tmp_path: Path) -> None:
    stores = await asyncio.gather(*(open_store(tmp_path, file=tmp_path / "notes.db") for _ in range(4)))
    for number, store in enumerate(stores, 1):
        assert await write(store, number) == number
    assert await numbers(stores[0]) == [1, 2, 3, 4]
    for store in stores:
        await store.close()


async def test_a_new_file_that_another_program_is_writing_is_waited_for(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "notes.db", isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(open_store(tmp_path, file=tmp_path / "notes.db"))
        await asyncio.wait({opening}, timeout=0.3)
        assert not opening.done()
        db.execute("COMMIT")
        await (await opening).close()


async def test_the_files_are_their_owners_alone(tmp_path: Path) -> None:
    async with opened_store(tmp_path / "state") as store:
        await write(store, 1)
        modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "state").iterdir()}
    assert modes == dict.fromkeys(["notes.db", "notes.db-wal", "notes.db-shm", "notes.lock"], 0o600)
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("suffix", ["db", "db-wal", "db-shm", "lock"])
async def test_no_link_is_followed(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "theirs").write_text("theirs")
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    (state / f"notes.{suffix}").symlink_to(tmp_path / "theirs")
    with pytest.raises(Fatal, match="is a symbolic link"):
        await open_store(state)
    assert (tmp_path / "theirs").read_text() == "theirs"


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (
            "PRAGMA application_id = 1347637321; PRAGMA user_version = 99",
            "this program supports up to 2",
        ),
        ("PRAGMA application_id = 1; CREATE TABLE theirs (x)", "another program"),
        ("PRAGMA user_version = 1", "another program"),
    ],
)
async def test_a_file_of_another_program_or_a_newer_one_is_left_alone(tmp_path: Path, script: str, why: str) -> None:
    with closing(sqlite3.connect(tmp_path / "notes.db")) as db:
        db.executescript(script)
    before = (tmp_path / "notes.db").read_bytes()
    with pytest.raises(Fatal, match=why) as refusal:
        await open_store(tmp_path)
    assert refusal.value.exit_code == Exit.CONFIG
    assert (tmp_path / "notes.db").read_bytes() == before


async def test_a_file_that_cannot_be_opened_is_not_called_damaged(tmp_path: Path) -> None:
    (tmp_path / "notes.db").touch()
    (tmp_path / "notes.db-wal").mkdir()
    with pytest.raises(Fatal, match="cannot open"):
        await open_store(tmp_path)


async def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Fatal, match="cannot use the state directory") as refusal:
        OwnedFile(tmp_path / "file", "notes")
    assert refusal.value.exit_code == Exit.CONFIG


async def test_a_step_to_a_newer_schema_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    await (await open_store(tmp_path)).close()
    second = "CREATE TABLE half (x);\nINSERT INTO nowhere VALUES (1);\nPRAGMA user_version = 2;\n"
    with closing(sqlite3.connect(tmp_path / "notes.db", isolation_level=None)) as db:
        with pytest.raises(sqlite3.OperationalError, match="nowhere"):
            Schema(SCHEMA.application_id, SCHEMA.steps | {2: second}).migrate(db, tmp_path / "notes.db")
        assert db.execute("SELECT count(*) FROM sqlite_schema WHERE name = 'half'").fetchone() == (0,)
        assert db.execute("PRAGMA user_version").fetchone() == (1,)


# The log


async def test_the_log_stays_small_under_load(tmp_path: Path) -> None:
    async with opened_store(tmp_path, checkpoint_bytes=128 * 1024) as store:
        for _ in range(40):
            await asyncio.gather(*(write(store, None, "x" * 1000) for _ in range(100)))
        assert store.wal_bytes < 2 * 1024 * 1024


async def test_readers_that_never_cease_do_not_make_the_log_grow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("postroom.chassis.store._RESTART_AT", 1024 * 1024)
    async with opened_store(tmp_path, checkpoint_bytes=128 * 1024) as store:
        await write(store, None)

        async def read() -> None:
            while True:
                await store.read(lambda db: db.execute("SELECT sum(length(text)) FROM note").fetchall())

        readers = [asyncio.create_task(read()) for _ in range(4)]
        for _ in range(150):
            await asyncio.gather(*(write(store, None, "x" * 1000) for _ in range(100)))
        most = store.wal_bytes
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert most <= 8 * 1024 * 1024  # what a log that starts over shrinks to; one that never did has 13.5 MB by now


async def test_a_reader_that_stalls_makes_the_log_grow_and_the_store_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("postroom.chassis.store._RESTART_AT", 512 * 1024)
    async with opened_store(tmp_path, checkpoint_bytes=64 * 1024) as store:
        await write(store, None)
        with closing(sqlite3.connect(store.path, isolation_level=None)) as reader:
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM note").fetchall()
            for _ in range(20):
                await write(store, None, "x" * 50_000)
        for _ in range(10):
            await write(store, None, "x" * 50_000)
    assert "wal_not_emptied" in capsys.readouterr().out


# What it rests on


async def test_the_private_names_of_aiosqlite_are_there_and_its_version_is_bounded() -> None:
    connection = await Connection.open(lambda: sqlite3.connect(":memory:"))
    assert connection._thread.daemon
    assert await connection.run(lambda db: db.execute("SELECT 1").fetchone()) == (1,)
    assert isinstance(connection._conn, sqlite3.Connection)
    await connection.close()
    assert issubclass(Connection, aiosqlite.Connection)
    (bound,) = [each for each in requires("postroom-server") or () if each.startswith("aiosqlite")]
    assert "<0.23" in bound


def test_the_store_is_the_only_place_that_knows_aiosqlite() -> None:
    root = Path(__file__).parents[3]
    sources = [file for room in ("sdk", "outbox", "inbox", "daemon", "ipc") for file in (root / room).rglob("*.py")]
    knowing = [file for file in sources if "import aiosqlite" in file.read_text()]
    assert knowing == [root / "sdk/postroom/chassis/store.py"]


async def test_a_file_that_was_moved_fails_its_store_once_however_often_it_is_asked(tmp_path: Path) -> None:
    async with opened_store(tmp_path) as store:
        store.path.rename(tmp_path / "aside.db")
        with capture_logs() as lines:
            for _ in range(3):
                with pytest.raises(Unknown):
                    _ = store.file_bytes
        assert [line["event"] for line in lines] == ["store_failed"]
