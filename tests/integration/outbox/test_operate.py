"""The operator's verbs: requeue with its chain, abort, hold, release, flush, bulk, prune, and the log of it all."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.outboxes import OPERATOR, START, WHY, Clock, accepted, dead, opened, retry, row_in, send
from support.traces import TRACE, UNSAMPLED, attributes, links_of, traceparent_of

from outbox import Accepted, Caller, Outbox, RelayControl, RowFilter, Unanswered, reader
from postroom._wire.message import Envelope, prepare
from postroom._wire.operations import VERBS
from postroom.errors import Conflict, InvalidMessage, NotFound


async def test_requeue_retires_the_row_and_writes_its_successor(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "dead")
    clock.forward(60)
    successor = await outbox.act("requeue", row_id, **WHY)
    assert successor.status == "pending"
    assert successor.client_message_id != "id-1"
    assert (successor.attempts, successor.last_error, successor.submitted_by) == (0, None, "1000:1000")
    chain = await outbox.inspect(row_id)
    assert [(row.id, row.status) for row in chain.chain] == [(row_id, "aborted"), (successor.id, "pending")]
    assert (chain.row.aborted_by, chain.row.superseded_by) == ("operator", successor.id)
    assert chain.row.aborted_at is not None
    assert chain.row.aborted_at.timestamp() * 1000 == clock.now
    assert chain.row.last_error == "topic_not_found: there is no topic orders"
    (line,) = chain.log
    assert (line.verb, line.actor, line.reason, line.row_id) == ("requeue", "uid 0 (root)", WHY["reason"], row_id)
    (claimed,) = await outbox.claim()
    assert (claimed.client_message_id, claimed.payload) == (successor.client_message_id, send().payload)
    assert claimed.fingerprint == send().fingerprint


async def test_a_requeue_begins_a_trace_with_a_link_to_the_one_before(
    outbox: Outbox, recorded: InMemorySpanExporter
) -> None:
    message = prepare(msgspec.json.encode({"to": "topic:orders", "meta": {"traceparent": TRACE}}), traceparent=TRACE)
    await accepted(outbox, message)
    await outbox.act("requeue", (await outbox.find_all([message.client_message_id]))[0].id, **WHY)
    (claimed,) = await outbox.claim()
    (span,) = recorded.get_finished_spans()
    assert (span.name, span.parent, links_of(span)) == ("requeue topic:orders", None, [TRACE])
    assert attributes(span)["messaging.message.id"] == claimed.client_message_id
    before, after = (msgspec.json.decode(each.payload, type=Envelope) for each in (message, claimed))
    assert after == msgspec.structs.replace(before, traceparent=traceparent_of(span))
    assert (claimed.fingerprint, len(claimed.payload)) == (message.fingerprint, len(message.payload))


@pytest.mark.parametrize("traceparent", [None, UNSAMPLED])
async def test_a_requeue_of_what_has_no_sampled_trace_changes_nothing(
    outbox: Outbox, recorded: InMemorySpanExporter, traceparent: str | None
) -> None:
    message = prepare(b'{"to":"topic:orders"}', traceparent=traceparent)
    await accepted(outbox, message)
    await outbox.act("requeue", (await outbox.find_all([message.client_message_id]))[0].id, **WHY)
    (claimed,) = await outbox.claim()
    assert (claimed.payload, recorded.get_finished_spans()) == (message.payload, ())


async def test_the_chain_is_whole_from_wherever_it_is_inspected(outbox: Outbox) -> None:
    ids = [await row_in(outbox, "pending")]
    for _ in range(3):
        ids.append((await outbox.act("requeue", ids[-1], **WHY)).id)
    for row_id in ids:
        chain = await outbox.inspect(row_id)
        assert [row.id for row in chain.chain] == ids
        assert chain.row.id == row_id
        assert [line.row_id for line in chain.log] == ids[:3]


async def test_requeue_takes_the_id_that_the_operator_chose(outbox: Outbox) -> None:
    successor = await outbox.act("requeue", await row_in(outbox, "dead"), new_client_message_id="chosen", **WHY)
    assert successor.client_message_id == "chosen"


@pytest.mark.parametrize("used", ["id-1", "aborted", "done"])
async def test_requeue_refuses_an_id_that_was_ever_used(outbox: Outbox, used: str) -> None:
    if used != "id-1":
        await row_in(outbox, used, used)
    row_id = await row_in(outbox, "dead")
    with pytest.raises(Conflict, match="was used before") as refusal:
        await outbox.act("requeue", row_id, new_client_message_id=used, **WHY)
    assert refusal.value.code == "client_message_id_taken"
    assert (await outbox.inspect(row_id)).row.status == "dead"


async def test_requeue_refuses_what_is_no_id(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead")
    with pytest.raises(InvalidMessage):
        await outbox.act("requeue", row_id, new_client_message_id="no id", **WHY)


async def test_a_patched_message_has_its_own_fingerprint_and_destination(outbox: Outbox) -> None:
    patch = prepare(msgspec.json.encode({"to": "dm:bob", "body": "patched", "priority": "now"}))
    successor = await outbox.act("requeue", await row_in(outbox, "dead"), patch=patch, **WHY)
    assert (successor.destination, successor.priority) == ("dm:bob", "now")
    (claimed,) = await outbox.claim()
    assert claimed.fingerprint == patch.fingerprint != send().fingerprint
    assert msgspec.json.decode(claimed.payload, type=Envelope).body == "patched"
    assert (await outbox.inspect(successor.id)).log[0].detail == (
        f"superseded by {successor.id} ({successor.client_message_id}), patched"
    )


async def test_a_successor_keeps_the_time_before_which_it_may_not_go(outbox: Outbox, clock: Clock) -> None:
    (row,) = await accepted(outbox, send(not_before=START + 60_000))
    successor = await outbox.act("requeue", row.row_id, **WHY)
    assert successor.not_before is not None
    assert await outbox.claim() == []
    clock.forward(60)
    assert len(await outbox.claim()) == 1


async def test_the_retired_id_stays_used(outbox: Outbox) -> None:
    await outbox.act("requeue", await row_in(outbox, "dead"), **WHY)
    (row,) = await accepted(outbox, send())
    assert (row.inserted, row.status) == (False, "aborted")


async def test_the_same_row_requeued_twice_at_once_has_one_successor(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead")
    outcomes = await asyncio.gather(*(outbox.act("requeue", row_id, **WHY) for _ in range(8)), return_exceptions=True)
    assert sum(isinstance(outcome, Conflict) for outcome in outcomes) == 7
    assert len((await outbox.inspect(row_id)).chain) == 2


async def test_the_successor_of_a_held_row_is_held_until_it_is_released(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "pending")
    await outbox.act("hold", row_id, **WHY)
    successor = await outbox.act("requeue", row_id, **WHY)
    assert successor.held
    assert await outbox.claim() == []
    await outbox.act("release", successor.id, **WHY)
    assert [row.row_id for row in await outbox.claim()] == [successor.id]


async def test_hold_and_release_keep_the_time_of_the_next_attempt(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "inflight")
    await outbox.settle([retry(row_id, 60_000)])
    held = await outbox.act("hold", row_id, **WHY)
    assert held.held
    released = await outbox.act("release", row_id, **WHY)
    assert not released.held
    assert released.next_attempt_at == held.next_attempt_at
    assert await outbox.claim() == []


async def test_flush_retries_now_but_refuses_a_row_before_its_time(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "inflight")
    await outbox.settle([retry(row_id, 60_000)])
    (later,) = await accepted(outbox, send("later", not_before=START + 60_000))
    await outbox.act("flush", row_id, **WHY)
    with pytest.raises(Conflict, match="its `not_before` has not come") as refusal:
        await outbox.act("flush", later.row_id, **WHY)
    assert refusal.value.code == "wrong_state"
    for dry_run in (True, False):
        result = await outbox.bulk("flush", RowFilter(), dry_run=dry_run, **WHY)
        assert (result.done, result.skipped) == ([row_id], [later.row_id])
    assert [row.row_id for row in await outbox.claim()] == [row_id]
    clock.forward(61)
    assert (await outbox.act("flush", later.row_id, **WHY)).status == "pending"


async def test_a_held_row_is_not_flushed_nor_held_again(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "pending")
    await outbox.act("hold", row_id, **WHY)
    with pytest.raises(Conflict, match="it is held: release it"):
        await outbox.act("flush", row_id, **WHY)
    with pytest.raises(Conflict, match="it is held: release it"):
        await outbox.act("hold", row_id, **WHY)


@pytest.mark.parametrize("reason", ["", "  ", "\n"])
@pytest.mark.parametrize("verb", VERBS)
async def test_a_verb_without_a_reason_is_refused(outbox: Outbox, verb: str, reason: str) -> None:
    row_id = await row_in(outbox, "pending")
    with pytest.raises(InvalidMessage) as refusal:
        await outbox.act(verb, row_id, caller=OPERATOR, reason=reason)
    assert (refusal.value.code, refusal.value.problem.field) == ("reason_required", "reason")


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("row_id", ["nothing", "%", "' or 1=1", "", "id"])
async def test_a_verb_on_no_row_says_so(outbox: Outbox, verb: str, row_id: str) -> None:
    await row_in(outbox, "pending")
    with pytest.raises(NotFound, match="there is no outbox row"):
        await outbox.act(verb, row_id, **WHY)


async def test_a_verb_takes_a_client_message_id_where_no_row_id_matches(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "pending")
    await accepted(outbox, send(row_id))  # somebody names a message after another's row
    assert (await outbox.act("abort", "id-1", **WHY)).id == row_id
    with pytest.raises(Conflict):
        await outbox.act("abort", row_id, **WHY)


async def filled(outbox: Outbox) -> None:
    """One row in every state, a held one, and three dead ones of another code."""
    await row_in(outbox, "done", "done")
    await row_in(outbox, "dead", "dead")
    await row_in(outbox, "aborted", "aborted")
    await row_in(outbox, "inflight", "inflight")
    await accepted(outbox, *(send(f"other-{number}", to="dm:bob", priority="now") for number in range(3)))
    rows = await outbox.claim(limit=3)
    await outbox.settle([dead(row.row_id, "member_not_found: nobody") for row in rows])
    await accepted(outbox, send("pending"), send("held"))
    await outbox.act("hold", "held", **WHY)


async def test_bulk_does_what_it_can_and_says_what_it_cannot(outbox: Outbox) -> None:
    await filled(outbox)
    planned = await outbox.bulk("abort", RowFilter(), dry_run=True, **WHY)
    before = (await outbox.counts()).rows
    assert before == {"pending": 2, "inflight": 1, "done": 1, "dead": 4, "aborted": 1}
    result = await outbox.bulk("abort", RowFilter(), **WHY)
    assert (result.matched, len(result.done), len(result.skipped), result.failed) == (9, 6, 3, [])
    assert (planned.matched, planned.done, planned.skipped) == (9, result.done, result.skipped)
    assert (await outbox.counts()).rows == {"pending": 0, "inflight": 1, "done": 1, "dead": 0, "aborted": 7}


@pytest.mark.parametrize(
    ("row_filter", "matched"),
    [
        (RowFilter(status="dead"), 4),
        (RowFilter(status="dead", code="member_not_found"), 3),
        (RowFilter(code="member"), 0),
        (RowFilter(destination="dm:bob"), 3),
        (RowFilter(held=True), 1),
        (RowFilter(status="pending", held=False), 1),
        (RowFilter(older_than_seconds=60), 0),
        (RowFilter(ids=["dead", "pending"]), 2),
        (RowFilter(ids=["dead", "pending"], status="dead"), 1),
        (RowFilter(ids=[]), 0),
    ],
)
async def test_a_filter_means_the_rows_for_which_all_of_it_holds(
    outbox: Outbox, row_filter: RowFilter, matched: int
) -> None:
    await filled(outbox)
    assert (await outbox.bulk("requeue", row_filter, dry_run=True, **WHY)).matched == matched
    assert len((await outbox.list_rows(row_filter)).rows) == matched


async def test_bulk_requeue_leaves_its_successors_alone(outbox: Outbox) -> None:
    await filled(outbox)
    result = await outbox.bulk("requeue", RowFilter(status="pending"), **WHY)
    assert len(result.done) == 2
    assert (await outbox.counts()).rows["pending"] == 2


async def test_ids_that_name_no_row_are_failures(outbox: Outbox) -> None:
    row_id = await row_in(outbox, "dead")
    result = await outbox.bulk("abort", RowFilter(ids=["x", row_id, "id-1", "y"]), **WHY)
    assert (result.matched, result.done) == (1, [row_id])
    assert [(failure.id, failure.code) for failure in result.failed] == [("x", "row_not_found"), ("y", "row_not_found")]


async def test_an_id_that_names_a_row_means_no_other_row_that_was_sent_under_it(outbox: Outbox) -> None:
    (row,) = await accepted(outbox, send("id-1"))
    await accepted(outbox, send(row.row_id))
    result = await outbox.bulk("abort", RowFilter(ids=[row.row_id]), **WHY)
    assert (result.matched, result.done) == (1, [row.row_id])


async def test_ids_whose_rows_do_not_match_the_rest_of_the_filter_are_skipped(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_SCAN", 3)
    rows = await accepted(outbox, *(send(f"id-{number}") for number in range(7)))
    await outbox.act("abort", "id-6", **WHY)
    wanted = RowFilter(ids=[*(f"id-{number}" for number in range(7)), "x"], status="aborted")
    result = await outbox.bulk("abort", wanted, dry_run=True, **WHY)
    assert (result.matched, result.done) == (1, [])
    assert result.skipped == [rows[6].row_id, *(row.row_id for row in rows[:6])]
    assert [failure.id for failure in result.failed] == ["x"]


async def test_bulk_needs_a_reason_even_for_a_dry_run(outbox: Outbox) -> None:
    with pytest.raises(InvalidMessage):
        await outbox.bulk("abort", RowFilter(), caller=OPERATOR, reason=" ", dry_run=True)


async def test_bulk_works_through_many_rows(outbox: Outbox) -> None:
    await accepted(outbox, *(send(f"id-{number}") for number in range(1100)))
    result = await outbox.bulk("requeue", RowFilter(status="pending"), **WHY)
    assert len(result.done) == 1100
    assert (await outbox.counts()).rows["aborted"] == 1100 == (await outbox.counts()).rows["pending"]


async def test_bulk_ends_after_so_many_rows_and_goes_on_where_it_was(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successors that it makes meanwhile match the filter too, and are left alone."""
    monkeypatch.setattr("outbox.outbox.MAX_IDS", 500)
    await accepted(outbox, *(send(f"id-{number}") for number in range(1100)))
    done: list[str] = []
    sizes: list[int] = []
    cursor = None
    while cursor is not None or not sizes:
        result = await outbox.bulk("requeue", RowFilter(status="pending"), cursor=cursor, **WHY)
        sizes.append(result.matched)
        done += result.done
        cursor = result.next_cursor
    assert sizes == [500, 500, 100]
    assert len(set(done)) == 1100
    assert (await outbox.counts()).rows["aborted"] == 1100 == (await outbox.counts()).rows["pending"]


