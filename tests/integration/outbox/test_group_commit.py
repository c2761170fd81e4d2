"""One transaction for many operations, each faring as if it had its own; full disks, failing disks, closing."""

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from support.outboxes import ALICE, WHY, accepted, counted, done, row_in, send
from support.small_disk import environment, run, run_on_a_small_disk

from outbox import AcceptedRow, Outbox
from postroom.errors import PostroomError, TryAgain

OpenOutbox = Callable[..., Awaitable[Outbox]]


def broken(client_message_id: str) -> object:
    """A send that the file refuses."""
    return msgspec.structs.replace(send(client_message_id), fingerprint=b"too short")


async def limit_pages(outbox: Outbox, pages: int) -> None:
    """Let the file grow no further than `pages`: what a full disk does, without one."""
    await outbox._store.run(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone())


async def pages(outbox: Outbox) -> int:
    return await outbox._store.run(lambda db: db.execute("PRAGMA page_count").fetchone()[0])


async def test_operations_of_one_transaction_see_each_other_in_order(outbox: Outbox) -> None:
    transactions, _ = outbox.progress
    first, none, row, again = await asyncio.gather(
        outbox.accept([send("a")], ALICE),
        outbox.claim(excluded={"topic:orders"}),
        outbox.claim(),
        outbox.accept([send("a")], ALICE),
    )
    assert outbox.progress[0] - transactions <= 2  # the first may have gone ahead alone
    assert none == []
    assert [each.client_message_id for each in row] == ["a"]
    assert isinstance(first[0], AcceptedRow)
    assert isinstance(again[0], AcceptedRow)
    assert (first[0].status, again[0].status) == ("pending", "inflight")


async def test_a_send_that_fails_fails_alone(outbox: Outbox, database: Path) -> None:
    batches = await asyncio.gather(
        outbox.accept([send("a"), broken("b"), send("c")], ALICE),  # type: ignore[list-item]
        outbox.accept([broken("d")], ALICE),  # type: ignore[list-item]
        outbox.accept([send("e"), send("a")], ALICE),
    )
    outcomes = [outcome for batch in batches for outcome in batch]
    assert [isinstance(outcome, AcceptedRow) for outcome in outcomes] == [True, False, True, False, True, True]
    assert [outcome.code for outcome in outcomes if isinstance(outcome, PostroomError)] == ["outbox_error"] * 2
    assert counted(database)["pending"] == 3
    assert (await outbox.counts()).rows["pending"] == 3


async def test_a_refused_verb_leaves_the_rest_of_its_transaction_alone(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "done")
    outcomes = await asyncio.gather(
        accepted(outbox, send("before")),
        outbox.act("abort", row_id, **WHY),
        accepted(outbox, send("after")),
        return_exceptions=True,
    )
    assert [isinstance(outcome, BaseException) for outcome in outcomes] == [False, True, False]
    assert (await outbox.counts()).rows["pending"] == 2


async def test_a_full_disk_refuses_and_the_outbox_goes_on_when_space_is_back(outbox: Outbox, database: Path) -> None:
    await accepted(outbox, send("before"))
    await limit_pages(outbox, await pages(outbox) + 2)
    large, small = await asyncio.gather(
        outbox.accept([send("large", "x" * 100_000)], ALICE), outbox.accept([send("small")], ALICE)
    )
    assert isinstance(large[0], TryAgain)
    assert (large[0].problem.status, large[0].code, large[0].retryable) == (507, "disk_full", True)
    assert isinstance(small[0], AcceptedRow)
    assert outbox.healthy
    assert await outbox.find_all(["large"]) == []
    await limit_pages(outbox, 1_000_000)
    (row,) = await accepted(outbox, send("large", "x" * 100_000))
    assert row.inserted
    assert counted(database)["pending"] == 3 == (await outbox.counts()).rows["pending"]


