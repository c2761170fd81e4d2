"""What ids, delays and dead letters are made of."""

from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from postroom._wire.dead_letters import DeadLetter, LetterFilter, common_error
from postroom.delivery.dead_letters import is_dead_letter, letter_id, letter_of
from postroom.delivery.dead_letters.operations import StoredLetter, replay_id
from postroom.delivery.http.requests import MESSAGE_ID
from postroom.delivery.message import Delivery, message_id_of
from postroom.delivery.nats import UNREADABLE

DIED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def letter(**members) -> DeadLetter:
    return DeadLetter(
        **{
            "message_id": "m1",
            "original_subject": "sea.event.order_placed.v1",
            "reason": "max_deliver",
            "attempts": 20,
            "stream": "SEA_EVENTS",
            "sequence": 7,
            "consumer": "billing",
            "died_at": DIED,
            **members,
        }
    )


@pytest.mark.parametrize(
    ("headers", "body", "message_id"),
    [
        ({"Nats-Msg-Id": "m1"}, b"{}", "m1"),
        ({"Nats-Msg-Id": "m1/12", "Postroom-Epoch": "12"}, b"{}", "m1"),
        ({"Nats-Msg-Id": "order/12"}, b"{}", "order/12"),
        ({"Nats-Msg-Id": "order/12/1", "Postroom-Epoch": "1"}, b"{}", "order/12"),
        ({"Nats-Msg-Id": "/1", "Postroom-Epoch": "1"}, b'{"broker_message_id": "b1"}', "b1"),  # nothing but an epoch
        ({"Nats-Msg-Id": "/1", "Postroom-Epoch": "1"}, b"{}", None),
        ({"Nats-Msg-Id": "a/b"}, b"{}", "a/b"),
        ({"Nats-Msg-Id": "m1"}, b'{"broker_message_id":"m2"}', "m1"),
        ({}, b'{"broker_message_id":"m2","more":[1]}', "m2"),
        ({"Nats-Msg-Id": ""}, b'{"broker_message_id":""}', None),
        ({}, b'{"broker_message_id":7}', None),
        ({UNREADABLE: "TkFUUy8="}, b'{"broker_message_id":"m2"}', None),
        ({}, b"[]", None),
        ({}, b"\xff", None),
        ({}, b"", None),
    ],
)
def test_the_message_id_is_the_publishers_else_the_brokers(headers, body, message_id):
    assert message_id_of(headers, body) == message_id


def test_a_replay_has_the_same_id_each_time_and_another_after_each_death():
    first = replay_id(letter())
    assert first == replay_id(letter()) == "m1~billing.1"
    assert replay_id(letter(message_id=first)) == "m1~billing.2"
    assert replay_id(letter(message_id="m1~billing.9")) == "m1~billing.10"
    assert replay_id(letter(message_id=None)) == "SEA_EVENTS.7~billing.1"


@pytest.mark.parametrize("message_id", ["m" * 255, "é", "a message"])
def test_a_replays_id_is_one_that_an_inbox_accepts(message_id):
    first = replay_id(letter(message_id=message_id))
    for again in (first, replay_id(letter(message_id=first)), replay_id(letter(message_id=message_id, attempts=7))):
        assert MESSAGE_ID.fullmatch(again)
    assert replay_id(letter(message_id=message_id)) == first != replay_id(letter(message_id=first))


def test_two_consumers_that_bury_one_message_write_two_letters():
    assert letter_id(letter()) != letter_id(letter(consumer="shipping"))
    assert letter_id(letter(attempts=20)) == letter_id(letter(attempts=21))


def test_messages_without_an_id_have_letters_of_their_own():
    assert letter_id(letter(message_id=None)) != letter_id(letter(message_id=None, sequence=8))


def delivery(**members) -> Delivery:
    first = Delivery("sea.event.order_placed.v1", b"{}", {}, "m1", "SEA_EVENTS", 7, 1, DIED)
    return first._replace(**members)


@pytest.mark.parametrize("message_id", ["\x00", "é", "\udcff", "m" * 10_000, "a b\nc"])
def test_a_letters_id_can_be_a_header_and_a_row_whatever_its_message_is_called(message_id):
    odd = letter_of(
        delivery(message_id=message_id, headers={"a": message_id}), reason="x", error="\udcff", consumer="c"
    )
    assert letter_id(odd).isascii()
    assert letter_id(odd).isprintable()
    assert len(letter_id(odd)) < 256
    assert msgspec.json.decode(msgspec.json.encode(odd), type=DeadLetter) == odd


@pytest.mark.parametrize(
    ("members", "dead"),
    [
        ({}, False),
        ({"subject": "sea.dlq.order_placed.v1"}, True),
        ({"subject": "sea.dlq.any.thing"}, True),
        ({"subject": "cmd.dlq.default.work.run"}, False),  # the mesh `dlq`
        ({"subject": "dlq.event.work.v1"}, False),
        ({"subject": "copy.of.it", "headers": {"Postroom-Event-Type": "MessageDeadLettered"}}, True),
    ],
)
def test_a_dead_letter_is_known_by_its_subject_and_a_copy_by_its_header(members, *, dead):
    assert is_dead_letter(delivery(**members)) is dead


@pytest.mark.parametrize("data", [b"", b'{"a": 1}\n', "é".encode(), b"\x00\xff"])
def test_a_payload_comes_back_byte_for_byte(data):
    stored = msgspec.json.decode(msgspec.json.encode(letter().with_data(data)), type=DeadLetter)
    assert stored.data() == data


@pytest.mark.parametrize(
    ("members", "matches"),
    [
        ({}, True),
        ({"ids": frozenset({"4"})}, True),
        ({"ids": frozenset({"m1"})}, True),
        ({"ids": frozenset({"5"})}, False),
        ({"subject": "sea.event.>"}, True),
        ({"subject": "sky.event.>"}, False),
        ({"reason": "max_deliver", "consumer": "billing"}, True),
        ({"reason": "max_deliver", "consumer": "shipping"}, False),
        ({"older_than_seconds": 59}, True),
        ({"older_than_seconds": 60}, False),
        ({"before": DIED + timedelta(microseconds=1)}, True),
        ({"before": DIED}, False),
        ({"before": DIED + timedelta(seconds=1), "older_than_seconds": 60}, False),
        ({"before": DIED, "older_than_seconds": 59}, False),
    ],
)
def test_a_filter_means_what_it_says(members, *, matches):
    a_minute_later = DIED.replace(minute=5)
    assert StoredLetter("4", DIED, letter()).matches(LetterFilter(**members), a_minute_later) is matches


def test_what_is_no_letter_is_only_meant_by_its_id_or_by_no_filter_at_all():
    stranger = StoredLetter("4", DIED, None)
    assert stranger.matches(LetterFilter(), DIED)
    assert stranger.matches(LetterFilter(ids=frozenset({"4"})), DIED)
    assert not stranger.matches(LetterFilter(reason="max_deliver"), DIED)


@pytest.mark.parametrize(
    ("error", "common"),
    [
        ("the total is -12.50, not 3", "the total is -…, not …"),
        ("order-2026-0001 is unknown", "… is unknown"),
        ("http_503: no room", "http_503: no room"),
        ("no row 019a8f3e-6c5f-7d3a-9a43-2f5b1c0d9e77 (7 tries)", "no row … (… tries)"),
        ("x" * 500, "x" * 200),
    ],
)
def test_what_errors_of_one_cause_have_in_common_is_without_numbers_and_ids(error: str, common: str) -> None:
    assert common_error(error) == common
    assert common_error(common) == common
