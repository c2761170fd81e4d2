"""Checking a send (phase A): the lists "JSON", "Fields" and "Ids" of bad input, and what is kept of good input."""

import base64
import json
import re
from datetime import UTC, datetime

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from postroom._wire import message
from postroom._wire.message import (
    MAX_META_VALUES,
    Envelope,
    SendRequest,
    check_envelope,
    decode_request,
    parse_destination,
    prepare,
    refuse_duplicate_keys,
)
from postroom._wire.names import MESSAGE_ID, WORD
from postroom.errors import InvalidMessage

MIB = 1024 * 1024


def refused(data: bytes | dict[str, object], **options: object) -> InvalidMessage:
    encoded = data if isinstance(data, bytes) else json.dumps({"to": "topic:t", **data}).encode()
    with pytest.raises(InvalidMessage) as caught:
        prepare(encoded, **options)  # type: ignore[arg-type]
    return caught.value


@pytest.mark.parametrize("half", [r"\ud83d", r"\uDC00x", r"\ud83d\u0041", r"\ud83d\ude00\ude00", r"\\\udfff"])
@pytest.mark.parametrize(
    "field",
    ['"body":"%s"', '"to":"%s"', '"reply_to":"%s"', '"client_message_id":"%s"', '"mentions":["%s"]', '"meta":{"%s":1}'],
)
def test_half_of_a_surrogate_pair_is_named(field: str, half: str) -> None:
    error = refused(f'{{"meta":{{"a":"\\ud83d\\ude00\\\\ud800"}},{field % half}}}'.encode())
    assert error.code == "invalid_json"
    assert re.search(r"\\u[dD]\w{3} is half of a surrogate pair: write both", str(error)), error


def test_a_text_that_only_mentions_such_a_half_is_text() -> None:
    assert decode_request(rb'{"to":"topic:t","body":"\\ud800"}').body == r"\ud800"
    assert "half" not in str(refused(rb'{"to":"topic:t","body":"\ud83d\ude00\\ud800'))


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "it is empty"),
        (b" \r\n", "it is empty"),
        (b'{"to":', "it ends too early, after 6 bytes"),
        (b'{"to":"topic:t","body":"a', "it ends too early, after 25 bytes"),
        (b'{"to":"topic:t"', "it ends too early, after 15 bytes"),
    ],
)
def test_what_is_missing_of_a_message_is_said(data: bytes, fault: str) -> None:
    assert str(refused(data)) == f"the body is not one JSON object in UTF-8: {fault}"


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"{",
        b'{"to":"topic:t"} x',
        b'{"to":"topic:t"}{"to":"topic:t"}',
        b'\xef\xbb\xbf{"to":"topic:t"}',
        b'{"to":"topic:t","body":"\xff"}',
        b'{"to":"topic:t","body":"\xed\xa0\x80"}',
        b'{"to":"topic:t","body":"\\ud800"}',
        b'{"to":"topic:t","meta":{"x":"\\udfff"}}',
        b'{"to":"topic:t","meta":{"x":NaN}}',
        b'{"to":"topic:t","meta":{"x":Infinity}}',
        b'{"to":"topic:t","meta":{"x":1e400}}',
        b'{"to":"topic:t","meta":{"x":' + b"9" * 100_000 + b"}}",
        b'{"to":"topic:t","meta":{"x":9007199254740993}}',
        b'{"to":"topic:t","meta":{"x":-9007199254740993}}',
        b'{"to":"topic:t","meta":' + b'{"x":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
        b'{"to":"topic:t","meta":' + b'{"x":' * 65 + b"1" + b"}" * 65 + b"}",
        b'{"to":"topic:t","meta":{"x":' + b"[" * 64 + b"]" * 64 + b"}}",
        b'{"to":"topic:t","to":"topic:t"}',
        b'{"to":"topic:t","meta":{"a":1,"a":1}}',
        b'{"to":"topic:t","meta":{"a":{"b":1,"b":2}}}',
        b'{"to":"topic:t","meta":{"a":1,"\\u0061":2}}',
        b'{"to":"topic:t","body":"\\u0000"}',
        b'{"to":"topic:t","meta":{"x":"\\u0000"}}',
        b'{"to":"topic:t","meta":{"\\u0000":1}}',
        b'{"to":"topic:t\\u0000"}',
        b"\x00" * MIB,
    ],
    ids=lambda data: repr(data[:40]),
)
def test_json_that_could_be_read_two_ways_or_not_at_all_is_refused(data: bytes) -> None:
    error = refused(data)
    assert (error.problem.status, error.retryable) == (400, False)


