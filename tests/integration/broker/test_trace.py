"""Every look-up of a trace goes by an index, whatever the tables hold."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from broker.retention import Sweeper
from broker.trace import QUERIES
from postroom.ledger.operations import QUERIES as LEDGER

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
    "ended_row",
    "set_aside",
}
TABLES = """
SELECT string_agg(oid::regclass::text, ', ') FROM pg_class
WHERE relkind = 'r' AND relnamespace::regnamespace::text IN ('mesh', 'ledger', 'postroom')
"""
IDS = [str(uuid4())]
VALUES: dict[str, list[Any]] = {
    "find_ended_rows": [["order-1"], [1, 2], 501],
    "find_messages": [["order-1"], IDS, [1, 2], None],
    "find_events": [IDS, ["demo"], True, 501],
    "find_deliveries": [IDS, 501],
    "find_handled": [["demo"], IDS, 501],
    "find_caused": [IDS, ["demo"], 501],
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
    transaction = postgres.transaction()
    await transaction.start()
    try:
        await postgres.execute(f"TRUNCATE {await postgres.fetchval(TABLES)}")  # plans for them as if they had many rows
        await postgres.execute("SET LOCAL enable_seqscan = off")  # what has no index is read so all the same
        plan = json.loads(await postgres.fetchval(f"EXPLAIN (FORMAT JSON) {text}", *VALUES[query]))
    finally:
        await transaction.rollback()

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
    writing = {"keep_ended_rows", "forget_ended_rows", "limit_ended_rows", "sweep_ended_rows"}
    assert set(QUERIES) - {"find_reach"} - writing <= VALUES.keys()


def ended(number: int, name: str, **fields: Any) -> dict[str, Any]:
    """The report of a row that died."""
    row = {
        "id": f"01ROW{number}",
        "client_message_id": name,
        "status": "dead",
        "destination": "topic:nowhere",
        "priority": "next",
        "enqueued_at": f"2026-01-01T00:00:0{number}Z",
        "attempts": 1,
        "next_attempt_at": f"2026-01-01T00:00:0{number}Z",
        "request_fingerprint": "00",
        "payload_bytes": 1,
        "last_error": "topic_not_found: there is no topic nowhere",
    }
    rest = {key: fields.pop(key) for key in ("log", "successor") if key in fields}
    return {"row": row | fields, **rest}


async def report(caller: Any, *rows: Any, host: str = "red") -> None:
    answer = await caller.post("/v1/ended_rows", {"host": host, "rows": rows})
    assert answer.status == 204, answer.body


async def story(caller: Any, name: str) -> dict[str, Any]:
    answer = await caller.get(f"/v1/trace/{name}")
    assert answer.status == 200, answer.body
    return dict(answer.body)


async def test_a_row_that_died_on_a_daemon_is_told_of_with_its_host_and_what_to_run_there(broker: Any) -> None:
    await report(broker.member("alice"), ended(1, "k"))
    for name in ("k", "01ROW1"):
        told = await story(broker.member("bob"), name)
        kept, posted = told["steps"]
        assert (kept["what"], kept["thing"], kept["outcome"], kept["place"]) == (
            "kept",
            "01ROW1",
            "dead",
            "postroomd on red",
        )
        assert kept["ids"]["sender"] == "alice"
        assert posted["reason"] == "refused in B2: topic_not_found: there is no topic nowhere"
        (wait,) = told["waits"]
        assert wait["why"].startswith("it died on red")
        create, requeue = wait["help"].split(" && ")
        assert create == f"postroom topic create nowhere --mesh {kept['ids']['mesh']}"
        assert requeue == "postroom outbox requeue 01ROW1 --reason 'its cause is repaired'  # on red"


async def test_a_row_that_expired_is_told_of_and_can_be_sent_again_on_its_host(broker: Any) -> None:
    await report(broker.member("alice"), ended(1, "k", last_error="expired: older than 600 h"))
    told = await story(broker.member("alice"), "k")
    assert [(step["what"], step["outcome"]) for step in told["steps"]] == [("kept", "dead"), ("expired", "dead")]
    assert told["waits"][0]["help"] == "postroom outbox requeue 01ROW1 --reason 'its cause is repaired'  # on red"


async def test_a_member_cannot_fill_the_table_its_oldest_reports_are_forgotten(
    broker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.trace._MOST_ENDED", 3)
    alice, bob = broker.member("alice"), broker.member("bob")
    await report(bob, ended(9, "of-bob"))
    for number in range(1, 6):
        await report(alice, ended(number, f"k{number}"))
    assert [(await alice.get(f"/v1/trace/k{number}")).status for number in range(1, 6)] == [404, 404, 200, 200, 200]
    await report(alice, ended(6, "k6"), ended(7, "k7"), ended(8, "k8"), ended(1, "k1"))
    assert [(await alice.get(f"/v1/trace/k{number}")).status for number in (1, 5, 6, 7, 8)] == [404, 404, 200, 200, 200]
    assert (await bob.get("/v1/trace/of-bob")).status == 200


async def test_a_report_that_comes_twice_is_as_one_and_a_later_one_takes_its_place(broker: Any) -> None:
    alice = broker.member("alice")
    await report(alice, ended(1, "k"))
    first = await story(alice, "k")
    await report(alice, ended(1, "k"))
    assert await story(alice, "k") == first
    await report(alice, ended(1, "k", status="done"))
    assert (await alice.get("/v1/trace/k")).status == 404


async def test_rows_that_were_requeued_are_one_story_and_who_did_it_is_for_an_admin(broker: Any) -> None:
    act = {"at": "2026-01-01T00:00:09Z", "verb": "requeue", "actor": "uid 0 (root)", "reason": "it is there"}
    retired = {"status": "aborted", "aborted_at": act["at"], "aborted_by": "operator"}
    rows = [
        ended(number, f"k-{number}", successor=f"k-{number + 1}", superseded_by=f"01ROW{number + 1}", **retired,
              log=[{**act, "row_id": f"01ROW{number}"}])
        for number in (1, 2)
    ]  # fmt: skip
    await report(broker.member("alice"), *rows, ended(3, "k-3"))
    for name in ("k-1", "k-2", "k-3", "01ROW2"):
        told = await story(broker.admin, name)
        steps = {step["id"]: step for step in told["steps"]}
        kept = [step for step in told["steps"] if step["what"] == "kept"]
        assert [(step["thing"], step["outcome"]) for step in kept] == [
            ("01ROW1", "ended"),
            ("01ROW2", "ended"),
            ("01ROW3", "dead"),
        ]
        assert [steps[step["parent"]]["what"] for step in kept[1:]] == ["requeue", "requeue"]
        assert [wait["step"] for wait in told["waits"]] == ["row:01ROW3"]
    assert {step["what"] for step in (await story(broker.member("bob"), "k-1"))["steps"]} == {"kept", "posted"}


async def test_members_of_another_mesh_are_not_told_and_change_nothing(broker: Any) -> None:
    await broker.add_mesh("other", {"oscar": "admin"})
    oscar = broker.member("oscar", "other")
    await report(broker.member("alice"), ended(1, "k"))
    await report(oscar, ended(1, "k", status="done"))
    await report(oscar, ended(1, "mine"), host="blue")
    for name in ("k", "01ROW1"):
        assert (await story(broker.member("alice"), name))["steps"][0]["place"] == "postroomd on red"
    assert (await oscar.get("/v1/trace/k")).status == 404
    assert (await broker.admin.post("/v1/ended_rows", {"host": "red", "rows": []})).status == 403


async def test_reports_are_forgotten_with_the_messages_of_their_time(broker: Any, postgres: Any) -> None:
    alice = broker.member("alice")
    await report(alice, ended(1, "old"), ended(2, "young"))
    await postgres.execute("UPDATE mesh.ended_row SET reported_at = now() - interval '31 days' WHERE row_id = '01ROW1'")
    services = broker.services
    assert await Sweeper(services.database, services.config.retention, services.metrics).sweep()
    assert (await alice.get("/v1/trace/old")).status == 404
    assert (await alice.get("/v1/trace/young")).status == 200
