"""`postroom outbox install` in an application's own Postgres, and an operator's verbs there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import asyncpg
import pytest
from support.applications import application_database, as_role, fetch, owner_of, role_of
from support.terminal import Outcome, Terminal

from broker.database import migrate
from embedded import EmbeddedPostgres
from postroom.chassis.ownership import this_user

EMIT = "SELECT postroom.emit($1, 'order', $2, 'order_placed', '{\"pin\": 1234}')::text"


@pytest.fixture
async def shop(postgres_server: EmbeddedPostgres) -> AsyncIterator[str]:
    async with application_database(postgres_server, "demo") as url:
        yield url


async def run(*words: str, **environment: str) -> Outcome:
    """Run a command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(Terminal(**environment).run, *words)


async def install(url: str, *words: str) -> Outcome:
    return await run("outbox", "install", "--database", url, *words)


async def test_an_outbox_is_installed_and_a_second_time_nothing_changes(database_url: str) -> None:
    first = await install(database_url, "--mesh", "demo", "--json")
    assert (first.code, first.json) == (
        0,
        [{"applied": ["delivery/0001_delivery", "applications/0001_applications"], "roles": [], "meshes": ["demo"]}],
    )
    id_ = await fetch(database_url, EMIT, "demo", "one")
    again = await run("outbox", "install", POSTROOM_OUTBOX_DATABASE_URL=database_url)
    assert (again.code, again.out) == (0, "the outbox is up to date\n")
    assert await fetch(database_url, "SELECT id::text FROM postroom.outbox_events") == id_
    assert await fetch(database_url, "SELECT count(*) FROM postroom_once.idempotency_keys") == 0


async def test_installations_at_once_do_it_once(database_url: str) -> None:
    outcomes = await asyncio.gather(*(
        asyncio.to_thread(Terminal().process, "outbox", "install", "--database", database_url, "--json")
        for _ in range(3)
    ))  # fmt: skip
    assert [each.code for each in outcomes] == [0, 0, 0]
    applied = [name for each in outcomes for name in each.json[0]["applied"]]
    assert sorted(applied) == ["applications/0001_applications", "delivery/0001_delivery"]


@pytest.mark.parametrize("mesh", ["demo", "shop"])
async def test_only_meshes_that_the_installation_named_may_be_emitted_to(shop: str, mesh: str) -> None:
    if mesh == "demo":
        assert await fetch(shop, EMIT, mesh, "one")
        assert await fetch(shop, "SELECT postroom.emit_command($1, 'work', '{}')", mesh)
        return
    for statement in (EMIT, "SELECT postroom.emit_command($1, $2, '{}')::text"):
        with pytest.raises(asyncpg.ForeignKeyViolationError, match=r"UNKNOWN_MESH: .*\(postroom mesh create shop\)"):
            await fetch(shop, statement, mesh, "one")


FORBIDDEN = (
    "SELECT * FROM postroom.outbox_events",
    "UPDATE postroom.outbox_events SET published_at = now()",
    "DELETE FROM postroom.outbox_events",
    "INSERT INTO postroom.outbox_events (id, published_at) VALUES (gen_random_uuid(), now())",
    "SELECT postroom.emit_again(gen_random_uuid())",
    "INSERT INTO postroom.known_meshes VALUES ('shop')",
    "SELECT * FROM postroom.dropped_events",
    "SELECT * FROM postroom.inbox_messages",
    "SELECT * FROM postroom.operator_log",
    "SELECT * FROM postroom_once.idempotency_keys",
    "SELECT * FROM postroom.dead_letters",
    "CREATE TABLE postroom.mine ()",
)


@pytest.mark.parametrize("statement", FORBIDDEN)
async def test_a_role_that_may_emit_may_do_nothing_else_there(shop: str, statement: str) -> None:
    assert await fetch(shop, EMIT, "demo", "one")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await fetch(shop, statement)


async def test_a_role_that_was_not_named_may_not_even_emit(shop: str, postgres_server: EmbeddedPostgres) -> None:
    async with application_database(postgres_server) as other:
        stranger = as_role(owner_of(shop), role_of(other))
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await fetch(stranger, EMIT, "demo", "one")


async def test_what_cannot_be_installed_is_refused_with_what_to_do(
    shop: str, database_url: str, tmp_path: Path
) -> None:
    without = await run("outbox", "install")
    assert (without.code, without.sentence()) == (
        2, "name the application's database: --database, or POSTROOM_OUTBOX_DATABASE_URL"
    )  # fmt: skip
    away = await install(f"postgresql:///shop?host={tmp_path}")
    assert (away.code, "cannot open the database" in away.sentence()) == (69, True)
    no_role = await install(database_url, "--role", "nobody here")
    assert (no_role.code, no_role.sentence()) == (
        78, "there is no role nobody here in this Postgres: create it first (CREATE ROLE)"
    )  # fmt: skip
    assert await fetch(database_url, "SELECT to_regnamespace('postroom')") is None
    misspelt = await install(database_url, "--mesh", "Not One")
    assert (misspelt.code, "Not One" in misspelt.err) == (2, True)
    not_owner = await install(as_role(database_url, role_of(shop)))
    assert (not_owner.code, "lacks the permission" in not_owner.sentence()) == (77, True)


async def test_a_schema_of_somebody_elses_is_left_alone(database_url: str) -> None:
    await fetch(database_url, "CREATE SCHEMA postroom")
    await fetch(database_url, "CREATE TABLE postroom.letters (id integer)")
    refused = await install(database_url)
    assert (refused.code, "ALTER SCHEMA postroom RENAME" in refused.sentence()) == (78, True)
    assert await fetch(database_url, "SELECT to_regclass('postroom.outbox_events')") is None