def test_minus_zero_is_zero() -> None:
    assert (
        prepare(b'{"to":"topic:t","meta":{"x":-0}}').fingerprint
        == prepare(b'{"to":"topic:t","meta":{"x":0}}').fingerprint
    )


def test_meta_with_more_values_than_anybody_needs_is_refused() -> None:
    most = {f"k{n}": 0 for n in range(MAX_META_VALUES)}
    assert prepare(msgspec.json.encode({"to": "topic:t", "meta": most})).payload
    assert refused({"meta": {**most, "one": 1}}).code == "meta_too_large"
    assert refused({"meta": {"list": [[0]] * MAX_META_VALUES}}).code == "meta_too_large"


@pytest.mark.timeout(60)  # comparing each key with each would take hours
def test_a_duplicate_among_a_million_keys_is_named_in_one_pass() -> None:
    keys = ",".join(f'"k{n}":0' for n in range(1_000_000))
    with pytest.raises(InvalidMessage, match="'k999999' is given twice"):
        refuse_duplicate_keys(b"{" + keys.encode() + b',"k999999":1}')


SEND = b'{"to":"topic:t","meta":{"x":%b}}'


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"[%b1]" % (b"1," * 1_000_000), "meta_too_large"),
        (b"[%b1]" % (b'"a",' * 1_000_000), "meta_too_large"),
        (b"[%b1]" % ((b"[" * 60 + b"]" * 60 + b",") * 10_000), "meta_too_large"),
        (b"[%b1]" % (b'"\\",' * 1_000_000), "meta_too_large"),
        (b'"%b",%b1' % (b"," * 100_000, b'"a":1,' * 20_000), "meta_too_large"),
        (b"[" * 1_000_000, "too_deep"),
        (b'{"x":' * 100_000 + b"1" + b"}" * 100_000, "too_deep"),
    ],
    ids=["numbers", "strings", "lists", "escapes", "keys", "open lists", "objects"],
)
def test_more_values_than_a_message_may_hold_are_refused_before_they_are_made(
    monkeypatch: pytest.MonkeyPatch, value: bytes, code: str
) -> None:
    monkeypatch.setattr(message, "_decode_send", None)
    with pytest.raises(InvalidMessage) as refusal:
        prepare(SEND % value)
    assert refusal.value.code == code


@pytest.mark.parametrize("text", [b",[{" * 100_000, b'\\",' * 100_000, b"\\\\" * 20_000 + b"," * 20_000, b"," * 65_535])
def test_signs_within_a_string_are_no_values(text: bytes) -> None:
    assert prepare(SEND % (b'"%b"' % text))
    assert prepare(b'{"to":"topic:t","body":"%b","meta":{"a":1,"b":[2]}}' % text)


def test_depth_64_is_allowed() -> None:
    data = b'{"to":"topic:t","meta":' + b'{"x":' * 64 + b"1" + b"}" * 64 + b"}"
    assert prepare(data)


@pytest.mark.parametrize("name", ["too", "To", "TO", "bodyy", "priorty", "clientMessageId", "id", ""])
def test_an_unknown_or_misspelt_field_is_named(name: str) -> None:
    error = refused({name: "x"})
    assert error.code == "invalid_field"
    assert name in str(error)


WRONG = [None, 1, 1.5, True, [], {}, "x"]
TAKES = {
    "to": (),
    "body": (None, "x"),
    "body_base64": (None,),
    "meta": (None, {}),
    "priority": (),
    "reply_to": (None, "x"),
    "mentions": (None, []),
    "client_message_id": (None, "x"),
    "not_before": (None,),
}


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, good in TAKES.items() for v in WRONG if v not in good or v is True or v == 1]
)
def test_a_wrong_type_in_any_field_is_refused_by_name(field: str, value: object) -> None:
    error = refused({field: value})
    assert error.problem.field == field


@pytest.mark.parametrize(
    "to",
    [
        "",
        "orders",
        "topic:",
        ":orders",
        "topic:*",
        "topic:>",
        "topic:../x",
        "topic:a\nb",
        "topic:orders\n",
        "Topic:orders",
        "mail:x",
        "topic:" + "a" * 300,
        "topic:1a",
        "topic:a-b",
        "topic:a b",
        "topic:é",
        "dm:Bob",
        "dm:bob.x",
        "queue:a.b.c.d.e",
        "queue:a..b",
        "queue:.a",
        "$JS.API",
    ],
)
def test_a_destination_that_is_none_is_refused(to: str) -> None:
    error = refused({"to": to})
    assert (error.code, error.problem.field) == ("invalid_destination", "to")


