"""A receiving daemon is killed (SIGKILL) at every step of pull, commit and ack: each message is filed once.

The daemon runs as it is; around one of its collaborators stands one that ends the process before or after a call: the
connection's fetch of a batch, the file's commit, the ack. The n-th call of each start is fatal, so that every kill hits
another batch.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count
from pathlib import Path

from nats.js import JetStreamContext
from support.inboxes import message
from support.mailroom import LoneDaemon, Process
from support.receiving import ids_in, publish, received, receiving_daemon, stream_of
from support.zygote import Zygote

from postroom import AsyncClient

MESSAGES = 80  # before each start
SECONDS = 60.0  # far more than a daemon takes to its end
PAUSE = 0.05  # seconds between two messages that come later
KILLS = 3  # at each point
POINTS = ("before-handle", "before-commit", "after-commit", "before-settle", "after-settle")

FATAL = """
import os, signal, sys
import daemon.receiver as filing
from postroom.chassis.store import Transactor
from daemon.__main__ import main

point, fatal = sys.argv[1], int(sys.argv[2])
calls = 0

def reached(here):
    global calls
    if here == point:
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

transact, handle = Transactor.transact, filing.InboxHandler.handle

def commit(self, db, group):
    reached("before-commit")
    outcomes = transact(self, db, group)
    reached("after-commit")
    return outcomes

async def handled(self, batch, settle):
    reached("before-handle")
    async def settled(delivery, outcome):
        reached("before-settle")
        await settle(delivery, outcome)
        reached("after-settle")
    await handle(self, batch, settled)

Transactor.transact, filing.InboxHandler.handle = commit, handled
sys.exit(main([]))
"""


async def test_each_message_is_filed_once_whatever_kills_the_daemon(
    short_directory: Path, nats_url: str, zygote: Zygote
) -> None:
    async with asyncio.TaskGroup() as daemons:  # at once, since each waits for what a killed one had in hand
        for point in POINTS:
            daemons.create_task(kill_at(point, short_directory / point, nats_url, zygote))


async def kill_at(point: str, directory: Path, nats_url: str, zygote: Zygote) -> None:
    """Kill a daemon of a mesh of its own at that point, again and again, and see that nothing is missing."""
    directory.mkdir()
    mesh = point.replace("-", "_")
    async with stream_of(nats_url, mesh) as js:
        await file_all(receiving_daemon(directory, nats_url, mesh, zygote), js, mesh, point)


async def file_all(daemon: LoneDaemon, js: JetStreamContext, mesh: str, point: str) -> None:
    numbers = count(1)
    for kill in range(1, KILLS + 1):
        await publish(js, [message(next(numbers), mesh=mesh) for _ in range(MESSAGES)])
        process = Process(daemon.state.parent, "daemon", daemon.environment)
        process._command = [sys.executable, "-c", FATAL, point, str(_call(point, kill))]
        process.start()
        try:
            async with asyncio.timeout(SECONDS):
                while process.running:  # one batch may hold all that was published: the fatal one comes with the next
                    await publish(js, [message(next(numbers), mesh=mesh)])
                    await asyncio.sleep(PAUSE)
        finally:
            process.kill()
        assert process.exit_code == -9, process.log()
    expected = [f"id-{number}" for number in range(1, next(numbers))]
    await daemon.start()
    async with AsyncClient(daemon.socket) as client:
        found = [each.client_message_id for each in await received(client, len(expected))]
    assert sorted(found) == sorted(expected)
    assert daemon.process.stop() == 0
    assert ids_in(daemon.state) == found
    assert "inbox_older" not in daemon.process.log()


def _call(point: str, kill: int) -> int:
    """Say which call is fatal: the first transactions of a start are not all batches, and a batch settles many."""
    if point == "before-handle":
        return 1
    return kill if "settle" in point else 1 + kill % 2
