"""The tables themselves: what a key may be, where it may go, and what stands there instead of ours."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from support.databases import execute
from support.small_disk import run
from support.waiting import until_so

from embedded import EmbeddedPostgres
from postroom._wire.sql import read_sql
from postroom.errors import InvalidMessage, NotFound, PostroomError, Unavailable
from postroom.once import Registry, Run, Scope, open_registry
from postroom.once.postgres import PostgresStore
from postroom.once.registry import new_owner
from postroom.once.sqlite import SqliteStore

STATES = ["PENDING", "COMMITTED", "FAILED"]
COLUMNS = {"lease_until": "{later}", "settled_at": "{now}", "encoding": "'json'", "result": "{bytes}"}
HAS = {
    "PENDING": {"lease_until"},
    "COMMITTED": {"settled_at", "encoding", "result"},
    "FAILED": {"settled_at"},
}
TRANSITIONS = {  # (None, "PENDING") is a new key's; a key that is taken over or renewed stays PENDING
    (None, "PENDING"),
    ("PENDING", "PENDING"),
    ("PENDING", "COMMITTED"),
    ("PENDING", "FAILED"),
    ("FAILED", "PENDING"),
}
REFUSED = (sqlite3.IntegrityError, asyncpg.CheckViolationError)
WORDS = {
    "sqlite": {"later": "2000", "now": "1000", "bytes": "x'31'", "table": "idempotency_keys"},
    "postgres": {
        "later": "now() + interval '1 h'", "now": "now()", "bytes": "'\\x31'::bytea",
        "table": "postroom_once.idempotency_keys",
    },
}  # fmt: skip


class Table:
    """The bare table of a store."""

    def __init__(self, execute: Callable[[str], Awaitable[Any]], words: dict[str, str]) -> None:
        self._execute = execute
        self._words = words

    async def run(self, statement: str) -> None:
        await self._execute(statement.format(**self._words))

    async def insert(self, state: str) -> None:
        names = ["tenant, topic, consumer_group, key, state, owner, attempts, begun_at", *HAS[state]]
        values = [f"'', 'o', '', 'k', '{state}', 'me', 1, {{now}}", *(COLUMNS[name] for name in HAS[state])]
        await self.run(f"INSERT INTO {{table}} ({', '.join(names)}) VALUES ({', '.join(values)})")  # noqa: S608

    async def move(self, state: str, **other: str) -> None:
        columns = {name: value if name in HAS[state] else "NULL" for name, value in COLUMNS.items()} | other
        values = ", ".join(f"{name} = {value}" for name, value in columns.items())
        await self.run(f"UPDATE {{table}} SET state = '{state}', last_error = 'no', {values}")  # noqa: S608

    async def bring(self, state: str) -> None:
        await self.insert("PENDING")
        if state != "PENDING":
            await self.move(state)


@pytest.fixture(params=["sqlite", "postgres"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    if request.param == "sqlite":
        return "sqlite", str(tmp_path / "once.db")
    return "postgres", request.getfixturevalue("database_url")


@pytest.fixture
async def table(place: tuple[str, str]) -> AsyncIterator[Table]:
    kind, where = place
    if kind == "sqlite":
        await (await SqliteStore.open(Path(where))).close()
        db = sqlite3.connect(where, isolation_level=None)

        async def execute(statement: str) -> None:
            db.execute(statement)

        yield Table(execute, WORDS[kind])
        db.close()
    else:
        await (await PostgresStore.open(where)).close()
        connection = await asyncpg.connect(where)
        yield Table(connection.execute, WORDS[kind])
        await connection.close()


@pytest.mark.parametrize(("before", "after"), list(product([None, *STATES], STATES)))
async def test_a_key_goes_where_the_transitions_say_and_nowhere_else(
    table: Table, before: str | None, after: str
) -> None:
    async def move() -> None:
        await (table.insert(after) if before is None else table.move(after))

    if before is not None:
        await table.bring(before)
    if (before, after) in TRANSITIONS:
        await move()
    else:
        with pytest.raises(REFUSED):
            await move()


@pytest.mark.parametrize(("state", "column"), list(product(STATES, COLUMNS)))
async def test_a_key_has_what_its_state_has_and_nothing_else(table: Table, state: str, column: str) -> None:
    await table.insert("PENDING")
    value = "NULL" if column in HAS[state] else COLUMNS[column]
    with pytest.raises(REFUSED):
        await table.move(state, **{column: value})


@pytest.mark.parametrize(
    "change",
    [
        "state = 'LOST'",
        "state = NULL",
        "owner = ''",
        "attempts = 0",
        "owner = 'another'",  # taken over, but not counted
        "state = 'FAILED', lease_until = NULL, settled_at = {now}, last_error = 'no', owner = 'another'",
        "state = 'FAILED', lease_until = NULL, settled_at = {now}, last_error = NULL",
    ],
)
async def test_a_change_that_no_step_makes_is_refused(table: Table, change: str) -> None:
    await table.bring("PENDING")
    with pytest.raises((*REFUSED, asyncpg.NotNullViolationError)):
        await table.run(f"UPDATE {{table}} SET {change}")  # noqa: S608 - of this test


async def test_a_store_is_opened_again_and_by_many_at_once(place: tuple[str, str]) -> None:
    kind, where = place

    async def begin() -> str:
        store = await (SqliteStore.open(Path(where)) if kind == "sqlite" else PostgresStore.open(where))
        (state,) = await store.claim([(*Scope("", "o", "k").columns, "PENDING")], new_owner(), 60)
        await store.close()
        await store.close()
        return "taken" if isinstance(state, Run) else "held"

    assert sorted(await asyncio.gather(*(begin() for _ in range(4)))) == ["held"] * 3 + ["taken"]
    assert await begin() == "held"


async def test_a_store_newer_by_more_than_a_minor_version_is_left_alone(place: tuple[str, str], table: Table) -> None:
    kind, where = place

    async def begin() -> None:
        await (await (SqliteStore.open(Path(where)) if kind == "sqlite" else PostgresStore.open(where))).close()

    async def pretend(version: int) -> None:
        comment = f"COMMENT ON TABLE {{table}} IS 'version {version}'"
        await table.run(f"PRAGMA user_version = {version}" if kind == "sqlite" else comment)

    await pretend(2)
    await begin()
    for version in (3, 1001):
        await pretend(version)
        with pytest.raises(PostroomError, match=f"version {version}, this program supports"):
            await begin()


async def test_a_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "other.db"
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 1")
    before = file.read_bytes()
    with pytest.raises(PostroomError, match="another program"):
        await SqliteStore.open(file)
    assert file.read_bytes() == before
    (tmp_path / "text").write_text("no database\n" * 100)
    with pytest.raises(PostroomError, match="not a database"):
        await SqliteStore.open(tmp_path / "text")


async def test_a_new_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    await (await SqliteStore.open(tmp_path / "once.db")).close()
    assert (tmp_path / "once.db").stat().st_mode & 0o777 == 0o600


OTHER_PROCESS = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], timeout=0)
try:
    db.execute("BEGIN IMMEDIATE")
except sqlite3.OperationalError as error:
    print(error)
"""