@pytest.mark.parametrize("to", ["topic:a", "topic:" + "a" * 64, "dm:b-o_b", "queue:a", "queue:a.b-c.d_e.f1"])
def test_a_well_formed_destination_is_taken(to: str) -> None:
    assert str(parse_destination(to)) == to


def test_an_unknown_priority_is_refused_and_the_known_ones_are_named() -> None:
    error = refused({"priority": "urgent"})
    assert error.problem.field == "priority"
    assert str(error).endswith("'urgent': one of low, next, now")


def test_ten_thousand_mentions_are_too_many() -> None:
    assert refused({"mentions": [f"m{n}" for n in range(10_000)]}).code == "too_many_mentions"


@pytest.mark.parametrize("member", ["", "Bob", "a b", "topic:x", "é", "a" * 65])
def test_a_mention_of_no_member_is_refused(member: str) -> None:
    assert refused({"mentions": [member]}).code == "invalid_mention"


def test_mentions_are_kept_in_meta_sorted_and_once() -> None:
    made = msgspec.json.decode(
        prepare(b'{"to":"topic:t","meta":{"a":1},"mentions":["b","a","b"]}').payload, type=Envelope
    )
    assert made.meta == {"a": 1, "mentions": ["a", "b"]}
    assert made.mentions() == ["a", "b"]


def test_a_callers_own_meta_mentions_are_refused() -> None:
    assert refused({"meta": {"mentions": []}}).problem.field == "meta.mentions"


@pytest.mark.parametrize(
    "moment",
    [
        *("", "soon", "-1", "2026-11-21T09:00:00", "2026-13-01T00:00:00Z", "9999-12-31T23:59:59-12:00"),
        "9999-12-31T23:59:59.999001Z",
    ],
)
def test_a_not_before_that_is_no_time_with_an_offset_is_refused(moment: str) -> None:
    assert refused({"not_before": moment}).problem.field == "not_before"


@pytest.mark.parametrize("moment", ["1999-01-01T00:00:00Z", "9999-12-31T23:59:59.999Z"])
def test_a_not_before_in_the_past_or_far_away_is_a_time_like_any(moment: str) -> None:
    assert prepare(json.dumps({"to": "topic:t", "not_before": moment}).encode()).not_before == datetime.fromisoformat(
        moment
    )


def test_a_not_before_is_kept_in_utc() -> None:
    made = prepare(b'{"to":"topic:t","not_before":"2026-11-21T09:00:00+02:00"}')
    assert made.not_before == datetime(2026, 11, 21, 7, tzinfo=UTC)


@pytest.mark.parametrize("reply_to", ["", " ", "a b", "a" * 129, "é", "*"])
def test_a_reply_to_that_is_no_id_is_refused(reply_to: str) -> None:
    assert refused({"reply_to": reply_to}).problem.field == "reply_to"


@pytest.mark.parametrize("text", ["@", "abc", "a===", "aGVsbG8", "aGVs bG8=", "aGVsbG8=\n", "é"])
def test_bad_base64_is_refused(text: str) -> None:
    assert refused({"body_base64": text}).code == "invalid_base64"


def test_two_bodies_are_refused() -> None:
    assert refused({"body": "", "body_base64": ""}).code == "two_bodies"


@pytest.mark.parametrize(("size", "fits"), [(MIB - 1, True), (MIB, True), (MIB + 1, False)])
@pytest.mark.parametrize("field", ["body", "body_base64"])
def test_the_limit_of_a_body_is_exact(size: int, field: str, *, fits: bool) -> None:
    content = "a" * size if field == "body" else base64.b64encode(bytes(size)).decode()
    data = json.dumps({"to": "topic:t", field: content}).encode()
    if fits:
        assert prepare(data)
    else:
        assert refused(data).problem.status == 413


IDS = ["", " ", '"a"', "a" * 129, "a\n", "a\x7f", "é", "'", "*", ">", "$JS."]


@pytest.mark.parametrize("text", IDS)
def test_a_bad_client_message_id_is_refused(text: str) -> None:
    assert refused({"client_message_id": text}).problem.field == "client_message_id"


