"""Many letters are replayed together, and each exactly once, whatever becomes of the others or of the operator."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgspec
import pytest
from support.zygote import Piped

from postroom._wire.dead_letters import DeadLetter, LetterFilter
from postroom.delivery.dead_letters import RecordedLetters, StreamLetters
from postroom.delivery.dead_letters import operations as dead_letters
from postroom.delivery.dead_letters.operations import TOGETHER, LetterOperations, Outcome, StoredLetter
from postroom.delivery.publication.postgres import LETTERS, REPLAYS, drop_failing, list_dropped, list_failing
from postroom.delivery.streams import dead_letter_stream, ensure_stream
from postroom.errors import PostroomError

PROGRAM = Path(__file__).with_name("replay_process.py")
ROOT = Path(__file__).parents[4]


@pytest.fixture
async def dead(office: Any) -> list[str]:
    """120 messages of a consumer that is there; 80 letters have rows and are published, 40 are in the stream alone."""
    await office.add_stream()
    await office.js.add_consumer(office.stream, durable_name="billing", ack_policy="explicit")
    await ensure_stream(office.js, dead_letter_stream(office.context))
    ids = [f"m-{number}" for number in range(120)]
    await office.bury(*ids[40:])
    publisher = office.publisher(table=LETTERS)
    while await publisher.step():
        pass
    await publisher.stop()
    for id_ in ids[:40]:
        await keep(office, id_)
    return ids


async def keep(
    office: Any,
    id_: str,
    *,
    consumer: str = "billing",
    payload: str | None = "{}",
    subject: str | None = None,
    headers: dict[str, str] | None = None,
) -> None:
    """Keep a letter as an agent does."""
    letter = DeadLetter(
        message_id=id_,
        original_subject=subject or f"{office.context}.event.order_placed.v1",
        reason="poison",
        attempts=1,
        consumer=consumer,
        payload=payload,
        headers=headers or {},
    )
    await StreamLetters(office.js, office.context).keep(letter)


async def find(office: Any, wanted: LetterFilter | None = None) -> list[StoredLetter]:
    async with office.pool.acquire() as connection:
        return await operations(office, connection).find(wanted or LetterFilter())


async def settle(office: Any, found: list[StoredLetter], verb: str = "replay") -> list[Outcome]:
    async with office.pool.acquire() as connection:
        outcomes = await operations(office, connection).settle(verb, found, why="a test")
        return [outcomes[stored.id] for stored in found]


def operations(office: Any, connection: Any) -> LetterOperations:
    return LetterOperations(connection, office.js, office.context, actor="ann")


async def notes(office: Any) -> list[str | None]:
    """Return the messages whose letters were settled."""
    async with office.pool.acquire() as connection:
        return sorted(str(note.message_id) for note in await operations(office, connection).notes())


@pytest.mark.parametrize("statement", [*range(6, 19), 99])  # from the end of the first transaction to the third
async def test_an_operator_that_is_killed_loses_none_and_doubles_none(
    office: Any, dead: list[str], nats_url: str, database_url: str, statement: int
) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)])}
    killed = await Piped.start([str(PROGRAM), nats_url, database_url, office.context, str(statement)], environment)
    code, _ = await killed.communicate()
    assert code == (0 if statement == 99 else -signal.SIGKILL)
    settled = await notes(office)
    left = await find(office)
    assert sorted([*settled, *(stored.letter.message_id for stored in left if stored.letter)]) == sorted(dead)
    assert set(settled) <= {id_.removesuffix("~billing.1") for id_ in await office.ids()}

    outcomes = await settle(office, left)
    assert not any(isinstance(outcome, PostroomError) for outcome in outcomes)
    assert sorted(await office.ids()) == sorted(f"{id_}~billing.1" for id_ in dead)
    assert (await notes(office), await find(office)) == (sorted(dead), [])


async def test_the_log_of_letters_has_the_last_that_were_settled(
    office: Any, dead: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "LIMIT", 2)
    found = await find(office)
    assert len(found) == len(dead)
    for some in (found[:-2], found[-2:]):
        await settle(office, some, "drop")
    last = [stored.letter.message_id for stored in found[-2:] if stored.letter]
    assert await notes(office) == sorted(map(str, last))


async def test_replays_that_a_stream_lost_are_published_again_but_for_those_that_are_handled(
    office: Any, dead: list[str]
) -> None:
    record, publisher = office.record(REPLAYS), office.publisher(table=REPLAYS)
    await keep(office, "m-last", payload='{"n": 1}', headers={"X-Said": "so"})
    await settle(office, await find(office))
    assert await office.compare(record) == 0
    await handle(office, "m-7~billing.1")

    await office.js.purge_stream(office.stream)
    assert await office.compare(record) == len(dead)
    while await publisher.step():
        pass
    lost = {"m-last", *dead} - {"m-7"}
    assert sorted(await office.ids()) == sorted(f"{id_}~billing.1/1" for id_ in lost)
    *_, last = [message for message in await office.messages() if message.headers["Postroom-Replay-Of"] == "m-last"]
    said = {"X-Said": "so", "Postroom-Replay-Of": "m-last", "Postroom-Replayed-For": "billing", "Postroom-Epoch": "1"}
    assert last.data == b'{"n": 1}'
    assert {name: text for name, text in last.headers.items() if not name.startswith("Nats-")} == said

    await office.js.delete_stream(office.stream)
    await office.add_stream()
    assert await office.compare(record) == len(dead)
    await publisher.stop()


async def test_what_was_replayed_is_kept_as_long_as_published_events(office: Any, dead: list[str]) -> None:
    await settle(office, await find(office))
    source = office.source(REPLAYS)
    await office.pool.execute("UPDATE postroom.replays SET published_at = now() - interval '31 days' WHERE id % 2 = 0")
    await source.prune()
    assert await office.pool.fetchval("SELECT count(*) FROM postroom.replays") == len(dead) / 2


async def test_a_replay_whose_number_another_one_has_is_published_again(office: Any, dead: list[str]) -> None:
    """The server lost its newest messages, and gave their numbers to others before anybody compared."""
    await settle(office, (await find(office))[:60])
    created = (await office.js.stream_info(office.stream)).created
    await office.pool.execute("UPDATE postroom.replays SET stream_sequence = stream_sequence + 60")
    await settle(office, await find(office))
    publisher = office.publisher(table=REPLAYS)
    while await publisher.step():
        pass
    await publisher.stop()
    places = await office.pool.fetch("SELECT stream, stream_created_at, stream_sequence, epoch FROM postroom.replays")
    assert {(row["stream"], row["stream_created_at"], row["epoch"]) for row in places} == {(office.stream, created, 1)}
    assert len({row["stream_sequence"] for row in places}) == len(dead)


async def test_what_goes_into_a_stream_made_anew_amid_a_replay_is_noted_as_there(office: Any, dead: list[str]) -> None:
    found = await find(office)
    async with office.pool.acquire() as connection:
        letters = operations(office, connection)
        await letters.settle("replay", found[:TOGETHER], why="a test")
        others = set(await office.ids())
        await office.js.delete_stream(office.stream)
        await office.add_stream()
        await office.js.add_consumer(office.stream, durable_name="billing", ack_policy="explicit")
        await letters.settle("replay", found[TOGETHER:], why="a test")
    created = (await office.js.stream_info(office.stream)).created
    rows = await office.pool.fetch("SELECT message_id FROM postroom.replays WHERE stream_created_at = $1", created)
    assert {row[0] for row in rows} == set(await office.ids()) == {f"{id_}~billing.1" for id_ in dead} - others


async def test_a_replay_that_no_stream_takes_any_more_can_be_dropped(office: Any) -> None:
    await office.add_stream()
    await office.js.add_consumer(office.stream, durable_name="billing", ack_policy="explicit")
    await office.bury("m-1")
    await settle(office, await find(office))
    await office.js.delete_stream(office.stream)
    await office.js.add_stream(name=office.stream, subjects=[f"{office.context}.event.invoice_sent.>"])
    assert await office.compare(office.record(REPLAYS)) == 1
    publisher = office.publisher(table=REPLAYS)
    await publisher.step()
    await publisher.stop()
    async with office.pool.acquire() as connection:
        (failing,) = (await list_failing(connection, REPLAYS, office.context)).failing
        assert (failing.subject, failing.aggregate) == (f"{office.context}.event.order_placed.v1", office.context)
        assert await drop_failing(connection, REPLAYS, [failing.id], actor="ann", reason="a test") == [failing.id]
        (dropped,) = await list_dropped(connection, REPLAYS, office.context)
        assert (dropped.id, dropped.error, dropped.dropped_by) == (failing.id, failing.error, "ann")
        assert (await list_failing(connection, REPLAYS)).failing == []


async def handle(office: Any, message_id: str) -> None:
    """Note a message as a consumer does that has handled it."""
    query = (
        "INSERT INTO postroom.inbox_messages (consumer, source_context, message_id, subject, attempts, processed_at)"
        " VALUES ('billing', $1, $2, $1 || '.event.order_placed.v1', 1, now())"
    )
    await office.pool.execute(query, office.context, message_id)


async def test_a_letter_that_cannot_be_replayed_keeps_no_other_and_stays_as_it_is(office: Any, dead: list[str]) -> None:
    await office.bury("orphan", consumer="gone")
    await keep(office, "lonely", consumer="gone")
    await keep(office, "empty", payload=None)
    found = await find(office)
    outcomes = await settle(office, found)
    failed = {
        str(stored.letter.message_id): outcome.problem.code
        for stored, outcome in zip(found, outcomes, strict=True)
        if isinstance(outcome, PostroomError) and stored.letter
    }
    assert failed == {"orphan": "consumer_gone", "lonely": "consumer_gone", "empty": "nothing_to_replay"}
    assert await notes(office) == sorted(dead)
    left = await find(office)
    assert {stored.letter.message_id for stored in left if stored.letter} == set(failed)
    assert await settle(office, left, "drop") == [None] * 3
    assert await find(office) == []


async def test_a_consumer_that_filters_for_other_subjects_now_is_sent_no_replay(office: Any, dead: list[str]) -> None:
    """It was deleted, and runs again under the same name with another filter: nobody would take the message."""
    name = f"{office.context}.event"
    await office.js.delete_consumer(office.stream, "billing")
    settings = {"durable_name": "billing", "ack_policy": "explicit"}
    await office.js.add_consumer(office.stream, **settings, filter_subject=f"{name}.invoice_sent.>")
    found = await find(office)
    outcomes = await settle(office, found)
    assert {outcome.problem.code for outcome in outcomes if isinstance(outcome, PostroomError)} == {"consumer_gone"}
    assert (len(await find(office)), await notes(office), await office.ids()) == (len(dead), [], [])

    await office.js.add_consumer(
        office.stream, **settings, filter_subjects=[f"{name}.invoice_sent.>", f"{name}.order_placed.>"]
    )
    assert not any(isinstance(outcome, PostroomError) for outcome in await settle(office, found))


async def test_two_operators_at_once_replay_each_letter_once(office: Any, dead: list[str]) -> None:
    found = await find(office)
    both = await asyncio.gather(settle(office, found), settle(office, found))
    done = [outcome for outcomes in both for outcome in outcomes if isinstance(outcome, str)]
    assert sorted(done) == sorted(await office.ids()) == sorted(f"{id_}~billing.1" for id_ in dead)


async def test_letters_that_are_replayed_are_in_no_stream_of_letters_any_more(office: Any, dead: list[str]) -> None:
    await settle(office, await find(office))
    left = [
        msgspec.json.decode(one.data)["message_id"] for one in await office.messages(f"{office.context}_DLQ".upper())
    ]
    assert sorted(left) == sorted(dead[:40])  # those that agents keep: their rows say that they are settled


@pytest.mark.usefixtures("dead")
async def test_many_letters_cost_far_less_than_each_by_itself(office: Any) -> None:
    found = [stored for stored in await find(office) if stored.row]

    async def cost(letters: list[StoredLetter]) -> float:
        began = perf_counter()
        await settle(office, letters)
        return (perf_counter() - began) / len(letters)

    alone = median([await cost([stored]) for stored in found[:20]])
    together = min([await cost(found[first : first + 20]) for first in (20, 40, 60)])  # something else may run for one
    assert together < alone / 2


@pytest.mark.usefixtures("dead")
async def test_a_page_costs_no_look_at_what_comes_after_it(office: Any) -> None:
    """Nor are letters looked through that are named by their places."""
    for first in range(0, 3000, 250):  # all at once, a slow disk would let the last of them wait for too long
        await asyncio.gather(*(keep(office, f"more-{first + number}") for number in range(250)))
    async with office.pool.acquire() as connection:
        letters, seen, cursor = operations(office, connection), list[StoredLetter](), None
        began = perf_counter()
        found = await letters.find(LetterFilter())
        whole = perf_counter() - began
        named = LetterFilter(ids=frozenset(stored.id for stored in found[-50:]))
        costs: dict[str, list[float]] = {"page": [], "named": []}
        for _ in range(3):  # something else may run for one
            began = perf_counter()
            page, *_ = await letters.page(LetterFilter(), limit=50)
            costs["page"].append(perf_counter() - began)
            began = perf_counter()
            assert await letters.find(named) == found[-50:]
            costs["named"].append(perf_counter() - began)
        assert max(min(times) for times in costs.values()) < whole / 4
        while True:
            page, cursor, _ = await letters.page(LetterFilter(), cursor=cursor, limit=500)
            seen += page
            if cursor is None:
                break
    assert seen == found
    assert len(found) == 3120


async def test_a_letter_of_a_subject_that_no_stream_has_asks_nothing_of_the_server(
    office: Any, dead: list[str]
) -> None:
    """Anybody who may write dead letters would have an operator do so."""
    purge = f"$JS.API.STREAM.PURGE.{office.stream}"
    await office.js.publish(f"{office.context}.event.order_placed.v1", b"{}")
    await keep(office, "forged", consumer="", subject=purge)
    await keep(office, "unheard", consumer="", subject=f"{office.context}.never.declared")
    await keep(office, "steering", consumer="", subject=f"{office.context}.never\nOK\x1b[2J")
    await keep(office, "driving", consumer="none\nOK\x1b[2J")
    found = await find(office)
    outcomes = await settle(office, found)
    failed = {
        str(stored.letter.message_id): str(outcome)
        for stored, outcome in zip(found, outcomes, strict=True)
        if isinstance(outcome, PostroomError) and stored.letter
    }
    assert failed.keys() == {"forged", "unheard", "steering", "driving"}
    assert all("no stream has" in failed[name] for name in ("forged", "unheard", "steering"))
    assert all(sentence.isprintable() for sentence in failed.values())
    assert len(await office.messages()) == len(dead) + 1
    assert await notes(office) == sorted(dead)


async def test_headers_that_no_client_may_send_are_left_out_of_a_replay(office: Any) -> None:
    """A server stores them from any publisher; those of the server's own stay out however they are written."""
    await office.add_stream()
    odd = ("two words", "größe", "a/b", "", " ", "line\r\nbreak", " Nats-Expected-Stream", "Nats-Rollup\t")
    await keep(office, "odd", consumer="", headers={"X-Said": "so\r\nit is", **dict.fromkeys(odd, "all")})
    assert await settle(office, await find(office)) == ["odd~.1"]
    (replayed,) = await office.messages()
    assert replayed.headers == {"X-Said": "so  it is", "Nats-Msg-Id": "odd~.1", "Postroom-Replay-Of": "odd"}