FULL_DISK = """
import asyncio, sys
from pathlib import Path
from support.outboxes import ALICE, WHY, send
from postroom.chassis import logs
from outbox import AcceptedRow, Outbox, RowFilter

async def main(directory):
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(2 * 1024 * 1024))
    outbox = await Outbox.open(directory / "state")
    outcomes = []
    while not outcomes or isinstance(outcomes[-1], AcceptedRow):
        outcomes += await outbox.accept([send(f"id-{len(outcomes)}", "x" * 20_000)], ALICE)
    print(outcomes[-1].code, outcomes[-1].problem.status, outbox.healthy, outbox.disk_full)
    await outbox.settle(())  # changes nothing, and needs no space
    print(outbox.disk_full)
    ballast.unlink()
    print(outbox.disk_full)
    (row,) = await outbox.accept([send(f"id-{len(outcomes) - 1}", "x" * 20_000)], ALICE)
    print("inserted", row.inserted, (await outbox.counts()).rows["pending"] == len(outcomes))
    await outbox.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_full_file_system_refuses_and_the_outbox_goes_on_when_space_is_back(tmp_path: Path) -> None:
    output = await run_on_a_small_disk(tmp_path, FULL_DISK, megabytes=3)
    assert output == ["disk_full 507 True True", "True", "False", "inserted True True"]


async def test_at_95_percent_only_what_is_new_is_refused(open_outbox: OpenOutbox) -> None:
    outbox = await open_outbox(max_bytes=2 * 1024 * 1024)
    row_id = await row_in(outbox, "inflight", "first")
    body = "x" * 50_000
    outcomes = [(await outbox.accept([send(f"id-{number}", body)], ALICE))[0] for number in range(60)]
    refused = [outcome for outcome in outcomes if isinstance(outcome, TryAgain)]
    assert {(each.problem.status, each.code, each.retryable) for each in refused} == {(507, "outbox_full", True)}
    assert 33 <= 60 - len(refused) <= 39
    again, new, same_new = await outbox.accept([send("id-0", body), send("new", body), send("new", body)], ALICE)
    assert isinstance(again, AcceptedRow)
    assert [type(new), type(same_new)] == [TryAgain, TryAgain]
    assert await outbox.settle([done(row_id)]) == 1  # the relay goes on
    claimed = await outbox.claim(limit=1000, max_bytes=2**30)
    await outbox.settle([done(row.row_id) for row in claimed])
    await outbox.prune(2**62, **WHY)
    (new,) = await outbox.accept([send("new", body)], ALICE)
    assert isinstance(new, AcceptedRow)
    assert new.inserted
    await outbox.close()


async def test_a_warning_is_logged_once_at_80_percent(
    open_outbox: OpenOutbox, capsys: pytest.CaptureFixture[str]
) -> None:
    outbox = await open_outbox(max_bytes=1024 * 1024)
    for number in range(24):
        await outbox.accept([send(f"id-{number}", "x" * 40_000)], ALICE)
    await outbox.close()
    assert capsys.readouterr().out.count("outbox_filling_up") == 1


FAILING_DISK = """
import asyncio, resource, sys
from pathlib import Path
from postroom.chassis import logs
from support.outboxes import ALICE, WHY, send
from postroom.errors import PostroomError
from postroom.chassis.exits import Fatal
from outbox import Outbox

