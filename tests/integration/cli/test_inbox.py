"""`postroom inbox list | tail` against a real daemon on a real NATS."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.js import JetStreamContext
from support.inboxes import message
from support.mailroom import LoneDaemon
from support.receiving import publish, received, receiving_daemon, stream_of
from support.terminal import Terminal
from support.zygote import Zygote

from postroom import AsyncClient

MESH = "inbox_cli"


@pytest.fixture
async def js(nats_url: str) -> AsyncIterator[JetStreamContext]:
    async with stream_of(nats_url, MESH) as js:
        yield js


@pytest.fixture
async def daemon(
    short_directory: Path,
    nats_url: str,
    js: JetStreamContext,  # noqa: ARG001
    zygote: Zygote,
) -> AsyncIterator[LoneDaemon]:
    daemon = receiving_daemon(short_directory, nats_url, MESH, zygote)
    await daemon.start()
    yield daemon
    daemon.stop()


async def arrived(daemon: LoneDaemon, js: JetStreamContext, *numbers: int, **different: object) -> None:
    """Publish messages and wait until they are in the inbox."""
    async with AsyncClient(daemon.socket) as client:
        before = len((await client.inbox()).messages)
        await publish(js, [message(number, mesh=MESH, **different) for number in numbers])
        await received(client, before + len(numbers))


async def test_a_list_shows_messages_without_what_they_say(
    daemon: LoneDaemon, js: JetStreamContext, terminal: Terminal
) -> None:
    await arrived(daemon, js, 1, 2)
    await arrived(daemon, js, 3, sender="carol", body="a secret")
    lines = [json.loads(line) for line in (await run(terminal, "inbox", "list", "--json")).splitlines()]
    assert [(line["client_message_id"], line["sender"]) for line in lines] == [
        ("id-1", "bob"),
        ("id-2", "bob"),
        ("id-3", "carol"),
    ]
    assert not any("body" in line for line in lines)
    table = await run(terminal, "inbox", "list", "--from", "carol")
    assert "id-3" in table
    assert "id-1" not in table
    assert "secret" not in table
    assert "a secret" in await run(terminal, "inbox", "list", "--body", "--since", "1h")


async def test_a_list_goes_on_at_its_cursor(daemon: LoneDaemon, js: JetStreamContext, terminal: Terminal) -> None:
    await arrived(daemon, js, *range(1, 6))
    first = (await run(terminal, "inbox", "list", "--json", "--limit", "3")).splitlines()
    cursor = json.loads(first[-1])["position"]
    rest = (await run(terminal, "inbox", "list", "--json", "--cursor", str(cursor))).splitlines()
    assert [json.loads(line)["client_message_id"] for line in first + rest] == [f"id-{n}" for n in range(1, 6)]
    assert len((await run(terminal, "inbox", "list", "--json", "--all")).splitlines()) == 5


async def test_tail_follows_over_a_restart_of_the_daemon(daemon: LoneDaemon, js: JetStreamContext) -> None:
    await arrived(daemon, js, 1, 2)
    command = [sys.executable, "-m", "cli", "inbox", "tail", "--json", "--since", "1h", "--socket", str(daemon.socket)]
    tail = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert tail.stdout is not None
    try:
        async with asyncio.timeout(60):
            found = [json.loads(await tail.stdout.readline()) for _ in range(2)]
            await daemon.restart()
            await publish(js, [message(3, mesh=MESH), message(4, mesh=MESH)])
            found += [json.loads(await tail.stdout.readline()) for _ in range(2)]
    finally:
        tail.kill()
        await tail.communicate()
    assert [each["client_message_id"] for each in found] == ["id-1", "id-2", "id-3", "id-4"]
    assert found[0]["body"] == "message 1"


async def run(terminal: Terminal, *words: str) -> str:
    """Run a verb that succeeds, beside this loop, and return what it writes."""
    done = await asyncio.to_thread(terminal.run, *words)
    assert done.code == 0, done
    return done.out
