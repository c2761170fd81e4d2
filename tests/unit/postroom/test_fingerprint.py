"""The fingerprint, worked out a second time by hand, and the canonical JSON under it."""

import hashlib
import json
import math
import struct

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom._wire.fingerprint import NotCanonical, canonical_json, fingerprint, prefix
from postroom._wire.message import prepare


def by_hand(
    kind: str, ref: str, *, reply_to: str = "", priority: str = "next", meta: bytes = b"", body: bytes = b""
) -> bytes:
    """The formula of docs/contract/send.md#send-32, spelt out."""
    text = b"1" + b"\x00" + kind.encode() + b"\x00" + ref.encode() + b"\x00" + reply_to.encode() + b"\x00"
    text += priority.encode() + b"\x00" + meta + b"\x00" + hashlib.sha256(body).hexdigest().encode()
    return hashlib.sha256(text).digest()


def of(**fields: object) -> bytes:
    return prepare(json.dumps({"to": "topic:orders", **fields}).encode()).fingerprint


def test_a_plain_message() -> None:
    assert of(body="hello") == by_hand("topic", "orders", body=b"hello")


def test_the_vector_that_sha256sum_gives() -> None:
    expected = "576872ca24af7820979b4e809f3d961ca8848144e64bff15f27afc151972b49c"
    assert of(body="hello").hex() == expected


def test_every_covered_field() -> None:
    made = prepare(
        json.dumps(
            {
                "to": "dm:bob",
                "body_base64": "AAE=",
                "meta": {"b": 1, "a": "ü"},
                "mentions": ["zoe", "al", "zoe"],
                "priority": "now",
                "reply_to": "m-1",
            }
        ).encode()
    )
    meta = '{"a":"ü","b":1,"mentions":["al","zoe"]}'.encode()
    assert made.fingerprint == by_hand("dm", "bob", reply_to="m-1", priority="now", meta=meta, body=b"\x00\x01")


@pytest.mark.parametrize("nothing", [{}, {"meta": None}, {"meta": {}}, {"mentions": []}, {"body": ""}, {"body": None}])
def test_what_is_empty_counts_as_missing(nothing: dict[str, object]) -> None:
    assert of(**nothing) == by_hand("topic", "orders")


def test_text_and_the_same_bytes_are_the_same_body() -> None:
    assert of(body="hello") == of(body_base64="aGVsbG8=")


@pytest.mark.parametrize("field", [{"not_before": "2026-11-21T09:00:00Z"}, {"client_message_id": "x"}])
def test_what_is_not_covered_changes_nothing(field: dict[str, object]) -> None:
    assert of(body="hello", **field) == of(body="hello")


def test_the_traceparent_is_not_covered() -> None:
    data = b'{"to":"topic:orders"}'
    traceparent = f"00-{'a' * 32}-{'b' * 16}-01"
    assert prepare(data, traceparent=traceparent).fingerprint == prepare(data).fingerprint


@pytest.mark.parametrize(
    "other",
    [
        {"to": "topic:order"},
        {"to": "queue:orders"},
        {"body": "Hello"},
        {"priority": "low"},
        {"reply_to": "m"},
        {"meta": {"a": 1}},
        {"mentions": ["bob"]},
    ],
)
def test_every_covered_field_changes_it(other: dict[str, object]) -> None:
    assert of(**{"body": "hello", **other}) != of(body="hello")


def test_a_prefix_is_the_first_eight_bytes_in_hex() -> None:
    assert prefix(bytes(range(32))) == "0001020304050607"