@pytest.mark.parametrize("cursor", ["", "x", "1", "1-", "-1", "1-x", "1-2-3", "9" * 30 + "-1"])
async def test_a_cursor_that_no_bulk_verb_returned_is_refused(outbox: Outbox, cursor: str) -> None:
    await accepted(outbox, send("a"))
    with pytest.raises(InvalidMessage, match="cursor"):
        await outbox.bulk("abort", RowFilter(), cursor=cursor, **WHY)


async def test_prune_makes_room_in_a_file_that_does_not_shrink(outbox: Outbox, clock: Clock) -> None:
    ids = [f"large-{number}" for number in range(50)]
    await accepted(outbox, *(send(message_id, body="x" * 20_000) for message_id in ids))
    before = await outbox.counts()
    for message_id in ids:
        await outbox.act("abort", message_id, **WHY)
    clock.forward(1)
    assert (await outbox.prune(clock.now, **WHY))[0] == len(ids)
    after = await outbox.counts()
    assert after.used_bytes < before.used_bytes - 50 * 16_000
    assert after.file_bytes >= before.file_bytes


async def test_a_long_prune_goes_on_behind_the_rows_that_it_has_looked_at(
    outbox: Outbox, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outbox.outbox._PRUNED", 200)
    await accepted(outbox, *(send(f"old-{number}") for number in range(250)))
    await outbox.bulk("abort", RowFilter(), **WHY)
    clock.forward(1)
    pruned, after = await outbox.prune(clock.now, **WHY)
    assert pruned == 200
    assert after is not None
    assert await outbox.prune(clock.now, after=after, **WHY) == (50, None)


async def test_prune_empties_old_settled_payloads_and_keeps_the_rows(
    outbox: Outbox, clock: Clock, database: Path
) -> None:
    await filled(outbox)
    clock.forward(10)
    young = await row_in(outbox, "pending", "young")
    await outbox.act("abort", young, **WHY)
    assert (await outbox.prune(clock.now, **WHY))[0] == 2
    assert (await outbox.prune(clock.now, **WHY))[0] == 0
    with opened(database) as db:
        pruned = db.execute("SELECT client_message_id FROM outbox_whole WHERE payload = x'' ORDER BY 1").fetchall()
        sizes = db.execute("SELECT sum(length(payload)) FROM outbox_payload").fetchone()[0]
        lines = db.execute("SELECT verb, detail FROM operator_log WHERE row_id IS NULL").fetchall()
    assert pruned == [("aborted",), ("done",)]
    assert (await outbox.counts()).payload_bytes == sizes
    assert [verb for verb, _ in lines] == ["prune", "prune"]
    row = await outbox.row("done")
    assert row is not None
    assert row.payload_pruned_at is not None
    assert (row.payload_bytes, row.broker_message_id, row.request_fingerprint) == (
        0,
        "BROKER-1",
        send("done").fingerprint[:8].hex(),
    )
    (again,) = await accepted(outbox, send("done"))
    assert (again.inserted, again.status, again.broker_message_id) == (False, "done", "BROKER-1")


async def test_a_pruned_row_is_not_requeued(outbox: Outbox, clock: Clock) -> None:
    row_id = await row_in(outbox, "aborted")
    clock.forward(1)
    await outbox.prune(clock.now, **WHY)
    with pytest.raises(Conflict, match="payload was pruned") as refusal:
        await outbox.act("requeue", row_id, **WHY)
    assert refusal.value.code == "payload_pruned"
    with pytest.raises(Conflict, match="it is aborted"):
        await outbox.act("requeue", row_id, patch=send("patch"), **WHY)


async def test_what_the_relay_was_told_is_kept(outbox: Outbox, open_outbox: Any) -> None:
    await outbox.set_relay_control(None, paused=True, **WHY)
    await outbox.set_relay_control("dm:bob", paused=False, rate_per_second=50, **WHY)
    await outbox.set_relay_control(None, paused=False, caller=Caller(1000, 1000), reason="repaired")
    await outbox.close()
    again = await open_outbox()
    assert await again.relay_controls() == {"": RelayControl(False, None), "dm:bob": RelayControl(False, 50.0)}
    await again.close()


async def test_the_log_tells_what_the_relay_was_told(outbox: Outbox, database: Path) -> None:
    await outbox.set_relay_control("dm:bob", paused=True, **WHY)
    await outbox.set_relay_control(None, paused=False, rate_per_second=2.5, **WHY)
    with opened(database) as db:
        assert db.execute("SELECT verb, detail FROM operator_log ORDER BY seq").fetchall() == [
            ("pause", "relay of dm:bob"),
            ("resume", "relay of everything, 2.5/s"),
        ]


@pytest.mark.parametrize("said", [None, Accepted("BROKER-1", 7)], ids=["absent", "there"])
async def test_what_the_broker_says_of_an_earlier_post_settles_no_later_one(
    open_outbox: Any, clock: Clock, said: Accepted | None
) -> None:
    async def post() -> None:
        clock.forward(1)
        (row,) = await outbox.claim()
        await outbox.settle([retry(row.row_id)._replace(answered=False)])

    async def look_up(_: Sequence[Unanswered]) -> list[Accepted | None]:
        await post()
        return [said]

    outbox = await open_outbox(look_up=look_up)
    async with outbox:
        await accepted(outbox, send())
        await post()
        with pytest.raises(Conflict, match="posted again meanwhile") as refusal:
            await outbox.act("abort", "id-1", **WHY)
        assert (refusal.value.code, refusal.value.retryable) == ("outcome_unknown", True)
        assert (await outbox.inspect("id-1")).row.status == "pending"
