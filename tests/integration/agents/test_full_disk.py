"""An agent's event store on a disk that is full."""

from pathlib import Path

from support.small_disk import run_on_a_small_disk

FULL_DISK = """
import asyncio, os, sys
from functools import partial
from pathlib import Path
from postroom.chassis import logs
from postroom.delivery.agents.store import NO_HASH, next_hash
from postroom.delivery.agents.store import Changes, Event, Owner, Store, read_head
from postroom.delivery.agents.store import durably

KEPT_FREE = 500 * 1024  # bytes: the log has room for some events more, the file has none for the 1 MiB in the log

def free(directory):
    disk = os.statvfs(directory)
    return disk.f_bavail * disk.f_bsize

async def make_room_once_it_is_full(directory, ballast):
    while free(directory) > 64 * 1024:
        await asyncio.sleep(0.01)
    ballast.unlink()

def event(position, previous):
    envelope = b'{"envelope":{"idempotency_key":"k%d","payload":"%s"},"role":"handled"}' % (position, b"x" * 20_000)
    return Event(position, envelope, next_hash(previous, envelope))

async def main(directory):
    store = await Store.open(directory / "events.db", Owner("counting", "shop", "main"))
    last, ballast = Event(0, b"", NO_HASH), directory / "ballast"
    while last.position < 60:
        if last.position == 45:  # some before the log is to be moved into the file
            ballast.write_bytes(b"x" * (free(directory) - KEPT_FREE))
            full = asyncio.create_task(make_room_once_it_is_full(directory, ballast))
        last = event(last.position + 1, last.state_hash)
        await durably(partial(store.append, Changes([last], {}, 0, [], [])))
    await asyncio.wait_for(full, 60)
    print("was full")
    await store.close()
    store = await Store.open(directory / "events.db", Owner("counting", "shop", "main"))
    print("whole", (await store.run(read_head)).position == last.position)
    await store.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


WAITING = """
import asyncio, os, sys
from functools import partial
from pathlib import Path
from postroom.chassis import logs
from postroom.delivery.agents.store import NO_HASH, Changes, Event, Owner, Store, durably, next_hash

async def main(directory):
    store, ballast = await Store.open(directory / "events.db", Owner("counting", "shop", "main")), directory / "ballast"
    disk = os.statvfs(directory)
    ballast.write_bytes(b"x" * (disk.f_bavail * disk.f_bsize))
    print(store.trouble)
    record = b'{"envelope":{"idempotency_key":"k","payload":"%s"},"role":"handled"}' % (b"x" * 200_000)
    event = Event(1, record, next_hash(NO_HASH, record))
    writing = asyncio.create_task(durably(partial(store.append, Changes([event], {}, 0, [], []))))
    while store.trouble is None and not writing.done():
        await asyncio.sleep(0.01)
    print(store.trouble)
    ballast.unlink()
    await writing
    print(store.trouble)
    await store.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_an_agent_says_that_it_waits_for_room_on_its_disk(tmp_path: Path) -> None:
    full = "the disk of the event store is full: free some space"
    assert await run_on_a_small_disk(tmp_path, WAITING, megabytes=2) == ["None", full, "None"]


REPUBLISHING = """
import asyncio, os, sys
from datetime import UTC, datetime
from pathlib import Path
from postroom.chassis import logs
from postroom.chassis.exits import Fatal
from postroom.delivery.agents.replay import republish
from postroom.delivery.agents.store import Owner, Store

async def main(directory):
    store = await Store.open(directory / "events.db", Owner("counting", "shop", "main"))
    disk = os.statvfs(directory)
    (directory / "events.underway").write_bytes(bytes(4096))  # as it is beside a store in use
    (directory / "ballast").write_bytes(b"x" * (disk.f_bavail * disk.f_bsize - 4096))
    try:
        await republish(directory / "events.db", datetime.now(UTC), reason="an older copy")
    except Fatal as fatal:
        print(int(fatal.exit_code), str(fatal).replace(str(directory), ""))

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_republish_on_a_full_disk_says_that_nothing_was_done(tmp_path: Path) -> None:
    why = "nothing is published again, since /events.db cannot be written: database or disk is full; check its disk"
    assert await run_on_a_small_disk(tmp_path, REPUBLISHING, megabytes=2) == [f"75 {why}"]


async def test_a_full_disk_keeps_the_log_from_the_file_and_ends_no_agent(tmp_path: Path) -> None:
    """What was committed is not written a second time: the store has no room for the same event twice."""
    assert await run_on_a_small_disk(tmp_path, FULL_DISK, megabytes=3) == ["was full", "whole True"]
