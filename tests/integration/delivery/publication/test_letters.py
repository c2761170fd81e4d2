"""Dead letters are rows, published like events, and again where their stream lost them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import perf_counter
from typing import Any

import msgspec
import pytest

from postroom._wire.dead_letters import DeadLetter, LetterFilter
from postroom.delivery.dead_letters import StreamedLetter, read_letters
from postroom.delivery.dead_letters.operations import LetterOperations, count_letters
from postroom.delivery.publication.postgres import EVENTS, LETTERS
from postroom.delivery.streams import dead_letter_stream, ensure_stream
from postroom.errors import Unavailable


@pytest.fixture
async def stream(office: Any) -> str:
    await ensure_stream(office.js, dead_letter_stream(office.context))
    return f"{office.context}_DLQ".upper()


@pytest.fixture
def read(stream: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note which letters an operator's program reads from the stream; the server has those of other tests too."""
    noted: list[int] = []

    async def note(*arguments: Any) -> AsyncGenerator[list[StreamedLetter], None]:
        async for page in read_letters(*arguments):
            noted.extend(each.sequence for each in page if each.stream == stream)
            yield page

    monkeypatch.setattr("postroom.delivery.dead_letters.operations.read_letters", note)
    return noted


async def publish(office: Any) -> None:
    publisher = office.publisher(table=LETTERS)
    while await publisher.step():
        pass
    await publisher.stop()


async def streamed(office: Any, stream: str) -> dict[str, DeadLetter]:
    """Read the letters of the stream by their message ids."""
    found = await office.messages(stream)
    return {message.headers["Nats-Msg-Id"]: msgspec.json.decode(message.data, type=DeadLetter) for message in found}


async def settle(office: Any, message_id: str) -> None:
    async with office.pool.acquire() as connection:
        letters = LetterOperations(connection, office.js, office.context, actor="ann")
        found = await letters.find(LetterFilter(ids=frozenset({message_id})))
        assert list((await letters.settle("drop", found, why="a test")).values()) == [None]


async def unsettled(office: Any) -> list[DeadLetter | None]:
    async with office.pool.acquire() as connection:
        letters = LetterOperations(connection, office.js, office.context, actor="ann")
        return [stored.letter for stored in await letters.find(LetterFilter(), payloads=True)]


async def test_a_letter_is_published_whole_under_its_own_id(office: Any, stream: str) -> None:
    await office.bury("a", payload=b"\xff\x00")
    await publish(office)
    (message,) = await office.messages(stream)
    assert message.subject == f"{office.context}.dlq.order_placed.v1"
    assert message.headers["Nats-Msg-Id"] == "dead:billing:a"
    assert message.headers["Postroom-Event-Type"] == "MessageDeadLettered"
    letter = msgspec.json.decode(message.data, type=DeadLetter)
    assert (letter.message_id, letter.reason, letter.data()) == ("a", "poison", b"\xff\x00")
    assert await unsettled(office) == [letter]  # and it is listed once


@pytest.mark.usefixtures("stream")
async def test_letters_that_are_named_by_their_rows_cost_no_look_at_the_others(office: Any) -> None:
    await office.bury(*(f"m-{number}" for number in range(2000)))
    await publish(office)
    async with office.pool.acquire() as connection:
        letters = LetterOperations(connection, office.js, office.context, actor="ann")
        began = perf_counter()
        found = await letters.find(LetterFilter())
        all_of_them = perf_counter() - began
        named = LetterFilter(ids=frozenset(stored.id for stored in found[:20]))
        began = perf_counter()
        assert await letters.find(named) == found[:20]
        assert perf_counter() - began < all_of_them / 5


@pytest.mark.usefixtures("stream")
async def test_a_letter_that_is_named_by_its_message_costs_no_look_at_the_others(office: Any, read: list[int]) -> None:
    await office.bury(*(f"m-{number}" for number in range(100)))
    await publish(office)
    await office.bury("m-7", consumer="shipping")
    await publish(office)
    async with office.pool.acquire() as connection:
        letters = LetterOperations(connection, office.js, office.context, actor="ann")
        named = LetterFilter(ids=frozenset({"m-7", "m-8"}))
        found = [stored.letter for stored in await letters.find(named)]
        assert [(letter.message_id, letter.consumer) for letter in found if letter] == [
            ("m-7", "billing"),
            ("m-8", "billing"),
            ("m-7", "shipping"),
        ]
        assert read == []
        theirs = DeadLetter(message_id="m-8", original_subject="s", reason="poison", attempts=1)
        ack = await office.js.publish(
            f"{office.context}.dlq.theirs.v1", msgspec.json.encode(theirs), headers={"Nats-Msg-Id": "dead:an-agent:m-8"}
        )
        assert len(await letters.find(named)) == 4
        assert read == [ack.seq]


