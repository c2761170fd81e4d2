"""Which versions of a schema a program runs on, in Postgres and SQLite (docs/contract/operate.md#operate-4)."""

from __future__ import annotations

import asyncio
import importlib
import re
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import takewhile
from pathlib import Path
from typing import Final

import pytest
from support.waiting import until_so

from postroom._wire.sql import migrations
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import check_version, connected, migrate, schema_version
from postroom.chassis.sqlite import Schema, open_writer

VERSIONS: Final = (1, 2, 3, 4, 1001, 1002)  # of a schema that a major release changed after four minor ones
CELLS: Final = [
    pytest.param(2, 2, True, id="its own"),
    pytest.param(1, 2, True, id="older by a minor version"),
    pytest.param(3, 2, True, id="newer by a minor version"),
    pytest.param(1, 3, False, id="older by two minor versions"),
    pytest.param(4, 2, False, id="newer by two minor versions"),
    pytest.param(4, 1001, False, id="older by a major version"),
    pytest.param(1001, 4, False, id="newer by a major version"),
    pytest.param(1002, 1001, True, id="newer by the first minor version after a major one"),
]

Room = Callable[[int], str]


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Room:
    """The package of a program's tables as a version of the program has it."""
    monkeypatch.syspath_prepend(tmp_path)

    def of(version: int) -> str:
        package = tmp_path / f"program_{version}" / "notes"
        (package / "migrations").mkdir(parents=True)
        (package / "__init__.py").touch()
        (package.parent / "__init__.py").touch()
        for number in takewhile(lambda number: number <= version, VERSIONS):
            sql = "CREATE TABLE notes (number integer PRIMARY KEY)" if number == 1 else "SELECT 1"
            (package / "migrations" / f"{number:04}_step.sql").write_text(f"{sql};\n")
        importlib.invalidate_caches()
        for name in (package.parent.name, f"{package.parent.name}.notes"):  # another test's
            sys.modules.pop(name, None)
        return f"program_{version}.notes"

    return of


@pytest.mark.parametrize(("found", "known", "runs"), CELLS)
async def test_a_program_runs_on_tables_that_differ_by_one_minor_version(
    database_url: str, room: Room, found: int, known: int, *, runs: bool
) -> None:
    before, program = room(found), room(known) if known != found else f"program_{found}.notes"
    await migrate(database_url, before)
    async with connected(database_url) as connection:
        if runs:
            await check_version(connection, program, migrate_with="migrate")
        else:
            advice = "upgrade the program" if found > known else "run `migrate` first"
            with pytest.raises(Fatal, match=f"version {found} of the notes schema.*supports.*: {advice}") as refused:
                await check_version(connection, program, migrate_with="migrate")
            assert refused.value.exit_code == Exit.CONFIG


@pytest.mark.parametrize(("found", "known", "runs"), CELLS)
async def test_tables_are_brought_forward_and_never_back(
    database_url: str, room: Room, found: int, known: int, *, runs: bool
) -> None:
    before, program = room(found), room(known) if known != found else f"program_{found}.notes"
    await migrate(database_url, before)
    if found > known and not runs:
        with pytest.raises(Fatal, match="upgrade the program"):
            await migrate(database_url, program)
    else:
        applied = await migrate(database_url, program)
        assert [int(name[6:10]) for name in applied] == [each for each in VERSIONS if found < each <= known]
    async with connected(database_url) as connection:
        assert await schema_version(connection, program) == max(found, known)


async def test_no_program_runs_where_there_are_no_tables(database_url: str, room: Room) -> None:
    async with connected(database_url) as connection:
        with pytest.raises(Fatal, match="version 0 of the notes schema, this program supports 1, 2: run `migrate`"):
            await check_version(connection, room(1), migrate_with="migrate")


async def test_a_migration_waits_for_nobody_long_and_is_tried_again(
    database_url: str, tmp_path: Path, room: Room
) -> None:
    """Whoever reads a table waits behind a migration that waits for it, so that must not last."""
    await migrate(database_url, room(1))
    later = room(2)
    migration = tmp_path / "program_2" / "notes" / "migrations" / "0002_step.sql"
    migration.write_text("ALTER TABLE notes ADD COLUMN text text;")
    async with connected(database_url) as long, connected(database_url) as reader:
        transaction = long.transaction()
        await transaction.start()
        await long.execute("SELECT FROM notes")
        migrating = asyncio.create_task(migrate(database_url, later))

        async def waits() -> bool:
            return bool(await reader.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"))

        await until_so(waits)
        await reader.execute("SELECT FROM notes", timeout=30)
        assert not migrating.done()
        await transaction.rollback()

    assert await migrating == ["notes/0002_step"]


@pytest.mark.parametrize(("found", "known", "runs"), CELLS)
def test_a_file_is_brought_forward_and_used_when_it_is_newer_by_one_minor_version(
    tmp_path: Path, found: int, known: int, *, runs: bool
) -> None:
    path = tmp_path / "notes.db"
    open_writer(path, schema(found)).close()
    if found < known or runs:
        with closing(open_writer(path, schema(known))) as db:
            assert db.execute("PRAGMA user_version").fetchone() == (max(found, known),)
        return
    before = path.read_bytes()
    with pytest.raises(Fatal, match=f"has schema version {found}, this program supports up to {known + 1}") as refused:
        open_writer(path, schema(known))
    assert refused.value.exit_code == Exit.CONFIG
    assert path.read_bytes() == before


def schema(version: int) -> Schema:
    """The steps of a file as a version of the program has them."""
    mark = "PRAGMA application_id = 7;\nPRAGMA user_version ="
    return Schema(7, {number: f"{mark} {number};\n" for number in VERSIONS if number <= version})


def test_steps_are_numbered_without_a_gap_within_a_major_version(tmp_path: Path, room: Room) -> None:
    package = room(1002)
    assert [version for version, _, _ in migrations(package)] == list(VERSIONS)
    for missing in (1, 3, 1001):
        file = tmp_path / "program_1002" / "notes" / "migrations" / f"{missing:04}_step.sql"
        text = file.read_text()
        file.unlink()
        with pytest.raises(ValueError, match=re.escape(f"in the migrations of {package}")):
            migrations(package)
        file.write_text(text)
