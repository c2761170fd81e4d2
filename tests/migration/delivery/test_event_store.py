"""The agents' event store: the rules of its schema hold."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from postroom.agent import Envelope
from postroom.delivery.agents.store import NO_HASH, SCHEMA, Record, encode_record, next_hash


def migrated() -> sqlite3.Connection:
    db = sqlite3.connect(":memory:", isolation_level=None)
    SCHEMA.migrate(db, Path("events.db"))
    return db


def record(role: str = "handled", cause: int | None = None, key: str = "k") -> str:
    envelope = Envelope(id="m", type="x", idempotency_key=key)
    made = Record(cause=cause, envelope=envelope, role="handled", subject="s")
    return encode_record(msgspec.structs.replace(made, role=role), b"null").decode()  # type: ignore[arg-type]


def store() -> sqlite3.Connection:
    """A store with one handled message and what it emitted."""
    db = migrated()
    db.execute("INSERT INTO state VALUES (1, 'a', 't', 'w', 0, zeroblob(32), 0)")
    first = next_hash(NO_HASH, record().encode())
    db.execute("INSERT INTO event (position, record, state_hash) VALUES (1, ?, ?)", (record(), first))
    emitted = record("emitted", 1, "e")
    db.execute("INSERT INTO event (position, record, state_hash) VALUES (2, ?, ?)", (emitted, bytes(32)))
    db.execute("UPDATE state SET position = 2, state_hash = zeroblob(32)")
    return db


INSERT = "INSERT INTO event (position, record, state_hash) VALUES (?, ?, zeroblob(32))"


@pytest.mark.parametrize(
    ("statement", "parameters"),
    [
        (INSERT, (4, record(key="new"))),  # a gap
        (INSERT, (2, record(key="new"))),  # a position that is taken
        (INSERT, (3, record())),  # a message that the store holds
        (INSERT, (3, record("dreamt", key="new"))),
        (INSERT, (3, record("emitted", None, "new"))),
        (INSERT, (3, record("emitted", 3, "new"))),  # its own cause
        (INSERT, (3, record("handled", 1, "new"))),
        (INSERT, (3, record(key=""))),
        (INSERT, (3, "{")),
        ("INSERT INTO event (position, record, state_hash) VALUES (3, ?, x'00')", (record(key="new"),)),
        ("UPDATE event SET record = record WHERE position = ?", (1,)),
        ("UPDATE event SET state_hash = zeroblob(32) WHERE position = ?", (1,)),
        ("INSERT INTO outgoing (position, cause) VALUES (?, 1)", (2,)),
        ("UPDATE outgoing SET stream = ?", ("S",)),  # not published
        ("UPDATE outgoing SET published_at = 5, stream = ?", ("S",)),  # half a place
        ("UPDATE outgoing SET epoch = ?", (1,)),  # it was not lost
        ("UPDATE outgoing SET cause = ?", (2,)),
        ("DELETE FROM outgoing WHERE position = ?", (2,)),
        ("DELETE FROM event WHERE position = ?", (2,)),
        ("UPDATE state SET position = ?", (1,)),
        ("UPDATE state SET position = ?", (3,)),
        ("UPDATE state SET agent = ?", ("b",)),
        ("DELETE FROM state WHERE only = ?", (1,)),
        ("INSERT INTO entity VALUES ('e', ?)", (0,)),
    ],
)
def test_what_would_break_the_log_is_refused(statement: str, parameters: tuple[object, ...]):
    with closing(store()) as db, pytest.raises((sqlite3.IntegrityError, sqlite3.OperationalError)):
        db.execute(statement, parameters)


def test_a_message_is_published_until_it_is_lost_and_then_begins_another_epoch():
    with closing(store()) as db:
        db.execute("UPDATE outgoing SET published_at = 5")
        for change in ("published_at = 6", "published_at = NULL", "epoch = 1", "published_at = NULL, epoch = 2"):
            with pytest.raises(sqlite3.IntegrityError, match="stays published until it is lost"):
                db.execute(f"UPDATE outgoing SET {change}")  # noqa: S608 - one of these
        db.execute("UPDATE outgoing SET published_at = NULL, epoch = 1")
        db.execute("UPDATE outgoing SET published_at = 7")


def test_what_was_published_may_be_forgotten():
    with closing(store()) as db:
        db.execute("UPDATE outgoing SET published_at = 5")
        assert db.execute("DELETE FROM outgoing").rowcount == 1


def test_a_version_only_grows():
    with closing(store()) as db:
        db.execute("INSERT INTO entity VALUES ('e', 1)")
        db.execute("UPDATE entity SET version = 2")
        for statement in ("UPDATE entity SET version = 2", "DELETE FROM entity"):
            with pytest.raises(sqlite3.IntegrityError):
                db.execute(statement)


def test_attempts_only_grow():
    with closing(store()) as db:
        db.execute("INSERT INTO attempt VALUES ('m', 2, 'no stock', 5)")
        for statement in ("UPDATE attempt SET attempts = 2", "UPDATE attempt SET attempts = 1"):
            with pytest.raises(sqlite3.IntegrityError, match="only grow"):
                db.execute(statement)