async def main(directory):
    outbox = await Outbox.open(directory)
    await outbox.accept([send("kept")], ALICE)
    wal = Path(f"{directory}/outbox.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (wal + 4096, resource.RLIM_INFINITY))  # the next write hits EFBIG
    outcomes = await asyncio.gather(
        outbox.accept([send("a", "x" * 50_000)], ALICE),
        outbox.accept([send("b", "x" * 50_000)], ALICE),
        outbox.claim(),
        return_exceptions=True,
    )
    for outcome in outcomes:
        print(type(outcome).__name__, outcome.code, outcome.problem.status, outcome.retryable)
    print("healthy", outbox.healthy, "failed", outbox._store.failed.is_set())
    for operation in (outbox.accept([send("c")], ALICE), outbox.claim()):
        try:
            await operation
        except PostroomError as error:
            print("refused", error.code)
    try:
        await outbox.run_until_failure()
    except Fatal as fatal:
        print("exit", int(fatal.exit_code))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await outbox.close()

logs.configure("critical")
asyncio.run(main(Path(sys.argv[1])))
"""


async def test_a_failing_disk_leaves_the_outcome_unknown_and_ends_the_outbox(state: Path) -> None:
    assert await run(sys.executable, "-c", FAILING_DISK, str(state)) == [
        *["TryAgain outcome_unknown 503 True"] * 3,
        "healthy False failed True",
        *["refused outcome_unknown"] * 2,
        "exit 74",
    ]
    outbox = await Outbox.open(state)  # checks the file, since the stop was not clean
    assert await outbox.row("kept")
    await outbox.close()


KILLED = """
import asyncio, sys
from pathlib import Path
from support.outboxes import ALICE, send
from outbox import Outbox

async def main(directory):
    outbox = await Outbox.open(directory)

    async def write(writer):
        for number in range(1_000_000):
            client_message_id = f"{writer}-{number}"
            await outbox.accept([send(client_message_id)], ALICE)
            print(client_message_id, flush=True)

    async def relay():
        while True:
            await outbox.claim(limit=5)

    await asyncio.gather(relay(), *(write(writer) for writer in range(8)))

asyncio.run(main(Path(sys.argv[1])))
"""


async def test_what_accept_returned_is_there_after_kill_9(state: Path) -> None:
    for round_ in range(3):
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-c", KILLED, str(state / str(round_)), stdout=asyncio.subprocess.PIPE, env=environment()
        )
        assert program.stdout is not None
        answered = [(await program.stdout.readline()).decode().strip() for _ in range(200 * (round_ + 1))]
        program.kill()
        rest, _ = await program.communicate()
        answered += rest.decode().split("\n")[:-1]
        outbox = await Outbox.open(state / str(round_))
        rows = [await outbox.row(client_message_id) for client_message_id in answered]
        assert {row.status for row in rows} == {"pending"}  # inflight rows are taken back
        counts = (await outbox.counts()).rows
        await outbox.close()
        assert counts == counted(state / str(round_) / "outbox.db")


async def test_closing_finishes_what_is_queued_and_then_takes_nothing(open_outbox: OpenOutbox, database: Path) -> None:
    outbox = await open_outbox()
    queued = [asyncio.ensure_future(outbox.accept([send(f"id-{number}")], ALICE)) for number in range(50)]
    await asyncio.sleep(0)
    await outbox.close()
    await outbox.close()
    assert all(isinstance(outcome, AcceptedRow) for (outcome,) in await asyncio.gather(*queued))
    with pytest.raises(TryAgain) as refusal:
        await outbox.accept([send()], ALICE)
    assert (refusal.value.code, refusal.value.problem.status) == ("stopping", 503)
    assert not outbox.healthy
    assert counted(database)["pending"] == 50
    assert [file.name for file in sorted(database.parent.iterdir())] == ["outbox.db", "outbox.lock"]


async def test_the_log_stays_small_under_load(open_outbox: OpenOutbox) -> None:
    outbox = await open_outbox(checkpoint_bytes=256 * 1024)
    most = 0
    for number in range(40):
        await accepted(outbox, *(send(f"{number}-{each}", "x" * 1000) for each in range(100)))
        await outbox.claim(limit=100)
        most = max(most, (await outbox.counts()).wal_bytes)
    await outbox.close()
    assert most < 4 * 1024 * 1024


async def test_large_messages_do_not_flood_the_log(open_outbox: OpenOutbox) -> None:
    outbox = await open_outbox(max_group_rows=100)
    transactions, _ = outbox.progress
    sends = [send(f"id-{number}", "x" * 200_000) for number in range(60)]
    rows = await accepted(outbox, *sends, sends[0])
    assert [row.inserted for row in rows] == [True] * 60 + [False]
    assert outbox.progress[0] - transactions >= 15
    assert (await outbox.counts()).wal_bytes < 8 * 1024 * 1024
    (single,) = await accepted(outbox, send("larger than any group", "x" * 1_000_000))
    assert single.inserted
    await outbox.close()