@pytest.mark.parametrize("text", IDS)
def test_a_bad_idempotency_key_is_refused(text: str) -> None:
    assert refused(b'{"to":"topic:t"}', idempotency_key=text).problem.field == "Idempotency-Key"


def test_the_header_wins_over_the_body() -> None:
    data = b'{"to":"topic:t","client_message_id":"body"}'
    assert prepare(data, idempotency_key="header").client_message_id == "header"


def test_without_an_id_each_send_gets_a_fresh_one() -> None:
    data = b'{"to":"topic:t"}'
    assert prepare(data).client_message_id != prepare(data).client_message_id


@pytest.mark.parametrize(
    "traceparent",
    [
        *("", "x", "00-" + "g" * 32 + "-" + "b" * 16 + "-01", "00-" + "a" * 31 + "-" + "b" * 16 + "-01"),
        *("00-" + "0" * 32 + "-" + "b" * 16 + "-01", "00-" + "a" * 32 + "-" + "0" * 16 + "-01"),
        "ff-" + "a" * 32 + "-" + "b" * 16 + "-01",
    ],
)
def test_a_traceparent_that_is_none_is_dropped(traceparent: str) -> None:
    assert b"traceparent" not in prepare(b'{"to":"topic:t"}', traceparent=traceparent).payload


def test_a_traceparent_is_kept() -> None:
    traceparent = f"00-{'0' * 31}a-{'0' * 15}b-00"
    made = msgspec.json.decode(prepare(b'{"to":"topic:t"}', traceparent=traceparent).payload, type=Envelope)
    assert made.traceparent == traceparent


def test_another_envelope_version_is_refused() -> None:
    with pytest.raises(InvalidMessage, match="version"):
        check_envelope(Envelope(to="topic:t", version="2"))


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=10,
)
metas = st.none() | st.dictionaries(text.filter(lambda key: key != "mentions"), values, max_size=4)
requests = st.builds(
    SendRequest,
    to=st.sampled_from(["topic:orders", "dm:bob", "queue:work.a"]),
    body=st.none() | text,
    meta=metas,
    priority=st.sampled_from(["now", "next", "low"]),
    reply_to=st.none() | st.just("m-1"),
    mentions=st.none() | st.lists(st.sampled_from(["al", "bob"]), max_size=3),
    client_message_id=st.none() | st.just("id-1"),
)


@given(requests)
def test_what_the_broker_checks_is_what_the_daemon_checked(request: SendRequest) -> None:
    made = prepare(msgspec.json.encode(request))
    checked = check_envelope(msgspec.json.decode(made.payload, type=Envelope))
    assert checked.fingerprint == made.fingerprint
    assert checked.body == (request.body or "").encode()


@given(request=requests, separators=st.sampled_from([(",", ":"), (" , ", " : ")]), ascii_only=st.booleans())
def test_a_send_reads_the_same_however_it_is_written(
    *, request: SendRequest, separators: tuple[str, str], ascii_only: bool
) -> None:
    plain = msgspec.to_builtins(request)
    written = json.dumps(plain, separators=separators, ensure_ascii=ascii_only)
    assert decode_request(written.encode()) == request


@given(metas.filter(bool), st.data())
def test_a_key_that_stands_twice_is_always_found(meta: dict[str, object], data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(sorted(meta)))
    body = json.dumps(meta)[:-1] + "," + json.dumps(key) + ":" + json.dumps(data.draw(values)) + "}"
    with pytest.raises(InvalidMessage, match="twice"):
        decode_request(f'{{"to":"topic:t","meta":{body}}}'.encode())


@given(st.binary(max_size=200))
def test_bytes_that_are_no_message_are_refused_and_nothing_else(data: bytes) -> None:
    assume(not data.startswith(b"{"))
    assert refused(data).problem.status == 400


@given(st.from_regex(re.compile(r"(topic|dm|queue|x):[a-z0-9_.-]{0,70}\n?"), fullmatch=True))
def test_the_document_has_the_rules_that_are_checked(text: str) -> None:
    described = msgspec.json.schema(SendRequest)["$defs"]["SendRequest"]["properties"]
    (id_, _), (mentions, _) = described["client_message_id"]["anyOf"], described["mentions"]["anyOf"]
    assert (re.search(described["to"]["pattern"], text) is not None) == message.is_destination(text)
    assert (re.search(id_["pattern"], text) is not None) == MESSAGE_ID.allows(text)
    assert (re.search(mentions["items"]["pattern"], text) is not None) == WORD.allows(text)
    assert mentions["maxItems"] == message.MAX_MENTIONS