@pytest.mark.parametrize(
    ("odd", "refused"),
    [
        ({"consumer": "two words"}, "consumer_gone"),
        ({"consumer": "billing.sea"}, "consumer_gone"),
        ({"original_subject": "two words"}, "consumer_gone"),
        ({"payload": None, "payload_base64": "abc"}, "nothing_to_replay"),
        ({"headers": {"X-Long": "long" * 17_000}}, "nats_error"),
        ({"message_id": f"m~billing.{'9' * 5000}"}, None),
        ({"message_id": "a\0b"}, None),
    ],
)
async def test_a_letter_of_another_program_keeps_no_other_whatever_it_holds(
    office: Any, dead: list[str], odd: dict[str, object], refused: str | None
) -> None:
    await forge(office, {"message_id": "odd", **odd})
    found = await find(office)
    outcomes = await settle(office, found)
    failed = [outcome.problem.code for outcome in outcomes if isinstance(outcome, PostroomError)]
    assert failed == ([] if refused is None else [refused])
    assert len(await office.messages()) == len(dead) + (refused is None)


async def test_letters_without_an_id_of_another_program_are_replayed_as_messages_of_their_own(office: Any) -> None:
    await office.add_stream()
    await ensure_stream(office.js, dead_letter_stream(office.context))
    for number in range(2):
        await forge(office, {"message_id": None, "payload": str(number)})
    outcomes = await settle(office, await find(office))
    assert outcomes == await office.ids()
    assert [message.data for message in await office.messages()] == [b"0", b"1"]


