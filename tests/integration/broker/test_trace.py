"""Every look-up of a trace goes by an index, whatever the tables hold."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from broker.trace import QUERIES
from postroom.ledger.operating import QUERIES as LEDGER

BIG = {
    "client_message_dedupe",
    "topic_message",
    "message_queue",
    "message_history",
    "delivery_queue",
    "outbox_events",
    "inbox_messages",
    "dead_letters",
    "dropped_events",
    "dropped_deliveries",
    "job",
    "activity",
    "request",
    "guid",
    "missed",
    "set_aside",
}
IDS = [str(uuid4())]
VALUES: dict[str, list[Any]] = {
    "find_messages": [["order-1"], IDS, [1, 2], None],
    "find_events": [IDS, ["demo"], True, 501],
    "find_deliveries": [IDS, 501],
    "find_handled": [["demo"], IDS, 501],
    "find_letters": [["demo"], IDS, 501],
    "find_letter": [12, ["demo"]],
    "find_job": [IDS[0]],
    "find_requests": [IDS[0], 501],
    "find_message": [IDS[0], IDS[0]],
}


@pytest.mark.parametrize("query", VALUES)
async def test_a_look_up_reads_no_table_from_end_to_end(
    postgres: asyncpg.Connection[asyncpg.Record], query: str
) -> None:
    text = {**QUERIES, **LEDGER}[query]
    async with postgres.transaction():
        await postgres.execute("SET LOCAL enable_seqscan = off")  # what has no index is read so all the same
        plan = json.loads(await postgres.fetchval(f"EXPLAIN (FORMAT JSON) {text}", *VALUES[query]))

    def nodes(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [node, *(each for child in node.get("Plans", []) for each in nodes(child))]

    found = nodes(plan[0]["Plan"])
    read = {node["Relation Name"] for node in found if "Relation Name" in node} & BIG
    assert read
    whole = [node["Relation Name"] for node in found if node["Node Type"] == "Seq Scan"]
    unbound = [
        node["Relation Name"]
        for node in found
        if node["Node Type"] in ("Index Scan", "Index Only Scan") and "Index Cond" not in node
    ]
    assert set(whole) | set(unbound) - {"mesh", "member"} == set()


def test_every_look_up_is_tried() -> None:
    assert set(QUERIES) - {"find_reach"} <= VALUES.keys()
