"""The fake daemon against the real one: the same messages, good and bad, are answered in the same words."""

from __future__ import annotations

import string
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.mailroom import LoneDaemon

from postroom import AsyncClient, Client, PostroomError, SendRequest, new_id
from postroom.testing import FakeAsyncClient, FakeClient

IDS = st.sampled_from(["a", "b", "c", "no id", ""])
MESSAGES = st.fixed_dictionaries(
    {"to": st.sampled_from(["topic:orders", "dm:bob", "queue:work.now", "topic:Orders", "nowhere", ""])},
    optional={
        "not_before": st.sampled_from([datetime(2099, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]),
        "body": st.text(string.printable, max_size=3) | st.binary(max_size=3) | st.just({"order": 17}) | st.just("\0"),
        "meta": st.sampled_from([{}, {"a": 1}, {"mentions": []}, {"retry_policy": {"max_attempts": 0}}, {"n": 2**60}]),
        "mentions": st.sampled_from([[], ["bob"], ["Bob"]]),
        "priority": st.sampled_from(["now", "next", "low", "soon"]),
        "reply_to": st.sampled_from(["m-1", "no id"]),
        "client_message_id": IDS,
    },
)


@pytest.fixture
async def daemon(short_directory: Path) -> AsyncIterator[LoneDaemon]:
    daemon = LoneDaemon(short_directory)
    await daemon.start()
    yield daemon
    daemon.stop()


def test_whatever_is_sent_the_fake_answers_as_the_daemon_does(daemon: LoneDaemon) -> None:
    with Client(daemon.socket, patience=0) as real:

        @settings(max_examples=150)
        @given(st.lists(MESSAGES, max_size=6))
        def compare(messages: list[dict[str, Any]]) -> None:
            fake, run = FakeClient(), new_id()  # the daemon lives on: each run has ids of its own
            for message in messages:
                named = {**message, "client_message_id": message.get("client_message_id", "d") + run}
                assert answer(fake, named) == answer(real, named)

        compare()


def test_a_request_that_is_too_large_is_refused_in_the_same_words(daemon: LoneDaemon) -> None:
    with Client(daemon.socket, patience=0) as real:
        for large in ({"body": "\1" * 1_000_000}, {"meta": {"note": "x" * 5_000_000}}, {"body": b"x" * 5_000_000}):
            message = {"to": "topic:orders", "client_message_id": new_id(), **large}
            said = answer(FakeClient(), message)
            assert said == answer(real, message)
            assert said["code"] == "request_too_large"


def answer(client: Client, message: dict[str, Any]) -> Any:
    try:
        result = client.send(**message)
    except PostroomError as error:
        problem = msgspec.to_builtins(error.problem)
        return {name: value for name, value in problem.items() if name != "since"}
    row = client.get(result.client_message_id)
    return result.status, result.duplicate, row.request_fingerprint, row.not_before


async def test_a_batch_is_answered_as_the_daemon_answers_it(daemon: LoneDaemon) -> None:
    messages = [
        SendRequest(to="topic:orders", body="one", client_message_id="k"),
        SendRequest(to="topic:orders", body="one", client_message_id="k"),
        SendRequest(to="topic:orders", body="two", client_message_id="k"),
        SendRequest(to="nowhere", client_message_id="l"),
        SendRequest(to="queue:work", body_base64="AP8=", client_message_id="m"),
        SendRequest(to="queue:work", body_base64="nonsense!", client_message_id="n"),
    ]

    def said(result: Any) -> Any:
        problem = result.problem and (result.problem.code, result.problem.conflict, result.problem.detail)
        return result.line, result.result and (result.result.status, result.result.duplicate), problem

    async with AsyncClient(daemon.socket) as real:
        answers = [[said(each) async for each in client.send_many(messages)] for client in (real, FakeAsyncClient())]
    assert answers[0] == answers[1]
    assert len(answers[0]) == len(messages)


async def test_a_cloudevent_is_one_message_at_either_and_its_headers_may_say_anything(daemon: LoneDaemon) -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "%C3%A9 17", "ce-source": "/shop", "ce-type": "order", "ce-n": "a%25b"}
    async with AsyncClient(daemon.socket) as real:
        for body, media in ((b'{"order": 17}', "application/json"), (b"", "")):
            given = {**headers, "ce-subject": media, "Content-Type": media} if media else headers
            answers = [
                [(sent.client_message_id, sent.duplicate), (again.client_message_id, again.duplicate)]
                for client in (real, FakeAsyncClient())
                for sent in [await client.send_cloudevent(f"topic:t{len(body)}", given, body)]
                for again in [await client.send_cloudevent(f"topic:t{len(body)}", given, body)]
            ]
            assert answers[0] == answers[1]
            headers["ce-source"] = "/another"


@pytest.mark.parametrize(
    "more",
    [
        {"ce-subject": "%C3%A9" * 3000},
        {f"ce-x{number}": "1" for number in range(120)},
        {"Content-Type": "text/" + "x" * 9000},
    ],
    ids=["long", "many", "a long type"],
)
async def test_a_cloudevent_that_no_head_can_have_is_sent_all_the_same(
    daemon: LoneDaemon, more: dict[str, str]
) -> None:
    headers = {"ce-specversion": "1.0", "ce-id": "17", "ce-source": "/shop", "ce-type": "order"}
    headers |= {"Content-Type": "text/plain"} | more
    fake = FakeAsyncClient()
    async with AsyncClient(daemon.socket, patience=0) as real:
        receipts = [await client.send_cloudevent("topic:orders", headers, b"apples") for client in (real, fake)]
    assert len({receipt.client_message_id for receipt in receipts}) == 1
    attributes = fake.sent[0].meta["cloudevent"]
    assert (fake.sent[0].body, attributes["datacontenttype"], len(attributes)) == (
        b"apples",
        headers["Content-Type"],
        len(headers),
    )
