"""`postroom dlq`: an operator sees, replays and drops what could not be handled, on a real JetStream and Postgres.

Each test runs on letters that the record has, as consumers keep them, and on letters that only the stream has, as those
of agents and of daemons.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from support.clocks import Ahead
from support.databases import ending_session, migrated_database
from support.jetstream import DURABLE, Context, Script
from support.operated import operated_broker
from support.terminal import Terminal

from broker.database import migrate
from embedded import EmbeddedNats, EmbeddedPostgres
from postroom import BrokerClient, NotFound
from postroom._wire.dead_letters import DEAD_LETTERS, DeadLetter, LetterFilter
from postroom.claims import DONE, Dead
from postroom.delivery.dead_letters import RecordedLetters
from postroom.delivery.dead_letters.operations import LetterOperations, count_letters
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

POISON = Dead("unprocessable", "the total is negative")


class Station:
    """A context with a user at a terminal; each piece of work has a connection of its own."""

    def __init__(self, url: str, database: str, broker: dict[str, str], *, recorded: bool) -> None:
        self.url = url
        self.database = database
        self.recorded = recorded
        self.name = self.work(self._declare)
        self.user = self.at(broker)

    def at(self, broker: dict[str, str]) -> Terminal:
        """An administrator at a broker."""
        return Terminal(POSTROOM_MESH=self.name, **broker)

    def work(self, work: Callable[[Context], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            connection = await connect(NatsSettings(url=self.url), name="test", patience=20)
            try:
                return await work(Context(connection, getattr(self, "name", None)))
            finally:
                await connection.close()

        with asyncio.Runner() as runner:
            return runner.run(run())

    def bury(self, *ids: str, reason: str = "unprocessable", subject: str | None = None) -> None:
        """Publish messages, and let the consumer find that they cannot be handled."""

        async def work(context: Context) -> None:
            await context.publish(ids, b'{"total":-1}', subject)
            async with open_pool(self.database) as pool:
                letters = RecordedLetters(pool, self.name) if self.recorded else None
                script = Script(lambda _: Dead(reason, "the total is negative"))
                async with context.consuming(script, dead_letters=letters):
                    await context.settled()

        self.work(work)

    def consume(self, durable: str = DURABLE) -> Script:
        """Let a consumer that was mended handle whatever there is."""
        script = Script(lambda _: DONE)

        async def work(context: Context) -> None:
            async with context.consuming(script, durable=durable):
                await context.settled(durable)

        self.work(work)
        return script

    def letters(self) -> list[dict[str, Any]]:
        return self.user.run("dlq", "list", "--json").json

    @staticmethod
    async def _declare(context: Context) -> str:
        await context.declare()
        return context.name


def open_pool(database: str) -> Any:
    return asyncpg.create_pool(database, min_size=1, max_size=2)


@pytest.fixture(scope="module")
def record(postgres_server: EmbeddedPostgres) -> str:
    """One migrated database for all these tests; each has a context of its own in it."""
    return migrated_database(postgres_server, "letters", migrate)


@pytest.fixture(scope="module")
def broker(session_directory: Path, nats_server: EmbeddedNats, record: str) -> Iterator[dict[str, str]]:
    """A broker on that database, which knows NATS."""
    with operated_broker(session_directory, record, NatsSettings(url=nats_server.url)) as reach:
        yield reach


@pytest.fixture
def without_nats(short_directory: Path, record: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """A broker on that database, where nobody listens at the address of NATS."""
    for module in ("administration", "dead_letters"):
        monkeypatch.setattr(f"broker.{module}.PATIENCE", 0.2)
    with operated_broker(short_directory, record, NatsSettings(url="nats://127.0.0.1:1")) as reach:
        yield reach


@pytest.fixture(params=["recorded", "streamed"])
def station(nats_url: str, record: str, broker: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Station]:
    station = Station(nats_url, record, broker, recorded=request.param == "recorded")
    yield station
    station.work(Context.remove)


def test_a_list_shows_why_each_died_and_never_a_payload(station: Station) -> None:
    station.bury("a", "b")
    shown = station.user.run("dlq", "list")
    assert shown.code == 0
    assert shown.out.count("unprocessable") == 2
    assert "the total is negative" in shown.out
    assert '{"total":-1}' not in shown.out
    assert [letter["message_id"] for letter in station.letters()] == ["a", "b"]
    assert all("payload" not in letter for letter in station.letters())


def test_a_context_without_dead_letters_has_an_empty_list(station: Station) -> None:
    assert station.user.run("dlq", "list").out == "no dead letters\n"


def test_a_context_whose_first_letter_is_still_to_come_has_an_empty_list(station: Station) -> None:
    """The stream of letters may be made with the first of them; any other stream shows that there is such a mesh."""
    station.work(lambda context: context.js.delete_stream(context.dlq))
    assert station.user.run("dlq", "list").out == "no dead letters\n"
    assert station.user.run("dlq", "log", "--json").code == 0
    station.work(lambda context: context.js.delete_stream(context.events))
    station.work(lambda context: context.js.delete_stream(f"{context.name}_INBOX".upper()))
    assert station.user.run("dlq", "list").out == "no dead letters\n"  # there are commands


@pytest.mark.parametrize(
    "arguments", [["list"], ["log"], ["inspect", "1"], ["drop", "--all", "--dry-run"]], ids=" ".join
)
def test_a_mesh_that_nobody_knows_is_exit_code_3_and_no_good_news(station: Station, arguments: list[str]) -> None:
    outcome = station.user.run("dlq", *arguments, "--mesh", "unheard_of")
    assert outcome.code == 3
    assert "'unheard_of'" in outcome.sentence()
    assert "postroom mesh list" in outcome.sentence()
    assert outcome.out == ""


def test_filters_narrow_a_list(station: Station) -> None:
    station.bury("a")
    between = datetime.now(UTC).isoformat()
    station.bury("b", reason="max_deliver", subject=f"{station.name}.event.order_cancelled.v2")
    for option, value, ids in (
        ("--code", "max_deliver", ["b"]),
        ("--subject", f"{station.name}.event.order_placed.*", ["a"]),
        ("--consumer", DURABLE, ["a", "b"]),
        ("--consumer", "another", []),
        ("--older-than", "1h", []),
        ("--older-than", "2026-01-31T12:00:00Z", []),
        ("--older-than", between, ["a"]),
        ("--older-than", "0s", ["a", "b"]),
    ):
        found = station.user.run("dlq", "list", "--json", option, value)
        assert [letter["message_id"] for letter in found.json] == ids, option


def test_the_age_of_a_letter_is_counted_by_the_clock_of_postgres(
    station: Station, monkeypatch: pytest.MonkeyPatch
) -> None:
    station.bury("a")
    monkeypatch.setattr("postroom.delivery.dead_letters.operations.datetime", Ahead)
    dropped = station.user.run("dlq", "drop", "--all", "--older-than", "1h", "--reason", "old", "--yes")
    assert (dropped.code, dropped.out) == (0, "0 dropped, 0 failed\n")


def test_inspect_shows_a_letter_whole(station: Station) -> None:
    station.bury("a")
    said = station.user.run("dlq", "inspect", "a").out
    assert '{"Nats-Msg-Id":"a"' in said
    (letter,) = station.user.run("dlq", "inspect", "a", "--json").json
    assert letter["payload"] == '{"total":-1}'
    assert letter["headers"]["Nats-Msg-Id"] == "a"
    assert (letter["stream"], letter["sequence"], letter["tenant"]) == (
        f"{station.name}_EVENTS".upper(),
        1,
        station.name,
    )
    assert "the total is negative" in station.user.run("dlq", "inspect", letter["id"]).out


def test_inspect_of_an_unknown_letter_is_exit_code_3(station: Station) -> None:
    outcome = station.user.run("dlq", "inspect", "nobody")
    assert outcome.code == 3
    assert "postroom dlq list" in outcome.sentence()


def test_a_replay_after_a_fix_is_processed_once_under_a_fresh_id(station: Station) -> None:
    station.bury("a", "b")
    outcome = station.user.run("dlq", "replay", "--all", "--yes", "--reason", "mended", "--json")
    assert outcome.code == 0, outcome.err
    assert [settled["new_message_id"] for settled in outcome.json] == [f"a~{DURABLE}.1", f"b~{DURABLE}.1"]
    mended = station.consume()
    assert sorted(mended.ids()) == [f"a~{DURABLE}.1", f"b~{DURABLE}.1"]
    assert {delivery.headers["Postroom-Replay-Of"] for delivery in mended.seen} == {"a", "b"}
    assert {delivery.data for delivery in mended.seen} == {b'{"total":-1}'}
    assert station.letters() == []


def test_a_letter_that_was_settled_meanwhile_keeps_no_other(station: Station) -> None:
    station.bury("a", "b", "c")
    station.user.run("dlq", "drop", "a", "--yes", "--reason", "another operator")
    dropped = station.user.run("dlq", "drop", "a", "b", "c", "--yes", "--reason", "a test")
    assert (dropped.code, dropped.out) == (1, "2 dropped, 1 failed\n")
    assert "a: the dead letter 'a' was dropped by administrator on 20" in dropped.err
    assert station.letters() == []


@pytest.mark.parametrize(("verb", "done"), [("replay", "replayed"), ("drop", "dropped")])
def test_a_letter_that_another_operator_settled_is_refused_with_what_was_done_when_and_by_whom(
    station: Station, verb: str, done: str
) -> None:
    station.bury("a")
    (letter,) = station.letters()
    other = station.user.run("dlq", verb, "a", "--yes", "--reason", "another operator")
    assert other.code == 0
    for name in "a", letter["id"]:
        for late in "replay", "drop":
            refused = station.user.run("dlq", late, name, "--yes", "--reason", "too late")
            assert refused.code == 3
            said = refused.sentence()
            assert said.startswith(f"the dead letter {name!r} was {done} by administrator on 20")
            assert said.endswith(": see `postroom dlq log`")
    unknown = station.user.run("dlq", "drop", "b", "--yes", "--reason", "a test")
    assert (unknown.code, "there is no dead letter 'b'" in unknown.sentence()) == (3, True)


def test_a_letter_that_another_operator_settles_during_a_request_is_refused_with_what_was_done(
    station: Station,
) -> None:
    station.bury("a")

    async def late(context: Context) -> object:
        async with open_pool(station.database) as pool, pool.acquire() as connection:
            letters = LetterOperations(connection, context.js, station.name, actor="zoe")
            found = await letters.find(LetterFilter())
            dropped = await asyncio.to_thread(station.user.run, "dlq", "drop", "a", "--yes", "--reason", "first")
            assert dropped.code == 0
            (outcome,) = (await letters.settle("drop", found, why="second")).values()
            return outcome

    refused = station.work(late)
    assert isinstance(refused, NotFound)
    assert "was dropped by administrator on 20" in str(refused)


@pytest.mark.parametrize(("verb", "done"), [("replay", "replayed"), ("drop", "dropped")])
def test_of_letters_that_a_postgres_which_fails_left_the_others_are_said_to_be_settled(
    station: Station, monkeypatch: pytest.MonkeyPatch, verb: str, done: str
) -> None:
    monkeypatch.setattr("broker.dead_letters.TOGETHER", 1)
    station.bury("a", "b", "c")
    _, second, third = (letter["id"] for letter in station.letters())
    asked = ("dlq", verb, "--all", "--reason", "fixed", "--yes")
    with ending_session(station.database, f"{station.name} {second}"):
        cut_off = station.user.run(*asked)
    assert (cut_off.code, cut_off.out) == (1, f"1 {done}, 2 failed\n")
    assert [text.partition(": ")[0] for text in cut_off.err.splitlines() if "cannot reach its database" in text] == [
        second,
        third,
    ]
    assert [letter["id"] for letter in station.letters()] == [second, third]

    assert station.user.run(*asked).out == f"2 {done}, 0 failed\n"
    assert [note["message_id"] for note in station.user.run("dlq", "log", "--json").json] == ["a", "b", "c"]


def test_a_second_replay_finds_nothing_to_send(station: Station) -> None:
    station.bury("a")
    (letter,) = station.letters()
    assert station.user.run("dlq", "replay", letter["id"], "--yes", "--reason", "mended").code == 0
    assert station.user.run("dlq", "replay", letter["id"], "--yes", "--reason", "mended").code == 3
    assert len(station.consume().seen) == 1


def test_a_replay_is_not_handled_by_the_other_consumers_of_the_stream(station: Station) -> None:
    station.bury("a")
    assert station.consume("another").ids() == ["a"]
    station.user.run("dlq", "replay", "a", "--yes", "--reason", "mended")
    assert station.consume("another").ids() == []
    assert station.consume().ids() == [f"a~{DURABLE}.1"]


def test_a_message_that_dies_again_can_be_replayed_again(station: Station) -> None:
    station.bury("a")
    (first,) = station.letters()
    station.user.run("dlq", "replay", "a", "--yes", "--reason", "mended")
    station.bury()
    (letter,) = station.letters()
    assert letter["message_id"] == f"a~{DURABLE}.1"
    station.user.run("dlq", "replay", letter["message_id"], "--yes", "--reason", "mended better")
    (again,) = station.consume().seen
    assert again.message_id == f"a~{DURABLE}.2"
    assert again.occurred_at == datetime.fromisoformat(first["published_at"])  # and not when it was replayed
    assert again.headers["Postroom-Replay-Of"] == "a"  # what inboxes may know it by: the id it was first sent under


def test_what_dies_again_while_all_letters_are_replayed_is_not_replayed_once_more(
    station: Station, broker: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("broker.dead_letters.CHANGES", 1)
    station.bury("a", "b")

    async def replay() -> list[str | None]:
        token = Path(broker["POSTROOM_ADMIN_TOKEN_FILE"]).read_text()
        async with BrokerClient(broker["POSTROOM_BROKER_URL"], token) as client:
            replayed: list[str | None] = []
            how = {"reason": "fixed, or so it seemed", "mesh": station.name}
            async for part in client.changes(DEAD_LETTERS, "replay", LetterFilter(), **how):
                replayed += [one.letter.message_id for one in part.done if one.letter]
                if len(replayed) > len("ab"):
                    break  # it would go on for ever
                await asyncio.to_thread(station.bury)
            return replayed

    assert asyncio.run(replay()) == ["a", "b"]
    assert [letter["message_id"] for letter in station.letters()] == [f"{one}~{DURABLE}.1" for one in ("a", "b")]


def test_a_replay_whose_consumer_is_gone_is_refused_and_keeps_the_letter(station: Station) -> None:
    """Every other consumer would let it pass, and acknowledge it."""
    station.bury("a")
    station.work(lambda context: context.js.delete_consumer(context.events, DURABLE))
    outcome = station.user.run("dlq", "replay", "a", "--yes", "--reason", "mended")
    assert outcome.code == 4
    assert DURABLE in outcome.err
    assert len(station.letters()) == 1
    assert station.consume().ids() == ["a"]  # made anew, it gets what the stream holds


def test_a_letter_that_names_no_consumer_is_replayed_to_all(station: Station) -> None:
    async def write(context: Context) -> None:
        await context.js.publish(
            f"{context.name}.dlq.order_placed.v1",
            b'{"message_id":"z","original_subject":"%s","reason":"poison","attempts":1,"payload":"{}"}'
            % context.subject.encode(),
        )

    station.work(write)
    assert station.user.run("dlq", "replay", "z", "--yes", "--reason", "mended").code == 0
    assert station.consume().ids() == ["z~.1"]


def test_a_dry_run_sends_and_removes_nothing(station: Station) -> None:
    station.bury("a")
    assert station.user.run("dlq", "replay", "--all", "--dry-run").out == "1 would be replayed, 0 failed\n"
    assert station.user.run("dlq", "drop", "--all", "--dry-run").out == "1 would be dropped, 0 failed\n"
    assert len(station.letters()) == 1
    assert station.consume().seen == []


def test_a_dropped_letter_is_gone_and_the_log_says_why(station: Station) -> None:
    station.bury("a", "b")
    assert station.user.run("dlq", "drop", "a", "--yes", "--reason", "a test order").out == "1 dropped, 0 failed\n"
    assert [letter["message_id"] for letter in station.letters()] == ["b"]
    station.user.run("dlq", "replay", "b", "--yes", "--reason", "mended")
    notes = station.user.run("dlq", "log", "--json").json
    assert [(note["act"], note["message_id"], note["why"]) for note in notes] == [
        ("dropped", "a", "a test order"),
        ("replayed", "b", "mended"),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["replay", "--reason", "x"],
        ["replay", "a", "--all", "--reason", "x"],
        ["replay", "a", "--code", "max_deliver", "--reason", "x"],
        ["drop", "a", "--yes"],
        ["drop", "a", "--reason", "x"],
        ["inspect"],
    ],
    ids=" ".join,
)
def test_what_is_not_said_clearly_is_a_usage_error_and_changes_nothing(station: Station, arguments: list[str]) -> None:
    station.bury("a")
    outcome = station.user.run("dlq", *arguments)
    assert outcome.code == 2
    assert outcome.sentence()
    assert len(station.letters()) == 1


def test_what_another_program_wrote_can_be_seen_and_dropped_but_not_replayed(station: Station) -> None:
    async def write(context: Context) -> None:
        await context.js.publish(f"{context.name}.dlq.vibe_created.v1", b"what is this")
        await context.js.publish(
            f"{context.name}.dlq.vibe_created.v1",
            b'{"message_id":"z","original_subject":"x.event.y.v1","reason":"poison","attempts":1}',
        )

    station.work(write)
    assert [letter.get("message_id") for letter in station.letters()] == [None, "z"]
    first = station.letters()[0]["id"]
    refused = station.user.run("dlq", "replay", first, "z", "--yes", "--reason", "x")
    assert refused.code == 1
    assert refused.err.count("has no payload") == 2
    assert station.user.run("dlq", "drop", first, "z", "--yes", "--reason", "x").code == 0
    assert station.letters() == []
    notes = station.user.run("dlq", "log", "--json").json
    assert [(note.get("message_id"), note["reason"]) for note in notes] == [
        (None, "not_a_dead_letter"),
        ("z", "poison"),
    ]


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"reason":' + b'{"a":' * 100_000, b'{"message_id":7}', b"\xff", b""]
)
def test_whatever_lies_in_the_stream_of_letters_is_listed_and_can_be_dropped(station: Station, body: bytes) -> None:
    station.bury("a")
    station.work(lambda context: context.js.publish(f"{context.name}.dlq.x.v1", body, headers={"Nats-Msg-Id": "\x01"}))
    assert "not a dead letter" in station.user.run("dlq", "list").out
    letter, stranger = station.letters()
    assert letter["message_id"] == "a"
    assert station.user.run("dlq", "inspect", stranger["id"]).code == 0
    assert station.user.run("dlq", "drop", "--all", "--yes", "--reason", "x").out == "2 dropped, 0 failed\n"
    assert station.letters() == []


@pytest.mark.parametrize("station", ["streamed"], indirect=True)
def test_what_was_settled_stays_so_though_its_stream_is_filled_again(station: Station) -> None:
    """As an agent does, which hears nothing of what operators do, after its stream was lost."""
    station.bury("a", "b")
    station.user.run("dlq", "replay", "a", "--yes", "--reason", "mended")
    station.user.run("dlq", "drop", "b", "--yes", "--reason", "a test order")

    async def fill_again(context: Context) -> None:
        letters = await context.stored(context.dlq)
        for letter in letters:
            headers = {**(letter.headers or {}), "Postroom-Epoch": "1"}
            headers["Nats-Msg-Id"] += "/1"
            await context.js.publish(letter.subject or "", letter.data or b"", headers=headers)

    station.work(fill_again)
    assert station.letters() == []
    assert len(station.user.run("dlq", "log", "--json").json) == 2


def test_a_letter_that_is_kept_in_another_database_is_settled_there(station: Station) -> None:
    async def write(context: Context) -> None:
        headers = {"Nats-Msg-Id": "dead:billing:m", "Postroom-Recorded": "postgres"}
        letter = DeadLetter(
            message_id="m", original_subject="x", reason="poison", attempts=1, consumer="billing", payload=""
        )
        await context.js.publish(f"{context.name}.dlq.x.v1", msgspec.json.encode(letter), headers=headers)

    station.work(write)
    for verb in ("drop", "replay"):
        outcome = station.user.run("dlq", verb, "m", "--yes", "--reason", "x")
        assert outcome.code == 4
        assert "POSTROOM_BROKER_URL" in outcome.err
        assert "billing" in outcome.err
    assert len(station.letters()) == 1


@pytest.mark.parametrize("station", ["recorded"], indirect=True)
def test_without_nats_what_the_record_has_is_shown_and_can_be_dropped(
    station: Station, without_nats: dict[str, str]
) -> None:
    station.bury("a", "b")
    user = station.at(without_nats)
    shown = user.run("dlq", "list", "--json")
    assert [letter["message_id"] for letter in shown.json] == ["a", "b"]
    assert shown.code == 69
    assert "JetStream does not answer" in shown.err
    assert user.run("dlq", "drop", "a", "--yes", "--reason", "x").code == 0
    for arguments in (["replay", "b"], ["drop", "unknown"], ["inspect", "unknown"]):
        options = [] if arguments[0] == "inspect" else ["--yes", "--reason", "x"]
        assert user.run("dlq", *arguments, *options).code == 69, arguments
    assert [letter["message_id"] for letter in station.letters()] == ["b"]
    assert user.run("dlq", "drop", "--all", "--yes", "--reason", "x").code == 69  # there may be more
    assert station.letters() == []


def test_without_nats_it_says_so(station: Station, without_nats: dict[str, str]) -> None:
    outcome = station.at(without_nats).run("dlq", "list")
    assert outcome.code == 69
    assert "JetStream does not answer" in outcome.sentence()
    assert outcome.out == ""


def test_a_mesh_with_letters_is_not_deleted_nor_one_that_may_have_some(
    station: Station, without_nats: dict[str, str]
) -> None:
    station.user.run("mesh", "create", station.name)
    station.bury("a")
    refused = station.user.run("mesh", "delete", station.name, "--yes")
    assert refused.code == 4
    assert f"postroom dlq list --mesh {station.name}" in refused.sentence()
    assert station.user.run("dlq", "drop", "--all", "--yes", "--reason", "a test").code == 0
    refused = station.at(without_nats).run("mesh", "delete", station.name, "--yes")
    assert refused.code == 69
    assert "JetStream does not answer" in refused.sentence()
    assert station.user.run("mesh", "delete", station.name, "--yes").code == 0


def test_a_broker_that_knows_no_nats_shows_the_record_and_says_that_there_may_be_more(
    station: Station, record: str, short_directory: Path
) -> None:
    station.bury("a")
    with operated_broker(short_directory, record) as reach:
        if not station.recorded:
            assert station.at(reach).run("dlq", "list").code == 3  # no mesh, and no letter that it could know
            assert station.at(reach).run("mesh", "create", station.name).code == 0
        shown = station.at(reach).run("dlq", "list", "--json")
        assert [letter["message_id"] for letter in shown.json] == (["a"] if station.recorded else [])
        assert shown.code == 0
        assert "nats.url" in shown.err
        assert station.at(reach).run("dlq", "replay", "--all", "--reason", "x", "--yes").code == 69


def test_without_an_address_a_token_or_a_mesh_it_says_what_to_set(station: Station, broker: dict[str, str]) -> None:
    nowhere = Terminal(POSTROOM_MESH=station.name, POSTROOM_DATABASE_URL=station.database)
    assert "POSTROOM_BROKER_URL" in nowhere.run("dlq", "list").sentence()
    nobody = Terminal(POSTROOM_MESH=station.name, POSTROOM_BROKER_URL=broker["POSTROOM_BROKER_URL"])
    assert "POSTROOM_ADMIN_TOKEN_FILE" in nobody.run("dlq", "list").sentence()
    assert "POSTROOM_MESH" in Terminal(**broker).run("dlq", "list").sentence()


def test_a_list_longer_than_a_page_is_whole_and_in_order(station: Station, monkeypatch: pytest.MonkeyPatch) -> None:
    station.bury(*"abcde")
    monkeypatch.setattr("cli.dead_letters.CHANGES", 2)
    assert [letter["message_id"] for letter in station.letters()] == list("abcde")


def test_what_was_done_is_kept_with_who_the_token_says_in_the_transaction_of_the_change(station: Station) -> None:
    station.bury("a", "b")
    (first, _) = station.letters()
    station.user.run("dlq", "drop", "a", "--yes", "--reason", "a test order")
    station.user.run("dlq", "replay", "--all", "--yes", "--reason", "mended")

    async def logged(_: Context) -> list[tuple[str, ...]]:
        async with open_pool(station.database) as pool:
            rows = await pool.fetch(
                "SELECT actor, verb, noun, key, outcome, reason FROM mesh.operator_log WHERE key LIKE $1 ORDER BY id",
                f"{station.name} %",
            )
            return [tuple(row) for row in rows]

    dropped, replayed = station.work(logged)
    assert dropped == (
        "administrator", "drop", "dead letter", f"{station.name} {first['id']}", "dropped", "a test order"
    )  # fmt: skip
    assert (replayed[1], replayed[4], replayed[5]) == ("replay", "replayed", "mended")
    assert {note["actor"] for note in station.user.run("dlq", "log", "--json").json} == {"administrator"}


def test_what_is_counted_for_the_status_are_letters_and_no_notes(station: Station) -> None:
    station.bury("a", "b", "c")
    station.user.run("dlq", "drop", "a", "--reason", "a test", "--yes")

    async def count(context: Context) -> int:
        async with open_pool(station.database) as pool, pool.acquire() as connection:
            return (await count_letters(connection, context.js))[context.dlq]

    assert station.work(count) == 2
