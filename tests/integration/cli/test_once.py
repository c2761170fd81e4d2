"""`postroom once`: an operator sees what was done once, in Postgres and in a file, and has it forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.operated import ADMIN_TOKEN, operated_broker
from support.terminal import Outcome, Terminal

from broker.database import migrate
from postroom import BrokerClient
from postroom._wire.once import KEYS, KeyName, KeyNames
from postroom.chassis.ownership import this_user
from postroom.once import open_registry

NAMES = ("--tenant", "acme", "--topic", "orders", "--group", "billing")


@pytest.fixture(params=["postgres", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite://{tmp_path}/once.db"
    database: str = request.getfixturevalue("database_url")
    return database


@pytest.fixture
async def terminal(url: str, short_directory: Path) -> AsyncIterator[Terminal]:
    """An operator: of a broker on that database, and of the file."""
    if url.startswith("sqlite:"):
        yield Terminal(POSTROOM_ONCE_REGISTRY=url)
        return
    await migrate(url)
    with operated_broker(short_directory, url) as reach:
        yield Terminal(**reach)


async def run(terminal: Terminal, *words: str) -> Outcome:
    """Run a command in a thread: it has an event loop of its own."""
    return await asyncio.to_thread(terminal.run, "once", *words)


async def do_once(url: str, key: str, *, fails: bool = False) -> bool:
    async with open_registry(url, group="billing") as registry, registry.once("acme", "orders", key) as claim:
        claim.result = {"charge": 7}
        if fails:
            raise ValueError("declined")
        return claim.first


async def test_an_empty_tenant_or_topic_is_one_and_an_empty_group_the_producers(url: str, terminal: Terminal) -> None:
    async with open_registry(url) as registry, registry.once("", "", "k-1"):
        pass
    await do_once(url, "k-2")
    nobody = ("--tenant", "", "--topic=")
    assert [kept["key"] for kept in (await run(terminal, "list", *nobody, "--group", "", "--json")).json] == ["k-1"]
    assert (await run(terminal, "inspect", "k-1", *nobody, "--json")).json[0]["state"] == "COMMITTED"


async def test_keys_are_listed_inspected_and_forgotten(url: str, terminal: Terminal) -> None:
    await do_once(url, "k-1")
    with pytest.raises(ValueError, match="declined"):
        await do_once(url, "k-2", fails=True)
    listed = (await run(terminal, "list", "--json")).json
    assert {(kept["key"], kept["state"], kept["group"]) for kept in listed} == {
        ("k-1", "COMMITTED", "billing"),
        ("k-2", "FAILED", "billing"),
    }
    assert "declined" in (await run(terminal, "list", "--state", "failed")).out
    shown = (await run(terminal, "inspect", "k-1", *NAMES, "--json")).json[0]
    assert (shown["state"], shown["result"], shown["log"]) == ("COMMITTED", '{"charge":7}', [])

    terminal.environment.update(LOGNAME="ceo", USER="ceo")
    done = await run(terminal, "forget", "k-1", *NAMES, "--reason", "never charged", "--yes")
    assert " forgotten" in done.out
    shown = (await run(terminal, "inspect", "k-1", *NAMES, "--json")).json[0]
    assert (shown["state"], shown["log"][0]["reason"]) == (None, "never charged")
    who = this_user() if url.startswith("sqlite:") else "administrator"
    assert shown["log"][0]["actor"].partition(" as ")[0] == who
    assert "never charged" in (await run(terminal, "inspect", "k-1", *NAMES)).out
    for words in (("inspect", "k-3", *NAMES), ("forget", "k-3", *NAMES, "--reason", "x", "--yes")):
        missing = await run(terminal, *words)
        assert (missing.code, "no key 'k-3' of acme/orders" in missing.err) == (3, True)
    assert (await run(terminal, "list", "--state", "odd")).code == 2


async def test_who_forgot_a_key_of_the_broker_is_in_the_one_log(database_url: str, short_directory: Path) -> None:
    await migrate(database_url)
    await do_once(database_url, "k-1")
    with operated_broker(short_directory, database_url) as reach:
        user = Terminal(**reach)
        assert (await run(user, "forget", "k-1", *NAMES, "--reason", "never charged", "--yes")).code == 0
        (line,) = (await asyncio.to_thread(user.run, "log", "--at", "broker", "--json")).json
    del line["at"]
    assert line == {
        "where": "broker",
        "actor": "administrator",
        "verb": "forget",
        "noun": "key",
        "key": "acme orders billing k-1",
        "outcome": "forgotten",
        "reason": "never charged",
    }


async def test_a_key_that_a_worker_holds_is_not_forgotten(url: str, terminal: Terminal) -> None:
    async with open_registry(url, group="billing") as registry, registry.once("acme", "orders", "k-1"):
        refused = await run(terminal, "forget", "k-1", *NAMES, "--reason", "impatience", "--yes")
        assert refused.code == 4  # a conflict
        assert "is held by" in refused.err


async def test_a_dry_run_tells_the_keys_that_can_be_forgotten_from_those_that_a_worker_holds(
    database_url: str, short_directory: Path
) -> None:
    await migrate(database_url)
    await do_once(database_url, "done")
    wanted = KeyNames(
        keys=[KeyName(tenant="acme", topic="orders", group="billing", key=key) for key in ("done", "held")]
    )
    with operated_broker(short_directory, database_url) as reach:
        async with (
            open_registry(database_url, group="billing") as registry,
            BrokerClient(reach["POSTROOM_BROKER_URL"], ADMIN_TOKEN) as client,
            registry.once("acme", "orders", "held"),
        ):
            for dry_run in (True, False):
                result = await client.change(KEYS, "forget", wanted, reason="x", dry_run=dry_run)
                assert [name.key for name in result.done] == ["done"]
                assert [(one.id, one.problem.code) for one in result.failed] == [("held", "key_held")]


async def test_a_place_without_keys_is_left_as_it_is(url: str, terminal: Terminal, tmp_path: Path) -> None:
    answered = await run(terminal, "list")
    if url.startswith("sqlite:"):  # a file that is not there may be another than was meant
        assert "there is no registry" in answered.err
    else:  # as in each installation at first
        assert (answered.code, answered.out) == (0, "no keys\n")
        assert (await run(terminal, "list", "--json")).out == ""
        assert "there is no registry" in (await run(terminal, "inspect", "k-1", *NAMES)).err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_where_a_registry_should_be_is_nothing_to_remove(tmp_path: Path) -> None:
    refused = Terminal().run("once", "list", "--registry", f"sqlite://{tmp_path}")
    said = f"must be repaired: {tmp_path} is not a regular file: move it, or choose another path"
    assert (refused.code, said in refused.sentence()) == (1, True)
