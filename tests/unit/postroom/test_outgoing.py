"""What a program hands to `send`: every body that can be meant travels whole, and no other is quietly made into one."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from postroom import InboxQuery, InvalidMessage, SendRequest
from postroom._wire.arguments import compose, encode, to_json, with_id
from postroom._wire.transport import to_parameters


@pytest.mark.parametrize("body", [b"\xff\x00", bytearray(b"\xff\x00"), memoryview(b"\xff.\x00.")[::2]])
def test_every_kind_of_bytes_travels_as_base64(body: Any) -> None:
    request = compose("topic:orders", body)
    assert request.body_base64 is not None
    assert base64.b64decode(request.body_base64) == b"\xff\x00"


class Safe(str):
    """As Django's SafeString, in this."""

    __slots__ = ()

    def __str__(self) -> str:
        return self


class Count(int):
    """A number with a class of its own."""


class Share(float):
    """As numpy's float64, in this."""


def test_texts_and_numbers_of_a_class_of_their_own_travel_as_what_they_are() -> None:
    meta = {Safe("a"): Safe("b"), "n": Count(7), "share": Share(0.5)}
    sent = compose(Safe("topic:orders"), Safe("<b>hello</b>"), meta=meta, client_message_id="k")
    plain = {"a": "b", "n": 7, "share": 0.5}
    assert encode(sent) == encode(compose("topic:orders", "<b>hello</b>", meta=plain, client_message_id="k"))
    assert to_json(meta) == to_json(plain)
    assert to_parameters(InboxQuery(sender=Safe("bob"), limit=Count(7))) == {"sender": "bob", "limit": "7"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json([Share("nan")])


@pytest.mark.parametrize("body", [17, ("a",), True])
def test_a_body_that_is_neither_text_nor_bytes_nor_json_is_refused_instead_of_sent_empty(body: Any) -> None:
    with pytest.raises(InvalidMessage, match="text, bytes, or a dict or a list") as caught:
        compose("topic:orders", body)
    assert (caught.value.code, caught.value.problem.field) == ("invalid_field", "body")


def test_one_text_is_no_list_of_mentions() -> None:
    with pytest.raises(InvalidMessage, match="list of members") as caught:
        compose("topic:orders", "hello", mentions="bob")
    assert caught.value.problem.field == "mentions"


@pytest.mark.parametrize("field", ["body", "body_base64"])
def test_a_request_built_with_bytes_is_refused_instead_of_sent_as_other_text(field: str) -> None:
    fields: dict[str, Any] = {field: b"hello"}
    with pytest.raises(InvalidMessage, match=field):
        encode(SendRequest(to="topic:orders", **fields))


def test_a_meta_that_is_no_object_is_refused_by_name() -> None:
    meta: Any = [1]
    with pytest.raises(InvalidMessage) as caught:
        encode(compose("topic:orders", "hello", meta=meta))
    assert caught.value.problem.field == "meta"


def test_what_is_no_send_request_is_refused_with_what_to_use() -> None:
    message: Any = {"to": "topic:orders", "body": "hello"}
    with pytest.raises(InvalidMessage, match="SendRequest"):
        with_id(message)