async def test_a_newer_outbox_is_refused(shop: str) -> None:
    await fetch(owner_of(shop), "INSERT INTO postroom.schema_migration VALUES ('applications', 9, '0009_more')")
    refused = await install(owner_of(shop))
    assert refused.code == 78
    assert refused.sentence().startswith("the database has version 9 of the applications schema, ")
    assert refused.sentence().endswith(": upgrade the program")


async def test_in_a_brokers_database_grants_are_made_and_its_own_meshes_count(database_url: str, shop: str) -> None:
    await migrate(database_url)
    role = role_of(shop)
    named = await install(database_url, "--mesh", "demo")
    assert (named.code, "this is a broker's database" in named.sentence()) == (2, True)
    assert (await install(database_url, "--role", role)).code == 0
    await fetch(database_url, "INSERT INTO mesh.mesh (slug) VALUES ('demo')")
    url = as_role(database_url, role)
    assert await fetch(url, EMIT, "demo", "one")
    with pytest.raises(asyncpg.ForeignKeyViolationError):
        await fetch(url, EMIT, "shop", "one")

    await fetch(database_url, "DROP SCHEMA postroom CASCADE")  # and the grants to the role with it


async def test_a_brokers_database_that_is_older_is_left_to_the_broker(database_url: str) -> None:
    await fetch(database_url, "CREATE SCHEMA mesh")
    await fetch(database_url, "CREATE TABLE mesh.mesh (slug text)")
    refused = await install(database_url)
    assert (refused.code, "run `postroom broker migrate` first" in refused.sentence()) == (78, True)
    assert await fetch(database_url, "SELECT to_regclass('postroom.outbox_events')") is None


async def test_an_operator_sees_and_drops_what_fails_in_an_application(shop: str) -> None:
    poison, _ = [await fetch(shop, EMIT, "demo", "one") for _ in range(2)]
    failed = "UPDATE postroom.outbox_events SET publish_attempts = 3, publish_error = 'too large' WHERE id = $1::uuid"
    await fetch(owner_of(shop), failed, poison)
    there = {"POSTROOM_OUTBOX_DATABASE_URL": owner_of(shop)}

    events, letters = (await run("worker", "backlog", "--json", **there)).json
    assert (events["source"], events["count"], events["failing"], letters["count"]) == ("events", 2, 1, 0)
    listed = await run("worker", "events", "list", "--json", **there)
    assert [(one["id"], one["behind"]) for one in listed.json] == [(poison, 1)]
    assert "1234" not in listed.out
    for words in (["backlog"], ["events", "list"], ["events", "drop", "--all", "--dry-run"]):
        nowhere = await run("worker", *words, "--mesh", "nowhere", **there)
        assert (nowhere.code, "there is no mesh 'nowhere'" in nowhere.err) == (3, True), words

    unknown = await run("worker", "events", "drop", poison.replace("-", ""), "--reason", "a test", "--yes", **there)
    assert unknown.code == 3
    dry = await run("worker", "events", "drop", poison, "--dry-run", **there)
    assert dry.out == f"{poison} would be dropped\n"
    dropped = await run("worker", "events", "drop", "--all", "--reason", "a test", "--yes", **there)
    assert dropped.out.splitlines()[-1] == f"{poison} dropped"
    assert (await run("worker", "backlog", "--json", **there)).json[0]["count"] == 1
    (kept,) = (await run("worker", "events", "log", "--json", **there)).json
    (line,) = (await run("log", "--at", "broker", "--json", **there)).json
    actor = f"{this_user()} as postroom"
    assert (kept["id"], kept["dropped_by"], kept["reason"]) == (poison, actor, "a test")
    assert (line["where"], line["actor"], line["verb"], line["noun"], line["key"], line["reason"]) == (
        "application", actor, "drop", "event", poison, "a test"
    )  # fmt: skip
    again = await run("worker", "events", "drop", poison, "--reason", "too late", "--yes", **there)
    assert (again.code, f"{poison!r} was dropped by {actor} on 20" in again.sentence()) == (3, True)


async def test_an_operator_has_what_an_application_emitted_published_again(shop: str) -> None:
    ids = [await fetch(shop, EMIT, "demo", str(number)) for number in range(3)]
    await fetch(
        owner_of(shop),
        "UPDATE postroom.outbox_events SET published_at = now(), stream = 'DEMO_EVENTS', stream_created_at = now(), "
        "stream_sequence = position WHERE id = ANY ($1::text[]::uuid[])",
        ids[:2],
    )
    there = {"POSTROOM_OUTBOX_DATABASE_URL": owner_of(shop)}
    unknown = await run("worker", "redrive", "--since", "1h", "--stream", "shop", "--dry-run", **there)
    assert "a stream 'shop': give its whole name" in unknown.sentence()
    dry = await run("worker", "redrive", "--since", "1h", "--dry-run", **there)
    assert dry.out == "events: 2 would be published again\nletters: 0 would be published again\n"
    done = await run("worker", "redrive", "--since", "1h", "--reason", "a lost stream", "--yes", **there)
    assert done.out == "events: 2 published again\nletters: 0 published again\n"
    epochs = "SELECT array_agg(epoch ORDER BY position) FROM postroom.outbox_events WHERE published_at IS NULL"
    assert await fetch(owner_of(shop), epochs) == [1, 1, 0]
    (line,) = (await run("log", "--at", "broker", "--verb", "redrive", "--json", **there)).json
    assert (line["outcome"], line["reason"]) == ("published again: events 2, letters 0", "a lost stream")


async def test_a_database_without_an_outbox_has_nothing_to_see(database_url: str) -> None:
    refused = await run("worker", "backlog", "--database", database_url)
    assert (refused.code, "run `postroom outbox install` first" in refused.sentence()) == (78, True)
