"""The clients against a real daemon, whose broker never answers: what is accepted stays pending."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.mailroom import LoneDaemon

from postroom import (
    AsyncClient,
    Client,
    Conflict,
    InvalidMessage,
    ListQuery,
    NotFound,
    RowFilter,
    SendRequest,
)
from postroom._wire.loop_thread import LoopThread
from postroom._wire.operations import MAX_IDS
from postroom._wire.sends import RelayStatus

REASON = "a test wants it"


async def test_a_send_is_kept_and_found(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello", meta={"a": 1}, mentions=["bob"], priority="now")
        row = await client.get(sent.client_message_id)
    assert (sent.status, sent.duplicate) == ("queued", False)
    assert (row.id, row.status, row.destination, row.priority) == (sent.outbox_id, "pending", "topic:orders", "now")


async def test_a_timeout_of_months_is_one(daemon: LoneDaemon) -> None:
    for seconds in (30 * 86_400, 1e300):
        with Client(daemon.socket, timeout=seconds) as client:
            assert (await asyncio.to_thread(client.send, "topic:orders", "hello")).status == "queued"


async def test_a_repeated_send_is_a_duplicate_and_other_content_a_conflict(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        first = await client.send("topic:orders", "hello", client_message_id="a")
        again = await client.send("topic:orders", "hello", client_message_id="a")
        with pytest.raises(Conflict) as caught:
            await client.send("topic:orders", "other", client_message_id="a")
    assert (again.outbox_id, again.duplicate) == (first.outbox_id, True)
    assert caught.value.problem.conflict == "outbox_pending_fingerprint_mismatch"


async def test_a_bad_send_names_its_field(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        with pytest.raises(InvalidMessage) as caught:
            await client.send("orders", "hello")
    assert caught.value.problem.field == "to"


async def test_wait_returns_when_the_row_is_settled(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello")
        assert (await client.wait(sent.client_message_id, 0.01)).status == "pending"
        waiting = asyncio.create_task(client.wait(sent.client_message_id, 30))
        await client.act("abort", sent.outbox_id, reason=REASON)
        assert (await waiting).status == "aborted"


async def test_an_unknown_id_is_not_found(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        for ask in (client.get("nobody"), client.wait("nobody", 1), client.inspect("nobody"), client.get("../x?y#z")):
            with pytest.raises((NotFound, InvalidMessage)):
                await ask


async def test_a_bulk_verb_over_more_rows_than_one_answer_holds_is_about_all_of_them(daemon: LoneDaemon) -> None:
    messages = (SendRequest(to="topic:orders", body="hello") for _ in range(MAX_IDS + 100))
    async with AsyncClient(daemon.socket) as client:
        sent = [each.result.outbox_id async for each in client.send_many(messages) if each.result]
        planned = await client.bulk("abort", RowFilter(), reason=REASON, dry_run=True)
    assert (planned.matched, planned.dry_run, planned.next_cursor) == (MAX_IDS + 100, True, None)
    assert planned.done == sent


@pytest.mark.parametrize("seconds", [float("nan"), float("inf")])
async def test_what_json_would_drop_or_change_is_refused(daemon: LoneDaemon, seconds: float) -> None:
    """A filter without its limit would mean every row, and bytes would become base64."""
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello")
        with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
            await client.bulk("abort", RowFilter(older_than_seconds=seconds), reason=REASON)
        with pytest.raises(InvalidMessage, match="before"):
            await client.bulk("abort", RowFilter(before=datetime(2026, 1, 31)), reason=REASON)  # noqa: DTZ001
        with pytest.raises(InvalidMessage, match="cannot be written as JSON"):
            await client.resume_relay(reason=REASON, rate_per_second=seconds)
        with pytest.raises(InvalidMessage, match="is not UTF-8 text"):
            await client.act("hold", sent.outbox_id, reason="\ud800")
        for wrong in ({"reason": b"why"}, {"reason": REASON, "new_client_message_id": b"id"}):
            with pytest.raises(InvalidMessage, match=r"cannot be written as JSON: .* bytes"):
                await client.act("requeue", sent.outbox_id, **wrong)
        assert (await client.get(sent.client_message_id)).status == "pending"


async def test_an_empty_id_for_a_successor_is_refused_instead_of_minted(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello")
        with pytest.raises(InvalidMessage, match="new_client_message_id"):
            await client.act("requeue", sent.outbox_id, reason=REASON, new_client_message_id="")


@pytest.mark.parametrize("message_id", [".", "..", "...", "~", "a:b", "export"])
async def test_every_id_that_may_be_sent_is_found_and_repaired_under_it(daemon: LoneDaemon, message_id: str) -> None:
    """Dots alone would be taken out of a path, and a verb on one row would become a verb on many."""
    async with AsyncClient(daemon.socket) as client:
        await client.send("topic:orders", "hello", client_message_id=message_id)
        assert (await client.get(message_id)).client_message_id == message_id
        assert (await client.inspect(message_id)).row.client_message_id == message_id
        assert (await client.act("abort", message_id, reason=REASON)).status == "aborted"


async def test_an_operator_repairs_one_row(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello")
        assert (await client.act("hold", sent.outbox_id, reason=REASON)).held
        assert not (await client.act("release", sent.outbox_id, reason=REASON)).held
        assert (await client.act("flush", sent.outbox_id, reason=REASON)).status == "pending"
        successor = await client.act(
            "requeue",
            sent.outbox_id,
            reason=REASON,
            new_client_message_id="fresh",
            message=SendRequest(to="topic:other", body="patched"),
        )
        chain = await client.inspect("fresh")
    assert (successor.client_message_id, successor.destination) == ("fresh", "topic:other")
    assert [row.id for row in chain.chain] == [sent.outbox_id, successor.id]
    assert [action.verb for action in chain.log] == ["hold", "release", "flush", "requeue"]
    assert {action.reason for action in chain.log} == {REASON}


async def test_an_operator_repairs_many_rows_and_prunes(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        async for _ in client.send_many(SendRequest(to="topic:orders") for _ in range(20)):
            pass
        plan = await client.bulk("abort", RowFilter(destination="topic:orders"), reason=REASON, dry_run=True)
        assert (plan.dry_run, plan.matched) == (True, 20)
        assert (await client.list_rows(ListQuery(status="aborted"))).rows == []
        done = await client.bulk("abort", RowFilter(destination="topic:orders"), reason=REASON)
        assert len(done.done) == 20
        told: list[int] = []
        assert (await client.prune(0, reason=REASON, tell=told.append)).pruned == 20
        assert told == [20]


async def test_lists_are_paged_and_exported_whole(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        async for _ in client.send_many(SendRequest(to="topic:orders") for _ in range(250)):
            pass
        seen, cursor = [], None
        while True:
            page = await client.list_rows(ListQuery(limit=100, cursor=cursor))
            seen += page.rows
            if (cursor := page.next_cursor) is None:
                break
        exported = [row async for row in client.export()]
    assert len(seen) == 250
    assert [row.id for row in exported] == [row.id for row in seen]


async def test_a_backup_is_streamed(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        await client.send("topic:orders", "kept")
        pieces = [piece async for piece in client.backup(reason=REASON)]
    with Client(daemon.socket) as blocking:
        assert len(b"".join(blocking.backup(reason=REASON))) == sum(map(len, pieces)) > 0


async def test_the_relay_is_paused_and_resumed(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:

        async def until(holds: Callable[[RelayStatus], bool]) -> None:
            while not holds((await client.health()).relay):
                pass

        await client.pause_relay("topic:orders", reason=REASON)
        await until(lambda relay: relay.paused_destinations == ["topic:orders"])
        await client.resume_relay("topic:orders", reason=REASON)
        await client.resume_relay(reason=REASON, rate_per_second=50)
        await until(lambda relay: relay.paused_destinations == [] and relay.rate_per_second == 50)


async def test_the_control_plane(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket) as client:
        assert (await client.ready()).ready
        assert (await client.version()).mesh == "demo"
        assert (await client.health()).rows["pending"] == 0


async def test_a_stream_survives_a_daemon_that_is_killed_again_and_again(daemon: LoneDaemon) -> None:
    total = 20_000
    lines: list[int] = []
    async with AsyncClient(daemon.socket, patience=60) as client:
        async for result in client.send_many(SendRequest(to="topic:orders", body=str(n)) for n in range(total)):
            assert result.problem is None
            lines.append(result.line)
            if len(lines) in {1000, 7000, 13_000}:
                await daemon.restart()
        rows = (await client.health()).rows
    assert sorted(lines) == list(range(1, total + 1))
    assert rows["pending"] == total


@pytest.mark.parametrize("_round", range(5))
async def test_a_stream_whose_last_messages_meet_a_kill_is_finished(daemon: LoneDaemon, _round: int) -> None:
    half_answered = asyncio.Event()

    async def messages() -> AsyncIterator[SendRequest]:
        for number in range(1, 1001):
            yield SendRequest(to="topic:orders", client_message_id=f"kill-{number}")
            if number == 500:
                await half_answered.wait()

    answers: dict[int, str | None] = {}
    async with AsyncClient(daemon.socket, patience=60) as client, asyncio.timeout(60):
        async for result in client.send_many(messages()):
            answers[result.line] = result.result and result.result.client_message_id
            if len(answers) == 500 and not half_answered.is_set():
                half_answered.set()
                await asyncio.sleep(0)  # the rest goes out while the daemon dies
                await daemon.restart()
    assert answers == {number: f"kill-{number}" for number in range(1, 1001)}


async def test_single_sends_survive_a_daemon_that_is_killed(daemon: LoneDaemon) -> None:
    async with AsyncClient(daemon.socket, patience=60) as client:

        async def write(writer: int) -> list[str]:
            ids = []
            for number in range(100):
                ids.append((await client.send("topic:orders", f"{writer}-{number}")).client_message_id)
                if writer == 0 and number in {20, 60}:
                    await daemon.restart()
            return ids

        ids = [each for written in await asyncio.gather(*map(write, range(8))) for each in written]
        rows = (await client.health()).rows
    assert len(set(ids)) == 800
    assert rows["pending"] == 800


def blocking_work(socket: Path) -> None:
    with Client(socket) as client:
        sent = client.send("topic:orders", "hello")
        assert client.get(sent.client_message_id).id == sent.outbox_id
        results = list(client.send_many(SendRequest(to="topic:orders") for _ in range(3000)))
        assert [result.line for result in results] == list(range(1, 3001))
        assert sum(1 for _ in client.export()) == 3001
        with pytest.raises(NotFound):
            client.inspect("nobody")
        next(iter(client.send_many(SendRequest(to="topic:orders") for _ in range(10_000))))


async def test_a_program_without_a_loop_does_the_same(daemon: LoneDaemon) -> None:
    await asyncio.to_thread(blocking_work, daemon.socket)


async def test_many_threads_share_one_client(daemon: LoneDaemon) -> None:
    def share() -> set[str]:
        ids: set[str] = set()
        with Client(daemon.socket) as client:

            def write() -> None:
                for _ in range(50):
                    ids.add(client.send("topic:orders", "x").client_message_id)

            threads = [threading.Thread(target=write) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        client.close()  # a second time does nothing
        return ids

    assert len(await asyncio.to_thread(share)) == 400


async def test_a_blocking_export_waits_once_for_the_rows_that_come_together(
    daemon: LoneDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = 0
    run = LoopThread.run

    def counted(loop: LoopThread, work: Any) -> Any:
        nonlocal waits
        waits += 1
        return run(loop, work)

    def export() -> int:
        nonlocal waits
        with Client(daemon.socket) as client:
            for _ in client.send_many(SendRequest(to="topic:orders") for _ in range(2000)):
                pass
            waits = 0
            return sum(1 for _ in client.export())

    monkeypatch.setattr(LoopThread, "run", counted)
    assert await asyncio.to_thread(export) == 2000
    assert waits < 200


async def test_a_closed_client_says_so(daemon: LoneDaemon) -> None:
    def use_a_closed_one() -> None:
        client = Client(daemon.socket)
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            client.send("topic:orders", "x")
        with pytest.raises(RuntimeError, match="closed"):
            list(client.export())

    await asyncio.to_thread(use_a_closed_one)


async def test_a_client_taken_through_a_fork_says_so_instead_of_hanging(daemon: LoneDaemon) -> None:
    program = f"""
import os
from postroom import Client
client = Client({str(daemon.socket)!r})
client.send("topic:orders", "x")
if (child := os.fork()) == 0:
    try:
        client.send("topic:orders", "y")
    except RuntimeError as error:
        os.write(1, str(error).encode())
    finally:
        client.close()
        os._exit(0)
os.waitpid(child, 0)
client.send("topic:orders", "z")
client.close()
"""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            said, complaints = await running.communicate()
    except TimeoutError:
        running.kill()
        raise
    assert running.returncode == 0
    assert b"create one in this process" in said
    assert b"never awaited" not in complaints
