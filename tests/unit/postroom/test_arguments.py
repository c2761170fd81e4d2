"""What a client refuses before it sends anything, each with a sentence that says what is wanted instead."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from postroom import AsyncClient, BrokerClient, Client, InboxQuery, InvalidMessage, SendRequest
from postroom._wire.arguments import compose, encode
from postroom._wire.dead_letters import DEAD_LETTERS, LetterFilter
from postroom._wire.operations import ListQuery, RowFilter
from postroom.transaction import emit

NOWHERE = Path("/nonexistent/nobody.sock")


@pytest.mark.parametrize("timeout", [0, -1, None, float("nan"), float("inf"), "10", True])
async def test_a_timeout_that_is_no_time_is_refused(timeout: Any) -> None:  # noqa: ASYNC109 - it is handed on
    for make in (
        lambda: AsyncClient(NOWHERE, timeout=timeout),
        lambda: Client(NOWHERE, timeout=timeout),
        lambda: BrokerClient("http://127.0.0.1:1", "token", timeout=timeout),
    ):
        with pytest.raises(InvalidMessage, match="seconds above 0") as caught:
            make()
        assert caught.value.problem.field == "timeout"


@pytest.mark.parametrize("patience", [-1, None, float("nan"), "10"])
async def test_a_patience_that_is_no_time_is_refused(patience: Any) -> None:
    with pytest.raises(InvalidMessage, match="0: one try") as caught:
        AsyncClient(NOWHERE, patience=patience)
    assert caught.value.problem.field == "patience"


async def test_a_patience_without_an_end_is_one(short_directory: Path) -> None:
    async with AsyncClient(short_directory / "nobody.sock", patience=float("inf")) as client:
        assert client


@pytest.mark.parametrize("seconds", [float("nan"), "10", True, timedelta(seconds=1)])
async def test_a_wait_that_is_no_time_is_refused(seconds: Any) -> None:
    async with AsyncClient(NOWHERE, patience=0) as client:
        for ask in (
            client.wait("order-1", seconds),
            client.wait_many(["order-1"], seconds),
            anext(client.events(patience=seconds)),
        ):
            with pytest.raises(InvalidMessage, match="must be a number of seconds") as caught:
                await ask
            assert caught.value.problem.field in ("timeout", "patience")


@pytest.mark.parametrize("not_an_id", [None, 17, object()])
async def test_what_is_no_id_is_said_to_be_none_with_where_to_find_one(not_an_id: Any) -> None:
    async with AsyncClient(NOWHERE, patience=0) as client:
        for ask in (
            *(client.get(not_an_id), client.wait(not_an_id, 1), client.inspect(not_an_id)),
            client.wait_many(["a", not_an_id], 1),
        ):
            with pytest.raises(InvalidMessage, match="the `client_message_id` that `send` returned"):
                await ask


@pytest.mark.parametrize(
    ("word", "said"),
    [(None, "must be text"), ("", "is empty"), ("a\udcff", "not UTF-8 text")],
)
async def test_an_id_or_a_name_that_no_path_can_have_is_refused_by_either_client(word: Any, said: str) -> None:
    async with AsyncClient(NOWHERE, patience=0) as client, BrokerClient("http://127.0.0.1:1", "token") as broker:
        for ask in (
            client.get(word),
            client.inspect(word),
            client.trace(word),
            client.act("hold", word, reason="why"),
            client.subscribe(word),
            broker.trace(word),
            broker.message(word),
            broker.explain(word),
            broker.delete_topic("demo", word),
            broker.inspect(DEAD_LETTERS, "demo", word),
        ):
            with pytest.raises(InvalidMessage, match=said):
                await ask


async def test_one_id_is_not_a_list_of_ids() -> None:
    async with AsyncClient(NOWHERE, patience=0) as client:
        with pytest.raises(InvalidMessage, match=r"as in \['abc'\]") as caught:
            await client.wait_many("abc", 1)
    assert caught.value.problem.field == "client_message_ids"


@pytest.mark.parametrize("verb", ["explode", "", None, "../rows"])
async def test_an_unknown_verb_is_refused_with_those_that_there_are(verb: Any) -> None:
    async with AsyncClient(NOWHERE, patience=0) as client, BrokerClient("http://127.0.0.1:1", "token") as broker:
        for ask in (client.act(verb, "a", reason="why"), client.bulk(verb, RowFilter(), reason="why")):
            with pytest.raises(InvalidMessage, match="requeue, abort, hold, release, flush") as caught:
                await ask
            assert caught.value.problem.field == "verb"
        with pytest.raises(InvalidMessage, match="replay, drop"):
            await broker.change(DEAD_LETTERS, verb, LetterFilter(), reason="why")


async def test_text_that_is_not_utf_8_is_refused_in_a_query() -> None:
    async with AsyncClient(NOWHERE, patience=0) as client:
        for ask in (client.trace("a", "b\udcff"), client.list_rows(ListQuery(destination="\udcff"))):
            with pytest.raises(InvalidMessage, match="not UTF-8 text"):
                await ask


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        (InboxQuery(sender=["bob"]), "sender: Expected `str | null`, got `array`"),  # type: ignore[arg-type]
        (InboxQuery(sender=b"bob"), "sender: Expected `str | null`, got `bytes`"),  # type: ignore[arg-type]
        (InboxQuery(sender=object()), "check the query: "),  # type: ignore[arg-type]
        (InboxQuery(limit=0), "limit: Expected `int` >= 1"),
        ("bob", "must be a struct, as InboxQuery"),
        (["bob"], "must be a struct, as InboxQuery"),
    ],
)
async def test_a_query_that_would_select_nothing_is_refused(query: Any, sentence: str) -> None:
    async with AsyncClient(NOWHERE, patience=0) as client:
        for ask in (client.inbox(query), anext(client.events(query)), anext(client.export(query))):
            with pytest.raises(InvalidMessage, match=re.escape(sentence)):
                await ask


@pytest.mark.parametrize("traceparent", ["00-aa\r\nX-Evil: 1", "00\0", "größe", 17])
async def test_a_traceparent_that_no_header_can_hold_is_refused(traceparent: Any) -> None:
    async with AsyncClient(NOWHERE, patience=0) as client:
        with pytest.raises(InvalidMessage, match="W3C") as caught:
            await client.send("topic:orders", "hello", traceparent=traceparent)
    assert caught.value.problem.field == "traceparent"


@pytest.mark.parametrize("field", ["to", "client_message_id", "reply_to", "mentions"])
def test_bytes_where_text_belongs_are_refused_instead_of_becoming_other_text(field: str) -> None:
    """JSON would have them in base64, which is an id too, and the name of a member."""
    given: Any = [b"job"] if field == "mentions" else b"job"
    with pytest.raises(InvalidMessage, match="must be text, not bytes"):
        encode(compose(**{"to": "topic:orders", "body": "hello", field: given}))


@pytest.mark.parametrize("field", ["to", "client_message_id", "reply_to", "mentions", "priority"])
def test_an_object_of_the_program_where_text_belongs_is_refused(field: str) -> None:
    given: Any = [object()] if field == "mentions" else object()
    with pytest.raises(InvalidMessage, match=r"must be text: .*object"):
        encode(compose(**{"to": "topic:orders", "body": "hello", field: given}))


async def test_the_message_of_a_requeue_is_refused_for_what_refuses_that_of_a_send() -> None:
    body, meta = SendRequest(to="topic:orders"), SendRequest(to="topic:orders")
    body.body, meta.meta = b"hello", {1: 2}  # type: ignore[assignment, dict-item] # as a program without type checks may
    async with AsyncClient(NOWHERE, patience=0) as client:
        for message, said in ((body, "body must be text"), (meta, "keys that are not text")):
            with pytest.raises(InvalidMessage, match=said):
                await client.act("requeue", "a", reason="why", message=message)


@pytest.mark.parametrize("not_before", [timedelta(minutes=5), 300])
def test_a_span_is_no_time_and_the_refusal_says_how_to_make_one(not_before: Any) -> None:
    with pytest.raises(InvalidMessage, match=r"datetime.now\(UTC\) \+ timedelta") as caught:
        encode(compose("topic:orders", "hello", not_before=not_before))
    assert caught.value.problem.field == "not_before"


@pytest.mark.parametrize("value", [datetime.now(UTC), Decimal("1.5"), {1, 2}, b"bytes"])
def test_a_meta_value_that_json_has_no_word_for_is_refused_with_what_to_pass(value: Any) -> None:
    with pytest.raises(InvalidMessage, match=f"{type(value).__name__}.*isoformat") as caught:
        encode(compose("topic:orders", "hello", meta={"at": [value]}))
    assert (caught.value.code, caught.value.problem.field) == ("meta_not_canonical", "meta")
    assert "<class" not in str(caught.value)


def test_a_meta_whose_keys_are_no_text_and_mentions_that_are_no_list_are_refused() -> None:
    meta: Any = {1: 2}
    with pytest.raises(InvalidMessage, match="keys that are not text") as caught:
        encode(compose("topic:orders", meta=meta))
    assert (caught.value.code, caught.value.problem.field) == ("meta_not_canonical", "meta")
    mentions: Any = 5
    with pytest.raises(InvalidMessage, match="a list of members, not int"):
        compose("topic:orders", mentions=mentions)


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"occurred_at": datetime(2026, 1, 31)}, "a time with its offset"),  # noqa: DTZ001 - which is the fault
        ({"occurred_at": "2026-01-31"}, "a time with its offset"),
    ],
)
def test_an_event_that_would_become_another_is_refused(event: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidMessage, match=sentence):
        emit(None, "demo", "order_paid", **{"payload": {}, "aggregate_type": "order", "aggregate_id": 17, **event})
