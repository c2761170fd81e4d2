"""The orphan check finds every row that accept's atomicity forbids (spec accept.md; seed §4.7.3)."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from broker.orphans import find_orphans

Message = Callable[..., dict[str, Any]]

DAMAGE = {
    "DELETE FROM mesh.topic_message": {"dedupe_without_message": 1},
    "DELETE FROM mesh.message_queue": {"dedupe_without_message": 2},
    "DELETE FROM mesh.message_history": {"dedupe_without_history": 3},
    "DELETE FROM mesh.delivery_queue WHERE recipient_id = (SELECT id FROM mesh.member WHERE name = 'ada')": {
        "deliveries_incomplete": 1
    },
    "DELETE FROM mesh.client_message_dedupe": {
        "delivery_without_dedupe": 4,
        "history_without_dedupe": 3,
        "mention_without_dedupe": 1,
        "message_without_dedupe": 3,
    },
    "UPDATE mesh.client_message_dedupe SET history_available = false WHERE destination_kind = 'queue'": {
        "history_without_dedupe": 1,
        "message_without_dedupe": 1,
    },
    "UPDATE mesh.client_message_dedupe SET history_id = 47 WHERE client_message_id = 'id-1'": {
        "dedupe_without_history": 1
    },
}


async def send_all_kinds(broker: Any, message: Message) -> None:
    items = message("id-1", mentions=["bob"]), message("id-2", "dm:bob"), message("id-3", "queue:work")
    assert {answer.status for answer in await broker.member("alice").send(*items)} == {201}


async def test_accepted_messages_of_every_kind_leave_no_orphan(broker: Any, message: Message, postgres: Any) -> None:
    await send_all_kinds(broker, message)

    assert await find_orphans(postgres) == []


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_of_every_kind_is_found(
    broker: Any, message: Message, postgres: Any, tamper: Callable[[str], Awaitable[None]], damage: str
) -> None:
    await send_all_kinds(broker, message)
    await tamper(damage)
    violations = await find_orphans(postgres)

    assert {violation.kind: violation.rows for violation in violations} == DAMAGE[damage]
    assert all(violation.examples for violation in violations)


async def test_the_command_ends_with_1_on_a_violation_and_0_without(
    broker: Any, message: Message, postgres: Any, config_file: Path
) -> None:
    async def check() -> tuple[int | None, str]:
        command = [sys.executable, "-m", "broker", "orphan-check", "--config", str(config_file)]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        output, _ = await process.communicate()
        return process.returncode, output.decode()

    await send_all_kinds(broker, message)
    assert (await check())[0] == 0
    await postgres.execute("DELETE FROM mesh.topic_message")
    code, output = await check()
    assert code == 1
    assert "dedupe_without_message: 1 rows" in output