@pytest.mark.usefixtures("stream")
async def test_the_same_death_has_one_letter_however_often_it_is_buried(office: Any) -> None:
    await office.bury("a", "a")
    await publish(office)
    await office.bury("a")
    await settle(office, "a")
    await office.bury("a")
    await publish(office)
    assert await unsettled(office) == []
    await office.bury("a", consumer="shipping")
    assert len(await unsettled(office)) == 1


@pytest.mark.usefixtures("stream")
async def test_a_letter_that_postgres_does_not_take_is_not_taken_for_kept(office: Any) -> None:
    """Then its message is not acknowledged, and comes again."""
    await office.pool.execute("ALTER TABLE postroom.dead_letters RENAME TO elsewhere")
    with pytest.raises(Unavailable, match="Postgres did not accept it"):
        await office.bury("a")
    await office.pool.execute("ALTER TABLE postroom.elsewhere RENAME TO dead_letters")
    await office.bury("a")
    assert len(await unsettled(office)) == 1


async def test_letters_that_a_stream_lost_are_published_again_but_for_those_that_are_settled(
    office: Any, stream: str
) -> None:
    record = office.record(EVENTS, LETTERS)
    await office.bury(*"abcde")
    await publish(office)
    await settle(office, "a")
    assert list(await streamed(office, stream)) == [f"dead:billing:{name}" for name in "bcde"]
    assert await office.compare(record) == 0

    await office.js.purge_stream(stream)
    assert await office.compare(record) == 4
    await publish(office)
    assert list(await streamed(office, stream)) == [f"dead:billing:{name}/1" for name in "bcde"]
    await settle(office, "b")

    await office.js.delete_stream(stream)
    await ensure_stream(office.js, dead_letter_stream(office.context))
    assert await office.compare(record) == 3
    await office.bury("f")  # which gets a number that a settled one had
    await publish(office)
    assert sorted(await streamed(office, stream)) == [*(f"dead:billing:{name}/2" for name in "cde"), "dead:billing:f"]
    assert [letter.message_id for letter in await unsettled(office) if letter] == [*"cdef"]


async def test_letters_are_counted_without_reading_a_stream_that_has_no_others(
    office: Any, stream: str, read: list[int]
) -> None:
    async def count() -> int:
        async with office.pool.acquire() as connection:
            return (await count_letters(connection, office.js))[stream]

    assert await count() == 0
    await office.bury(*"abc")
    await publish(office)
    await settle(office, "a")
    read.clear()
    assert (await count(), read) == (2, [])
    for other in range(30):  # more parts of the stream than are read one by one
        await office.js.publish(f"{office.context}.dlq.order_placed.v1", b"an agent's")
        await office.bury(f"d-{other}")
        await publish(office)
        if other in (1, 29):
            assert await count() == 2 + 2 * (other + 1)


async def test_of_a_stream_with_letters_of_the_record_only_what_is_between_them_is_read(
    office: Any, stream: str, read: list[int]
) -> None:
    async def agents(letters: int) -> None:
        for _ in range(letters):
            await office.js.publish(f"{office.context}.dlq.order_placed.v1", b"an agent's")

    await agents(1)
    await office.bury(*(f"a-{number}" for number in range(50)))
    await publish(office)
    await agents(2)
    await office.bury(*(f"b-{number}" for number in range(50)))
    await publish(office)
    numbers = (await office.js.stream_info(stream)).state.last_seq
    async with office.pool.acquire() as connection:
        assert (await count_letters(connection, office.js))[stream] == 103
    assert (numbers, read) == (103, [1, 52, 53])


async def test_a_letter_larger_than_nats_takes_keeps_its_payload_in_the_record(office: Any, stream: str) -> None:
    payload = b"\xff" * (office.js._nc.max_payload - 1000)
    await office.bury("large", payload=payload)
    await office.bury("small")
    await publish(office)
    found = await streamed(office, stream)
    assert (found["dead:billing:large"].payload_omitted, found["dead:billing:large"].has_payload) == (True, False)
    assert found["dead:billing:small"].has_payload
    large, _ = await unsettled(office)
    assert large is not None
    assert large.data() == payload


async def test_a_letter_that_no_stream_takes_holds_up_no_other_and_stays_in_the_record(
    office: Any, stream: str
) -> None:
    await office.bury("a")
    await office.pool.execute("UPDATE postroom.dead_letters SET subject = 'nowhere.dlq.x.v1'")
    await office.bury("b")
    await publish(office)
    assert list(await streamed(office, stream)) == ["dead:billing:b"]
    assert len(await unsettled(office)) == 2
    assert (await office.source(LETTERS).backlog(office.context)).failing == 1


async def test_a_letter_that_was_settled_before_it_was_published_never_is(office: Any, stream: str) -> None:
    await office.bury("a")
    await settle(office, "a")
    await publish(office)
    assert await office.messages(stream) == []
