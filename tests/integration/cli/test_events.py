"""`postroom worker events`: an operator sees what fails to be published, and drops it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from uuid import UUID

import asyncpg
import pytest
from aiohttp import web
from support.clocks import Ahead
from support.operated import operated_broker
from support.terminal import Terminal

from broker.database import migrate


@pytest.fixture
def poison(database_url: str) -> str:
    """An event that fails to be published, with another behind it."""

    async def emit() -> str:
        await migrate(database_url)
        connection = await asyncpg.connect(database_url)
        await connection.execute("INSERT INTO mesh.mesh (slug) VALUES ('demo')")
        one, _ = [
            await connection.fetchval("SELECT postroom.emit('demo', 'order', 'a', 'placed', '{\"pin\": 1234}')::text")
            for _ in range(2)
        ]
        await connection.execute(
            "UPDATE postroom.outbox_events SET publish_attempts = 3, publish_error = 'too large' WHERE id = $1::uuid",
            one,
        )
        await connection.close()
        return str(one)

    return asyncio.run(emit())


@pytest.fixture
def user(database_url: str, poison: str, short_directory: Path) -> Iterator[Terminal]:
    """The administrator of a broker on that database."""
    assert poison
    with operated_broker(short_directory, database_url) as reach:
        yield Terminal(**reach)


def test_a_failing_event_is_listed_without_its_payload_and_dropped_with_a_reason(user: Terminal, poison: str) -> None:
    (row,) = user.run("worker", "events", "list", "--json").json
    assert (row["id"], row["attempts"], row["error"], row["behind"]) == (poison, 3, "too large", 1)
    assert "1234" not in user.run("worker", "events", "list").out

    assert user.run("worker", "events", "drop", poison, "--reason", "a test", "--yes").out == f"{poison} dropped\n"
    assert user.run("worker", "events", "list", "--json").json == []
    (noted,) = user.run("worker", "events", "log", "--json").json
    assert (noted["id"], noted["reason"]) == (poison, "a test")


def test_who_dropped_an_event_is_who_the_token_says_and_its_line_in_the_log_commits_with_it(
    user: Terminal, poison: str, database_url: str
) -> None:
    user.environment.update(LOGNAME="ceo", USER="ceo", LNAME="ceo", USERNAME="ceo")
    assert user.run("worker", "events", "drop", poison, "--reason", "a test", "--yes").code == 0
    (noted,) = user.run("worker", "events", "log", "--json").json
    assert noted["dropped_by"] == "administrator"
    (line,) = asyncio.run(fetch(database_url, "SELECT actor, verb, noun, key, outcome, reason FROM mesh.operator_log"))
    assert tuple(line) == ("administrator", "drop", "event", poison, "dropped", "a test")


def test_a_redrive_needs_a_reason_and_its_line_in_the_log_says_how_much_it_was_and_whose(
    user: Terminal, poison: str, database_url: str
) -> None:
    published = (
        "UPDATE postroom.outbox_events SET stream = 'DEMO_EVENTS', stream_created_at = now(), stream_sequence = 7, "
        "published_at = now() WHERE publish_attempts = 0"
    )
    asyncio.run(fetch(database_url, published))
    assert poison
    since = ("worker", "redrive", "--since", "2000-01-01")
    assert "--reason" in user.run(*since, "--yes").sentence()
    unknown = user.run(*since, "--stream", "demo", "--dry-run")
    sentence = "nothing is recorded as published into a stream 'demo': give its whole name, as in DEMO_EVENTS"
    assert (unknown.code, unknown.out, unknown.sentence()) == (3, "", sentence)
    for name in ("demo_events", "DEMO_EVENT", "_EVENTS", "Demo_EVENTS"):
        assert user.run(*since, "--stream", name, "--dry-run").code == 3
    unused = user.run(*since, "--stream", "DEMO_COMMANDS", "--dry-run")
    assert unused.code == 0
    assert all(line.endswith(": 0 would be published again") for line in unused.out.splitlines())
    would = user.run(*since, "--dry-run").out.splitlines()
    assert would == [
        "events: 1 would be published again",
        "deliveries: 0 would be published again",
        "letters: 0 would be published again",
        "replays: 0 would be published again",
    ]
    (waits, *_) = user.run("worker", "backlog", "--json").json
    assert (waits["source"], waits["count"], waits["failing"]) == ("events", 1, 1)
    user.environment.update(LOGNAME="ceo", USER="ceo", LNAME="ceo", USERNAME="ceo")
    done = user.run(*since, "--stream", "DEMO_EVENTS", "--reason", "an older copy", "--yes", "--json")
    counts = {"events": 1, "deliveries": 0, "letters": 0, "replays": 0}
    assert done.json == [{"source": source, "messages": count} for source, count in counts.items()]
    (logged,) = user.run("log", "--json").json
    assert (logged["actor"], logged["verb"], logged["noun"]) == ("administrator", "redrive", "source")
    assert logged["reason"] == "an older copy"
    assert logged["key"] == "published into DEMO_EVENTS since 2000-01-01T00:00:00+00:00"
    assert logged["outcome"] == "published again: events 1, deliveries 0, letters 0, replays 0"
    (waits, *_) = user.run("worker", "backlog", "--json").json
    assert waits["count"] == 2


def test_how_long_ago_a_redrive_begins_is_counted_by_the_clock_of_postgres(
    user: Terminal, poison: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = (
        "UPDATE postroom.outbox_events SET stream = 'DEMO_EVENTS', stream_created_at = now(), stream_sequence = 7, "
        "published_at = now() WHERE publish_attempts = 0 RETURNING now() - interval '1 hour'"
    )
    ((an_hour_before,),) = asyncio.run(fetch(database_url, published))
    assert poison
    monkeypatch.setattr("cli.noun.datetime", Ahead)
    done = user.run("worker", "redrive", "--since", "1h", "--reason", "a lost stream", "--yes")
    assert done.out.startswith("events: 1 published again\n")
    (logged,) = user.run("log", "--since", "1h", "--json").json
    begun = datetime.fromisoformat(logged["key"].removeprefix("published into any stream since "))
    assert an_hour_before - timedelta(minutes=1) < begun < an_hour_before + timedelta(minutes=1)


async def fetch(database_url: str, query: str) -> list[asyncpg.Record]:
    connection = await asyncpg.connect(database_url)
    try:
        return await connection.fetch(query)
    finally:
        await connection.close()


def test_a_database_instead_of_a_broker_is_told_what_to_set(poison: str, database_url: str) -> None:
    assert poison
    done = Terminal(POSTROOM_DATABASE_URL=database_url).run("worker", "events", "list")
    assert (done.code, "POSTROOM_BROKER_URL" in done.sentence()) == (2, True)


def test_an_event_that_does_not_fail_is_not_found(user: Terminal, poison: str) -> None:
    done = user.run("worker", "events", "drop", poison[:-1], "--reason", "a test", "--yes")
    assert (done.code, "is not among the failing events" in done.err) == (3, True)
    assert [one["id"] for one in user.run("worker", "events", "list", "--json").json] == [poison]


def test_what_does_not_fail_keeps_no_other_event_from_being_dropped(user: Terminal, poison: str) -> None:
    named = ("worker", "events", "drop", poison, "no id at all", str(UUID(int=7)))
    for options, said in (("--dry-run",), "would be dropped"), (("--reason", "a test", "--yes"), "dropped"):
        done = user.run(*named, *options)
        assert (done.code, done.out) == (1, f"{poison} {said}\n")
        assert done.err.count("is not among the failing events: see `postroom worker events list`") == 2
    again = user.run("worker", "events", "drop", poison, "--reason", "another operator", "--yes")
    assert again.code == 3
    assert again.sentence().startswith(f"{poison!r} was dropped by administrator on 20")
    assert again.sentence().endswith(": see `postroom worker events log`")
    assert user.run("worker", "events", "list", "--json").json == []


def test_without_ids_nothing_is_dropped(user: Terminal, poison: str) -> None:
    assert poison
    assert user.run("worker", "events", "drop", "--reason", "a test", "--yes").code == 2


def test_all_that_fail_are_dropped_by_filters_after_a_dry_run(user: Terminal, poison: str) -> None:
    drop = ("worker", "events", "drop", "--all")
    assert user.run(*drop, "--mesh", "elsewhere", "--dry-run").out == ""
    assert user.run(*drop, "--older-than", "1h", "--dry-run").out == ""
    assert user.run(*drop, "--older-than", "2026-01-31T12:00:00Z", "--dry-run").out == ""
    assert user.run(*drop, "--mesh", "demo", "--dry-run").out == f"{poison} would be dropped\n"
    assert [one["id"] for one in user.run("worker", "events", "list", "--json").json] == [poison]
    asked = user.run(*drop, "--reason", "a test")
    assert (asked.code, "Drop 1 of 1 event?" in asked.err) == (2, True)
    confirmed = ("--reason", "a test", "--yes", "--json")
    assert user.run(*drop, "--subject", "demo.event.refunded.v1", *confirmed).json == []
    done = user.run(*drop, "--subject", "demo.event.placed.v1", *confirmed)
    assert done.json == [{"id": poison, "done": "drop"}]


def test_what_is_dropped_by_filters_is_all_of_it_however_much_that_is(user: Terminal, database_url: str) -> None:
    many = """
        INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, payload, subject,
          publish_attempts, publish_error)
        SELECT gen_random_uuid(), 'order', n::text, 'placed', '{}', 'demo.event.placed.v1', 1, 'too large'
        FROM generate_series(1, 2500) AS n
    """
    asyncio.run(fetch(database_url, many))
    found = asyncio.run(fetch(database_url, "SELECT id::text FROM postroom.outbox_events WHERE publish_error > ''"))
    listed = user.run("worker", "events", "list", "--json")
    assert (len(found), len(listed.json), "the oldest" in listed.err) == (2501, 1000, True)
    listed = sorted({row["id"] for row in found})
    named = user.run("worker", "events", "drop", *listed[-2:], "--dry-run")
    assert (named.code, named.out.splitlines()) == (0, [f"{one} would be dropped" for one in listed[-2:]])
    done = user.run("worker", "events", "drop", "--all", "--reason", "a test", "--yes", "--json")
    assert (done.code, {one["id"] for one in done.json}) == (0, {*listed})
    assert user.run("worker", "events", "list", "--json").json == []


async def test_a_redrive_that_is_interrupted_says_how_far_it_was(short_directory: Path) -> None:
    hangs, over = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if asked.get("cursor") is not None:
            hangs.set()
            await over.wait()
        dry = asked.get("dry_run", False)
        done = [{"source": "events", "messages": 6000 if dry else 5000}]
        return web.json_response({"dry_run": dry, "done": done, "failed": [], "next_cursor": None if dry else "more"})

    async def know(_: web.Request) -> web.StreamResponse:
        return web.json_response({"actor": "administrator", "role": "administer", "mesh": None})

    app = web.Application()
    app.router.add_get("/v1/whoami", know)
    app.router.add_post("/v1/sources/redrive", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    (token := short_directory / "token").write_text("t" * 43)
    token.chmod(0o600)
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        user = Terminal(POSTROOM_BROKER_URL=url, POSTROOM_ADMIN_TOKEN_FILE=str(token))
        process = user.start("worker", "redrive", "--since", "1h", "--reason", "a lost stream", "--yes")
        await hangs.wait()
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.to_thread(process.communicate)
    finally:
        over.set()
        await runner.cleanup()
    assert process.returncode == 130
    assert said.decode().startswith("at least 5,000 of 6,000 messages are published again: repeat the command")