async def test_opening_a_file_leaves_this_process_its_locks_on_it(tmp_path: Path) -> None:
    file = tmp_path / "once.db"
    await (await SqliteStore.open(file)).close()
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        store = await SqliteStore.open(file)
        assert await run(sys.executable, "-c", OTHER_PROCESS, str(file)) == ["database is locked"]
    await store.close()


async def test_a_file_that_was_replaced_is_opened_and_one_that_was_removed_is_not_made_anew(tmp_path: Path) -> None:
    file, copy, aside = (tmp_path / name for name in ("once.db", "copy.db", "aside.db"))

    async def is_first(registry: Registry, key: str) -> bool:
        async with registry.once("", "orders", key) as claim:
            return claim.first

    async with open_registry(f"sqlite://{file}", wait=0) as registry:
        assert await is_first(registry, "before")
        shutil.copyfile(file, copy)
        assert await is_first(registry, "after")
        file.rename(aside)
        copy.rename(file)
        assert await is_first(registry, "after")
        assert await is_first(registry, "new")
        assert not await is_first(registry, "before")
        file.unlink()
        for _ in range(2):
            with pytest.raises(NotFound, match="there is no registry in"):
                await is_first(registry, "newer")
        aside.rename(file)
        assert not await is_first(registry, "after")


