"""The orphan check finds every row that accept's atomicity forbids (docs/contract/accept.md#accept-38)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from postroom.delivery.publication.postgres import DELIVERIES, EVENTS, Table, drop_failing, list_dropped, list_failing
from postroom.worker.orphans import find_orphans

KEPT = timedelta(days=30)

Message = Callable[..., dict[str, Any]]

DAMAGE = {
    "DELETE FROM mesh.topic_message": {"dedupe_without_message": 1, "event_without_message": 1},
    "DELETE FROM mesh.message_queue": {"dedupe_without_message": 2, "event_without_message": 1},
    "DELETE FROM postroom.outbox_events WHERE aggregate_type = 'topic'": {"message_without_event": 1},
    "DELETE FROM postroom.outbox_events WHERE aggregate_type = 'queue'": {"message_without_event": 1},
    "UPDATE postroom.outbox_events SET id = gen_random_uuid() WHERE aggregate_type = 'queue'": {
        "message_without_event": 1
    },
    "WITH gone AS (DELETE FROM mesh.topic_message), forgotten AS (DELETE FROM mesh.client_message_dedupe "
    "WHERE destination_kind = 'topic'), past AS (DELETE FROM mesh.message_history WHERE destination_kind = 'topic' "
    "RETURNING broker_message_id), unmentioned AS (DELETE FROM mesh.mention_index) "
    "DELETE FROM mesh.delivery_queue WHERE broker_message_id IN (SELECT broker_message_id FROM past)": {
        "event_without_message": 1
    },
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

    assert await find_orphans(postgres, events_kept=KEPT) == []


@pytest.mark.parametrize("damage", DAMAGE)
async def test_damage_of_every_kind_is_found(
    broker: Any, message: Message, postgres: Any, tamper: Callable[[str], Awaitable[None]], damage: str
) -> None:
    await send_all_kinds(broker, message)
    await tamper(damage)
    violations = await find_orphans(postgres, events_kept=KEPT)

    assert {violation.kind: violation.rows for violation in violations} == DAMAGE[damage]
    assert all(violation.examples for violation in violations)


@pytest.mark.parametrize("table", [EVENTS, DELIVERIES])
async def test_what_an_operator_dropped_is_not_missed(
    broker: Any, message: Message, postgres: Any, table: Table
) -> None:
    await broker.member("alice").send(message("id-1"), message("id-2"))
    for name in ("postroom.outbox_events", "mesh.delivery_queue"):
        await postgres.execute(f"UPDATE {name} SET publish_attempts = 1, publish_error = 'too large'")  # noqa: S608
    failing = (await list_failing(postgres, table)).failing
    async with postgres.transaction():
        await drop_failing(postgres, table, [failing[0].id], actor="olga", reason="a test")
    assert [one.id for one in await list_dropped(postgres, table, "demo")] == [failing[0].id]
    assert await list_dropped(postgres, table, "dem") == []
    assert await find_orphans(postgres, events_kept=KEPT) == []


async def test_an_event_may_be_pruned_before_its_message_and_outlive_its_forgotten_id(
    broker: Any, message: Message, postgres: Any, tamper: Callable[[str], Awaitable[None]]
) -> None:
    await broker.member("alice").send(message("id-1"), message("id-2", "queue:work"))
    await postgres.execute("DELETE FROM postroom.outbox_events WHERE aggregate_type = 'queue'")
    (violation,) = await find_orphans(postgres, events_kept=KEPT)
    assert (violation.kind, violation.rows) == ("message_without_event", 1)
    assert await find_orphans(postgres, events_kept=timedelta(0)) == []

    await postgres.execute("UPDATE postroom.outbox_events SET occurred_at = now() - interval '8 days'")
    for table in ("client_message_dedupe", "topic_message", "message_queue", "message_history", "delivery_queue"):
        await tamper(f"DELETE FROM mesh.{table}")  # noqa: S608 - our own names
    assert await find_orphans(postgres, events_kept=KEPT) == []


async def test_events_of_other_services_need_no_message(broker: Any, message: Message, postgres: Any) -> None:
    await send_all_kinds(broker, message)
    for payload in ({}, {"mesh": "demo"}, {"mesh": "demo", "broker_message_id": "another"}):
        emit = "SELECT postroom.emit('demo', 'topic', 'demo/topic:orders', 'orders', $1)"
        await postgres.execute(emit, json.dumps(payload))

    assert await find_orphans(postgres, events_kept=KEPT) == []


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
    assert "dedupe_without_message: 1 row, " in output
