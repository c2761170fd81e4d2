"""The chain of hashes: the same log has the same hash, and one changed byte another one."""

import json
import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal

import msgspec
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.agent import Envelope
from postroom.delivery.agents.envelopes import later, to_microseconds
from postroom.delivery.agents.store import (
    NO_HASH,
    Record,
    canonical,
    decode_record,
    encode_record,
    next_hash,
    payload_of,
    with_payload,
)
from postroom.errors import InvalidMessage

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.floats(allow_nan=False) | text
payloads = st.recursive(
    scalars.filter(lambda value: not isinstance(value, float) or abs(value) < 1e300),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
)
envelopes = st.builds(
    Envelope,
    id=text,
    type=text,
    actor=text,
    entity_id=st.none() | text,
    expected_version=st.none() | st.integers(0, 2**53 - 1),
    ts=st.datetimes(timezones=st.just(UTC)),
)


def encoded(envelope: Envelope, payload: object) -> bytes:
    read, body = with_payload(envelope, payload)
    return encode_record(Record(cause=None, envelope=read, role="handled", subject="demo.event.x.v1"), body)


def chain(records: list[bytes]) -> bytes:
    state_hash = NO_HASH
    for record in records:
        state_hash = next_hash(state_hash, record)
    return state_hash


@settings(max_examples=60)
@given(envelopes, payloads)
def test_a_record_is_the_canonical_json_of_rfc_8785(envelope: Envelope, payload: object):
    record = encoded(envelope, payload)
    assert rfc8785.dumps(json.loads(record, parse_int=float)) == record


@settings(max_examples=60)
@given(envelopes, payloads)
def test_a_record_that_is_read_and_written_again_is_the_same(envelope: Envelope, payload: object):
    record = encoded(envelope, payload)
    read = decode_record(record)
    assert encode_record(read, payload_of(record)) == record


@given(payloads)
def test_the_payload_of_a_record_is_what_was_stored_to_the_byte(payload: object):
    assert payload_of(encoded(Envelope(id="1", type="x"), payload)) == canonical(payload, "it")


@settings(max_examples=60)
@given(st.lists(st.tuples(envelopes, payloads), min_size=1, max_size=4), st.data())
def test_one_changed_byte_changes_the_hash(events: list[tuple[Envelope, object]], data: st.DataObject):
    records = [encoded(envelope, payload) for envelope, payload in events]
    which = data.draw(st.integers(0, len(records) - 1))
    where = data.draw(st.integers(0, len(records[which]) - 1))
    altered = bytearray(records[which])
    altered[where] ^= data.draw(st.integers(1, 255))
    assert chain([*records[:which], bytes(altered), *records[which + 1 :]]) != chain(records)


def test_the_order_of_events_changes_the_hash():
    one, two = encoded(Envelope(id="1", type="x"), 1), encoded(Envelope(id="2", type="x"), 1)
    assert chain([one, two]) != chain([two, one])


def test_the_order_of_a_payloads_keys_does_not():
    envelope = Envelope(id="1", type="x")
    pairs = [(f"k{number}", number) for number in range(10)]
    shuffled = random.Random(3).sample(pairs, len(pairs))
    assert encoded(envelope, dict(pairs)) == encoded(envelope, dict(shuffled))


def test_what_an_agent_sees_is_what_a_replay_reads():
    envelope, _ = with_payload(Envelope(id="1", type="x"), {"share": 1.0, "pair": (1, 2)})
    assert envelope.payload == {"share": 1, "pair": [1, 2]}
    assert isinstance(envelope.payload["share"], int)


class Share(float):
    """As numpy's float64, in this."""


def test_an_agent_emits_what_a_program_may_send():
    assert canonical({1: "one", "share": Share(0.5)}, "the payload") == b'{"1":"one","share":0.5}'


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_is_the_same_as_a_program_and_as_postgres_write_it(number: float):
    written = format(Decimal(repr(number)), "f")  # as jsonb does, which has no exponents
    assert canonical(msgspec.json.decode(written), "the payload") == canonical(number, "the payload")


@pytest.mark.parametrize("payload", [float("nan"), 2**53 + 1, 10**400, object(), {"at": {1: object()}}, "\ud800"])
def test_a_payload_that_json_cannot_hold_is_refused(payload: object):
    with pytest.raises(InvalidMessage, match="is not JSON"):
        canonical(payload, "the payload")


def test_a_payload_that_json_cannot_hold_is_named_in_words():
    deep: object = None
    for _ in range(100_000):
        deep = [deep]
    for payload, sentence in ((deep, "it is nested too deeply"), ("\ud800", "is not UTF-8 text")):
        with pytest.raises(InvalidMessage, match=f"the payload is not JSON: .*{sentence}$"):
            canonical(payload, "the payload")


def test_an_unknown_field_is_no_record():
    record = encoded(Envelope(id="1", type="x"), None).replace(b'"role"', b'"rule":1,"role"')
    with pytest.raises(msgspec.ValidationError):
        decode_record(record)


@given(st.datetimes(timezones=st.just(UTC)))
def test_the_logical_clock_goes_on_by_a_microsecond_and_stands_still_at_the_end_of_time(moment: datetime):
    if moment < datetime.max.replace(tzinfo=UTC):
        assert to_microseconds(later(moment, 1)) == to_microseconds(moment) + 1
    assert later(datetime.max.replace(tzinfo=UTC), 1) == datetime.max.replace(tzinfo=UTC)


def test_a_payload_of_nothing_but_escapes_holds_up_the_agent_for_a_fraction_of_what_the_library_takes():
    payload = '"' * 300_000

    def seconds(write: Callable[[str], bytes]) -> float:
        took = []
        for _ in range(3):
            began = time.process_time()
            assert write(payload) == rfc8785_form
            took.append(time.process_time() - began)
        return min(took)

    rfc8785_form = rfc8785.dumps(payload)
    assert seconds(lambda value: canonical(value, "it")) < seconds(rfc8785.dumps) / 2
