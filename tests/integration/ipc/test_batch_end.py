"""What a batch leaves behind when its caller goes away or takes its time."""

from __future__ import annotations

import asyncio
from typing import Any

from support.waiting import until

from ipc.shares import Limits

BATCH = b"POST /v1/send/batch HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-ndjson\r\nContent-Length: %d\r\n\r\n"


def _batch_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("batch")]


async def test_a_stop_answers_what_has_arrived_and_waits_for_no_further_line(room: Any) -> None:
    reader, writer = await asyncio.open_unix_connection(str(room.path))
    first = b'{"to":"topic:orders","body":"a","client_message_id":"first"}\n'
    writer.write(BATCH % 1_000_000 + first)
    await reader.readuntil(b"first")
    writer.write(first.replace(b"first", b"second") + b'{"to":"topic:or')
    await until(lambda: room.server.connections[0]._last_body.total_bytes > 2 * len(first))
    await asyncio.wait_for(room.server.stop(300), 20)
    rest = await reader.read()
    assert b"second" in rest
    assert b'"line":3' not in rest
    assert not rest.endswith(b"0\r\n\r\n")  # the caller sees that it was not everything
    writer.close()


async def test_a_caller_that_hangs_up_leaves_no_task_behind(room: Any) -> None:
    """Its answers pile up unread, so that chunks wait to be accepted, when the connection is dropped."""
    _, writer = await asyncio.open_unix_connection(str(room.path), limit=1024)
    lines = b"x\n" * 100_000
    writer.write(BATCH % (len(lines) + 1) + lines)
    await until(lambda: any(connection.writing_paused for connection in room.server.connections))
    for _ in range(100):  # the reader goes on until the chunks that may wait do
        await asyncio.sleep(0)
    assert _batch_tasks()
    room.server.drop_overdue(asyncio.get_running_loop().time() + Limits().stall_seconds + 1)
    await until(lambda: room.services.counters.in_flight == 0)
    assert _batch_tasks() == []
    writer.close()