async def test_a_file_that_was_emptied_while_it_was_open_is_to_be_put_back(tmp_path: Path) -> None:
    file = tmp_path / "once.db"
    async with open_registry(f"sqlite://{file}") as registry:
        async with registry.once("", "orders", "before"):
            pass
        kept = file.read_bytes()
        os.truncate(file, 0)
        with pytest.raises(PostroomError, match=r"once\.db: it is empty, though it was in use") as refused:
            async with registry.once("", "orders", "after"):
                pass
        assert (refused.value.code, refused.value.retryable) == ("registry_unusable", False)
        file.write_bytes(kept)
        async with registry.once("", "orders", "before") as claim:
            assert not claim.first


async def test_a_locked_file_and_an_absent_server_are_worth_another_try(tmp_path: Path) -> None:
    with pytest.raises(Unavailable) as caught:
        await PostgresStore.open(f"postgresql:///nothing?host={tmp_path}")
    assert (caught.value.code, caught.value.retryable) == ("registry_unavailable", True)
    assert str(caught.value) == "the registry cannot be reached (nothing listens on its Unix socket): try again"
    with pytest.raises(PostroomError, match="not a Postgres URL"):
        await PostgresStore.open("postgresql://host:port/")
    with pytest.raises(PostroomError, match="No such file"):
        await SqliteStore.open(tmp_path / "absent" / "once.db")


async def test_a_postgres_that_takes_no_writes_is_worth_another_try_and_its_connections_are_replaced(
    database_url: str, postgres_server: EmbeddedPostgres
) -> None:
    name = database_url.partition("@/")[2].partition("?")[0]
    await execute(postgres_server, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    reader = await asyncpg.connect(database_url)
    await reader.execute("SET default_transaction_read_only = off")
    await reader.execute(read_sql("postroom.once", "sql/postgres_schema.sql"))
    await reader.close()
    async with open_registry(database_url) as registry:

        async def claims() -> bool:
            try:
                async with registry.once("", "orders", "k"):
                    return True
            except Unavailable:
                return False

        assert not await claims()
        await execute(postgres_server, f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await until_so(claims, "a key can be claimed")


@pytest.mark.parametrize(
    "url", ["", "mysql://host/db", "sqlite:once.db", "sqlite://once.db", "memory", "memory:x", None, Path("/once.db")]
)
async def test_an_address_that_is_none_is_refused(url: Any) -> None:
    with pytest.raises(InvalidMessage, match="sqlite:///absolute/path"):
        async with open_registry(url):
            pytest.fail("opened")


@pytest.mark.parametrize("scheme", ["memory", "sqlite", "postgres"])
async def test_a_registry_is_opened_by_its_address(scheme: str, tmp_path: Path, database_url: str) -> None:
    url = {"memory": "memory:", "sqlite": f"sqlite://{tmp_path}/once.db", "postgres": database_url}[scheme]
    async with open_registry(url) as registry, registry.once("", "orders", "k") as claim:
        assert claim.first


LEFT_OPEN = """
import asyncio, sys
from postroom.once import open_registry

async def main():
    global left
    left = open_registry(sys.argv[1], keep_days=90)
    async with (await left.__aenter__()).once("", "orders", "k") as claim:
        print(claim.first)

asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["memory", "sqlite", "postgres"])
def test_a_registry_that_is_left_open_at_the_end_of_its_loop_is_closed_quietly(
    kind: str, tmp_path: Path, database_url: str
) -> None:
    url = {"memory": "memory:", "sqlite": f"sqlite://{tmp_path}/once.db", "postgres": database_url}[kind]
    program = [sys.executable, "-c", LEFT_OPEN, url]
    ended = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True\n", "", 0)


def test_a_program_without_asyncpg_is_told_what_to_install() -> None:
    program = (
        "import sys, asyncio; sys.modules['asyncpg'] = None\n"
        "from postroom.once.registry import open_store\n"
        "asyncio.run(open_store('postgresql:///x'))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "install postroom[postgres]" in done.stderr


def test_a_registry_in_a_file_needs_none_of_the_extras() -> None:
    extras = ("aiosqlite", "asyncpg", "nats", "prometheus_client", "structlog", "uvloop")
    program = f"import sys; sys.modules.update(dict.fromkeys({extras!r})); import postroom.once.sqlite"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