async def forge(office: Any, odd: dict[str, object]) -> None:
    """Put a letter into the stream that none of our programs has written."""
    usual = {
        "original_subject": f"{office.context}.event.order_placed.v1",
        "payload": "{}",
        "reason": "x",
        "attempts": 1,
    }
    await office.js.publish(f"{office.context}.dlq.x", msgspec.json.encode({**usual, **odd}))


@pytest.mark.parametrize(
    "subject",
    [
        "{another}.event.order_placed.v1",
        "{another}.event.order.placed.v1",  # which none of our programs would build, but its stream takes
        "cmd.{another}.default.worker.run",
        "{own}.event.>",
        "{own}.event.*.v1",
    ],
)
async def test_a_forged_letter_is_not_replayed_into_another_mesh_or_to_a_pattern(office: Any, subject: str) -> None:
    """What has no row was written by anybody who may write into the stream, and is replayed as the broker."""
    another = f"other_{office.context}"
    await office.add_stream()
    await office.js.add_stream(name=another, subjects=[f"{another}.event.>", f"cmd.{another}.>"])
    await ensure_stream(office.js, dead_letter_stream(office.context))
    await forge(
        office, {"message_id": "forged", "original_subject": subject.format(own=office.context, another=another)}
    )
    (outcome,) = await settle(office, await find(office))
    assert isinstance(outcome, PostroomError)
    assert outcome.problem.code == "foreign_subject"
    assert [(await office.js.stream_info(name)).state.messages for name in (another, office.stream)] == [0, 0]


async def test_the_letter_of_a_consumer_of_another_mesh_is_replayed_to_it(office: Any) -> None:
    """It has a row, which only programs of ours with the database's rights write."""
    another = f"other_{office.context}"
    await office.js.add_stream(name=another, subjects=[f"{another}.event.>"])
    await office.js.add_consumer(another, durable_name="billing", ack_policy="explicit")
    letter = DeadLetter(
        message_id="m-1",
        original_subject=f"{another}.event.order_placed.v1",
        reason="poison",
        attempts=1,
        consumer="billing",
    )
    await RecordedLetters(office.pool, office.context).keep(letter.with_data(b"{}"))
    assert await settle(office, await find(office)) == ["m-1~billing.1"]
