"""The fake clients: the real ones over a daemon in memory; what differs from the real daemon is said, never guessed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest

from postroom import Client, Conflict, InvalidMessage, NotFound, PostroomError, SendRequest, TryAgain, Unavailable
from postroom.client import AsyncClient
from postroom.testing import FakeAsyncClient, FakeClient, FakeDaemon

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


def test_what_was_sent_is_there_whole_and_in_order() -> None:
    post = FakeClient()
    soon = datetime.now(UTC) + timedelta(minutes=5)
    post.send("topic:orders", {"order": 17}, meta={"shop": 1}, mentions=["bob", "ann", "bob"], traceparent=TRACE)
    post.send("dm:bob", b"\0\xff", priority="now", reply_to="m-1", client_message_id="k", not_before=soon)

    first, second = post.sent
    assert (first.to, first.text, first.json()) == ("topic:orders", '{"order":17}', {"order": 17})
    assert (first.meta, first.mentions, first.traceparent) == ({"shop": 1}, ["ann", "bob"], TRACE)
    assert (second.client_message_id, second.body, second.priority) == ("k", b"\0\xff", "now")
    assert (second.reply_to, second.not_before) == ("m-1", soon)


def test_they_are_clients_to_whoever_checks_types() -> None:
    assert isinstance(FakeClient(), Client)
    assert isinstance(FakeAsyncClient(), AsyncClient)


def test_a_message_that_the_daemon_would_refuse_is_refused_and_leaves_nothing() -> None:
    post = FakeClient()
    refused: list[dict[str, Any]] = [
        {"to": "orders"},
        {"to": "topic:Orders"},
        {"to": "topic:orders", "body": "x" * (1024 * 1024 + 1)},
        {"to": "topic:orders", "body": "\1" * (1024 * 1024)},  # which JSON writes with six characters each
        {"to": "topic:orders", "meta": {"note": "x" * (4 * 1024 * 1024)}},
        {"to": "topic:orders", "meta": {"mentions": ["bob"]}},
        {"to": "topic:orders", "meta": {"retry_policy": {"max_attempts": 0}}},
        {"to": "topic:orders", "client_message_id": "white space"},
        {"to": "topic:orders", "mentions": ["Bob"]},
        {"to": "topic:orders", "not_before": datetime(2026, 1, 1)},  # noqa: DTZ001 - which is the point
    ]
    for message in refused:
        with pytest.raises(InvalidMessage) as error:
            post.send(**message)
        assert error.value.client_message_id
    assert post.sent == []


@pytest.mark.parametrize(
    ("status", "again", "other"),
    [
        (None, "queued", "outbox_pending_fingerprint_mismatch"),
        ("done", "done", "outbox_done_fingerprint_mismatch"),
        ("dead", "outbox_dead_fingerprint_match", "outbox_dead_fingerprint_mismatch"),
        ("aborted", "outbox_aborted_fingerprint_match", "outbox_aborted_fingerprint_mismatch"),
    ],
)
def test_a_repeated_id_is_answered_by_the_accept_table(status: Any, again: str, other: str) -> None:
    post = FakeClient()
    post.send("topic:orders", "hello", client_message_id="k")
    if status is not None:
        post.daemon.settle("k", status, reason="topic_not_found: there is no such topic")

    def answer(body: str) -> str:
        try:
            result = post.send("topic:orders", body, client_message_id="k")
        except Conflict as error:
            return error.problem.conflict or ""
        return result.status if result.duplicate else "not a duplicate"

    assert (answer("hello"), answer("another")) == (again, other)
    assert len(post.sent) == 1


def test_a_send_is_pending_until_it_is_settled_or_waited_for() -> None:
    post = FakeClient()
    for key in ("a", "b", "c"):
        post.send("topic:orders", key, client_message_id=key)
    assert post.get("a").status == "pending"
    post.daemon.settle("b", "dead", reason="topic_not_found: there is no such topic")

    assert post.wait("a", 10).status == "done"
    assert [row.status for row in post.wait_many(["a", "b", "c"], 10)] == ["done", "dead", "done"]
    assert post.get("b").last_error == "topic_not_found: there is no such topic"
    assert post.get("a").history_id == 1
    for ask in (post.get, lambda key: post.wait(key, 1), lambda key: post.wait_many([key], 1), post.daemon.settle):
        with pytest.raises(NotFound, match=r"nobody|no send|nothing was sent"):
            ask("nobody")


def test_an_outcome_that_no_send_has_is_refused() -> None:
    post = FakeClient()
    post.send("topic:orders", "hello", client_message_id="k")
    with pytest.raises(InvalidMessage, match="give done, dead or aborted"):
        post.daemon.settle("k", "failed")  # type: ignore[arg-type] # as a test without type checks may
    assert post.get("k").status == "pending"


@pytest.mark.parametrize(
    ("ends", "then"),
    [("done", "dead"), ("done", "aborted"), ("done", "done"), ("aborted", "done"), ("dead", "done"), ("dead", "dead")],
)
def test_a_send_that_has_ended_ends_no_other_way(ends: Any, then: Any) -> None:
    post = FakeClient()
    post.send("topic:orders", "hello", client_message_id="k")
    post.daemon.settle("k", ends)
    before = post.get("k")
    with pytest.raises(Conflict, match=f"is {ends}: it cannot become {then}"):
        post.daemon.settle("k", then, reason="too late")
    assert post.get("k") == before


def test_the_times_of_a_send_are_in_milliseconds_as_a_daemon_keeps_them() -> None:
    post = FakeClient()
    post.send("topic:orders", "hello", client_message_id="k", not_before=datetime(2026, 11, 1, 0, 0, 0, 1500, UTC))
    post.send("topic:orders", "hello", client_message_id="other")
    post.daemon.settle("other", "aborted")
    row, other = post.wait("k", 1), post.get("other")
    assert row.not_before == datetime(2026, 11, 1, 0, 0, 0, 2000, UTC)  # never early
    times = row.enqueued_at, row.next_attempt_at, row.delivered_at, other.aborted_at
    assert [time is not None and time.microsecond % 1000 for time in times] == [0, 0, 0, 0]


def test_an_operator_may_abort_a_send_that_is_dead() -> None:
    post = FakeClient()
    post.send("topic:orders", "hello", client_message_id="k")
    post.daemon.settle("k", "dead", reason="topic_not_found: there is no such topic")
    post.daemon.settle("k", "aborted", reason="not needed")
    assert post.get("k").status == "aborted"


@pytest.mark.parametrize("client", [FakeClient, FakeAsyncClient])
def test_a_path_in_place_of_a_daemon_is_refused(client: Any) -> None:
    with pytest.raises(InvalidMessage, match="give a FakeDaemon"):
        client("/run/postroom.sock")


def test_a_send_stays_pending_before_its_not_before() -> None:
    post = FakeClient()
    for key, not_before in (("later", datetime(2999, 1, 1, tzinfo=UTC)), ("past", datetime(2000, 1, 1, tzinfo=UTC))):
        post.send("topic:orders", key, client_message_id=key, not_before=not_before)
    assert [row.status for row in post.wait_many(["later", "past"], 0.01)] == ["pending", "done"]
    post.daemon.settle("later")
    assert post.wait("later", 0.01).status == "done"


async def test_waiting_for_a_send_that_is_not_due_leaves_the_loop_to_others() -> None:
    post = FakeAsyncClient()
    key = (await post.send("topic:orders", "later", not_before=datetime(2999, 1, 1, tzinfo=UTC))).client_message_id
    for waiting in (post.wait(key, 60), post.wait_many([key], 60)):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(waiting, 0.03)
    waited = asyncio.create_task(post.wait(key, 60))
    await asyncio.sleep(0)
    post.daemon.settle(key, "dead", reason="topic_not_found: there is no such topic")
    assert (await waited).status == "dead"


def test_waiting_for_a_send_that_is_not_due_takes_no_processor() -> None:
    post = FakeClient()
    key = post.send("topic:orders", "later", not_before=datetime(2999, 1, 1, tzinfo=UTC)).client_message_id
    threading.Timer(0.5, post.daemon.settle, [key]).start()
    began, busy = time.monotonic(), time.thread_time()
    assert post.wait(key, 60).status == "done"
    assert time.thread_time() - busy < (time.monotonic() - began) / 2


async def test_a_stream_of_messages_gets_one_result_for_each() -> None:
    messages = [SendRequest(to="topic:orders", body=str(number)) for number in range(10_000)]
    messages[17] = SendRequest(to="nowhere", body="lost")
    asynchronous, blocking = FakeAsyncClient(), FakeClient()
    results = [result async for result in asynchronous.send_many(messages, traceparent=TRACE)]
    for each in (results, list(blocking.send_many(messages, traceparent=TRACE))):
        assert [result.line for result in each] == list(range(1, 10_001))
        assert [result.line for result in each if result.problem] == [18]
    assert len(asynchronous.sent) == len(blocking.sent) == 9_999
    assert {sent.traceparent for sent in [*asynchronous.sent, *blocking.sent]} == {TRACE}
    blocking.close()


async def test_clients_that_share_a_daemon_see_one_outbox() -> None:
    daemon = FakeDaemon()
    FakeClient(daemon).send("topic:orders", "one", client_message_id="k")
    assert (await FakeAsyncClient(daemon).send("topic:orders", "one", client_message_id="k")).duplicate
    assert [sent.text for sent in daemon.sent] == ["one"]


async def test_a_client_that_is_closed_refuses_and_what_it_sent_is_still_there() -> None:
    asynchronous, blocking = FakeAsyncClient(), FakeClient()
    async with asynchronous:
        await asynchronous.send("topic:orders", "one")
    with blocking:
        blocking.send("topic:orders", "one")
    with pytest.raises(RuntimeError, match="this client is closed"):
        await asynchronous.send("topic:orders", "two")
    with pytest.raises(RuntimeError, match="this client is closed"):
        [result async for result in asynchronous.send_many([SendRequest(to="topic:orders")])]
    with pytest.raises(RuntimeError, match="this client is closed"):
        blocking.send("topic:orders", "two")
    assert [len(client.sent) for client in (asynchronous, blocking)] == [1, 1]


def test_a_daemon_that_fails_raises_what_the_test_says_and_at_once() -> None:
    post = FakeClient()
    with post.daemon.failing(TryAgain.of("outbox_full", "the outbox is full", retryable=True)):
        with pytest.raises(TryAgain, match="full") as error:
            post.send("topic:orders", "hello", client_message_id="k")
        with pytest.raises(TryAgain) as another:
            post.send("topic:orders", "hello", client_message_id="l")
        with pytest.raises(TryAgain):
            list(post.send_many([SendRequest(to="topic:orders")]))
    assert (error.value.client_message_id, another.value.client_message_id) == ("k", "l")
    assert not post.send("topic:orders", "hello", client_message_id="k").duplicate
    post.close()


def test_an_id_may_be_a_uuid_wherever_a_send_is_meant() -> None:
    post, id_ = FakeClient(), uuid4()
    assert post.send("topic:orders", "hello", client_message_id=id_).client_message_id == str(id_)
    post.daemon.settle(id_, "dead", reason="expired: it is too old")
    found = [post.get(id_), post.wait(id_, 1), *post.wait_many([id_], 1)]
    assert {(row.client_message_id, row.status) for row in found} == {(str(id_), "dead")}
    with pytest.raises(Conflict) as error:
        post.send("topic:orders", "another", client_message_id=id_)
    assert error.value.client_message_id == str(id_)
    post.close()


def test_a_failure_within_another_ends_alone() -> None:
    post = FakeClient()
    with post.daemon.failing(TryAgain.of("outbox_full", "the outbox is full")):
        with (
            post.daemon.failing(Unavailable.of("daemon_unreachable", "there is no daemon")),
            pytest.raises(Unavailable),
        ):
            post.ready()
        with pytest.raises(TryAgain):
            post.ready()
    assert post.ready().ready
    post.close()


def test_a_daemon_that_cannot_be_reached_raises_the_class_that_the_test_says() -> None:
    post = FakeClient()
    with post.daemon.failing(Unavailable.of("daemon_unreachable", "there is no daemon")):
        with pytest.raises(Unavailable) as error:
            post.send("topic:orders", "hello", client_message_id="k")
        with pytest.raises(Unavailable):
            post.get("k")
        with pytest.raises(Unavailable):
            list(post.send_many([SendRequest(to="topic:orders")]))
    assert error.value.client_message_id == "k"
    post.close()


def test_many_threads_may_send_at_once() -> None:
    post = FakeClient()
    threads = [
        threading.Thread(target=lambda: [post.send("topic:orders", "x", client_message_id=f"k{n}") for n in range(200)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(post.sent) == 200


def test_what_is_not_faked_says_so() -> None:
    post = FakeClient()
    assert post.ready().ready
    for ask in (post.list_rows, post.health, post.inbox):
        with pytest.raises(PostroomError, match="use `mailroom`") as error:
            ask()
        assert error.value.code == "not_faked"


def test_a_fake_needs_nothing_but_the_library() -> None:
    program = (
        "import sys; from postroom.testing import FakeClient; FakeClient().send('topic:orders', {'order': 17}); "
        "print({'aiohttp', 'asyncpg', 'nats', 'structlog', 'pytest'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "set()\n"