# RFC 8785, appendix B: how numbers are written.
@pytest.mark.parametrize(
    ("bits", "text"),
    [
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("0000000000000001", "5e-324"),
        ("8000000000000001", "-5e-324"),
        ("7fefffffffffffff", "1.7976931348623157e+308"),
        ("4340000000000000", "9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_the_numbers_of_rfc_8785_appendix_b(bits: str, text: str) -> None:
    (number,) = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_json({"n": number}) == b'{"n":' + text.encode() + b"}"


def test_keys_sort_by_utf16_units_as_rfc_8785_says() -> None:
    keys = ["\u20ac", "\r", "\ufb33", "1", "\U0001f600", "\x80", "\u00f6"]
    order = json.loads(canonical_json(dict.fromkeys(keys, 0)))
    assert list(order) == ["\r", "1", "\x80", "\u00f6", "\u20ac", "\U0001f600", "\ufb33"]


def test_strings_are_escaped_as_rfc_8785_says() -> None:
    assert canonical_json({"s": '€$\x0f\nA\'B"\\\\"/'}) == '{"s":"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"}'.encode()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**53 + 1, -(2**53) - 1, "\ud800"])
def test_what_json_cannot_say_exactly_is_refused(value: object) -> None:
    for beside in ([], [1.5], [1]):
        with pytest.raises(NotCanonical):
            canonical_json({"x": [*beside, value]})


@pytest.mark.parametrize("value", [2**53, -(2**53)])
@pytest.mark.parametrize("beside", [[], ["x"], [0.5], [{}]])
def test_the_last_integers_that_json_says_exactly_are_written_as_they_are(value: int, beside: list[object]) -> None:
    assert json.loads(canonical_json({"x": [value, *beside]}))["x"][0] == value
    assert canonical_json({"x": value}) == canonical_json({"x": float(value)})


@pytest.mark.parametrize("meta", [{1: 2}, {"a": {None: 1}}, {"a": [{True: 1, "b": 2}]}, {"é": 1, 1.5: 2}])
def test_a_key_that_is_no_text_is_refused(meta: dict[str, object]) -> None:
    with pytest.raises(NotCanonical, match="keys that are not text"):
        canonical_json(meta)


scalars = (
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(st.characters(exclude_categories=["Cs"]))
)
documents = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=4),
    st.recursive(
        scalars,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=4), inner, max_size=4)
        ),
    ),
    max_size=5,
)


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=3),
        documents | st.lists(st.floats(allow_nan=False, allow_infinity=False) | scalars),
        max_size=4,
    )
)
def test_the_canonical_form_is_what_the_reference_implementation_writes(meta: dict[str, object]) -> None:
    assert canonical_json(meta) == (rfc8785.dumps(meta) if meta else b"")


@settings(max_examples=40)
@given(documents)
def test_the_order_of_keys_never_matters(meta: dict[str, object]) -> None:
    assert canonical_json(meta) == canonical_json(dict(reversed(list(meta.items()))))


integers = st.integers(-(2**54), 2**54).filter(lambda number: abs(number) != 2**53)  # which the library alone refuses


@settings(max_examples=200)
@given(documents | st.dictionaries(st.text(alphabet="ab\U0001f600\uffee"), integers | st.floats()))
def test_the_canonical_form_is_the_one_of_rfc_8785_whichever_way_it_is_made(meta: dict[str, object]) -> None:
    try:
        expected = rfc8785.dumps(meta) if meta else b""
    except rfc8785.CanonicalizationError:
        with pytest.raises(NotCanonical):
            canonical_json(meta)
    else:
        assert canonical_json(meta) == expected


def test_every_character_is_written_as_rfc_8785_wants() -> None:
    characters = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10400)]))
    assert canonical_json({"s": characters}) == rfc8785.dumps({"s": characters})


@settings(max_examples=40)
@given(documents)
def test_the_canonical_form_says_the_same(meta: dict[str, object]) -> None:
    canonical = canonical_json(meta)
    assert (json.loads(canonical) if canonical else {}) == meta


@settings(max_examples=40)
@given(documents, documents, st.text(alphabet="abc", max_size=3), st.text(alphabet="abc", max_size=3))
def test_different_content_has_different_fingerprints(
    one: dict[str, object], two: dict[str, object], body: str, other: str
) -> None:
    def made(meta: dict[str, object], text: str) -> bytes:
        return fingerprint(
            destination_kind="topic",
            destination_ref="t",
            reply_to=None,
            priority="next",
            meta=canonical_json(meta),
            body=text.encode(),
        )

    assert (made(one, body) == made(two, other)) == (canonical_json(one) == canonical_json(two) and body == other)
