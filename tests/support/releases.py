"""This release, and what an upgrade meets of the next minor one: the same programs under its number, on larger schemas.

In each schema of the next one every table has one more column, which no program of this release knows, and there are
one more table and one more index: what a minor release may add (docs/compatibility.md).
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tomllib
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import distribution
from pathlib import Path
from typing import Final, NamedTuple

from inbox import SCHEMA as INBOX
from outbox.model import SCHEMA as OUTBOX
from postroom._wire.sql import migrations
from postroom.chassis.sqlite import Schema
from postroom.delivery.agents.store import SCHEMA as EVENTS

_TESTS: Final = Path(__file__).parents[1]
_EXAMPLES: Final = _TESTS.parent / "examples"
_DISTRIBUTIONS: Final = {"postroom": _TESTS.parent / "sdk", "postroom-server": _TESTS.parent}
_ROOMS: Final = {"postroom.delivery": "postroom", "broker": "mesh", "postroom.ledger": "ledger"}  # and their schemas
_FILES: Final = {"outbox": OUTBOX, "inbox": INBOX, "postroom.delivery.agents": EVENTS}

_GROW: Final = """
DO $$
DECLARE
  place regclass;
BEGIN
  FOR place IN SELECT oid FROM pg_class WHERE relkind = 'r' AND relnamespace = '{schema}'::regnamespace ORDER BY relname
  LOOP
    EXECUTE format('ALTER TABLE %s ADD COLUMN next_minor text', place);
  END LOOP;
END
$$;
CREATE TABLE {schema}.next_minor (id bigint PRIMARY KEY, note text);
CREATE INDEX next_minor_note ON {schema}.next_minor (note);
"""


class Release(NamedTuple):
    """A release whose programs can be started."""

    version: str
    path: tuple[Path, ...] = ()  # where it is installed; nowhere: as the tests are

    @property
    def settings(self) -> dict[str, object]:
        """What a program's environment needs to have the program be of this release."""
        places = map(str, (*self.path, _TESTS, _EXAMPLES))
        return {"PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1" if self.path else ""}


def this_release() -> Release:
    return Release(distribution("postroom").version)


def next_minor(place: Path) -> Release:
    """Install the next minor release in the directory `place`."""
    major, minor, *_ = this_release().version.split(".")
    version = f"{major}.{int(minor) + 1}.0"
    for name, source in _DISTRIBUTIONS.items():
        project = tomllib.loads((source / "pyproject.toml").read_text())
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            if (source / package).is_dir():
                shutil.copytree(source / package, place / package, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(source / package, place / package)
        about = place / f"{name.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.3\nName: {name}\nVersion: {version}\n")
    for room, schema in _ROOMS.items():
        _add(place, room, max(number for number, _, _ in migrations(room)) + 1, _GROW.format(schema=schema))
    for room, known in _FILES.items():
        _add(place, room, known.version + 1, "\n".join(_grow(known)))
    return Release(version, (place,))


def _add(place: Path, room: str, number: int, sql: str) -> None:
    directory = place.joinpath(*room.split("."), "migrations")
    directory.mkdir(exist_ok=True)
    (directory / f"{number:04}_next_minor.sql").write_text(sql)


def _grow(known: Schema) -> Iterator[str]:
    """Yield the statements that add to a file what the next release has more."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        known.migrate(db, Path(":memory:"))
        for (table,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite%'"):
            yield f"ALTER TABLE {table} ADD COLUMN next_minor TEXT;"
    yield "CREATE TABLE next_minor (id INTEGER PRIMARY KEY, note TEXT);"
    yield "CREATE INDEX next_minor_note ON next_minor (note);"
    yield f"PRAGMA user_version = {known.version + 1};"
