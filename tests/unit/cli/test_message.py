"""Which lines are read without Typer, and as what."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.message import BriefSend, parse_send

HELLO = BriefSend("topic:orders", "hello")


@pytest.mark.parametrize(
    ("line", "read"),
    [
        ("topic:orders hello", HELLO),
        ("--id a topic:orders --json hello", HELLO._replace(client_message_id="a", as_json=True)),
        ("topic:orders hello --priority now --reply-to m", HELLO._replace(priority="now", reply_to="m")),
        ("topic:orders hello --socket /a/b.sock", HELLO._replace(socket=Path("/a/b.sock"))),
    ],
)
def test_a_plain_send_is_read(line: str, read: BriefSend) -> None:
    assert parse_send(["send", *line.split()], {}) == read


@pytest.mark.parametrize(
    "line",
    [
        "", "topic:orders", "topic:orders a b", "topic:orders -", "topic:orders -x", "topic:orders -- -x", "--help",
        "topic:orders hello -h", "topic:orders hello --wait", "topic:orders hello --id", "topic:orders hello --id -x",
        "topic:orders hello --id a --id b", "topic:orders hello --id=a", "topic:orders hello --priority soon",
        "topic:orders hello --nonsense", "--ndjson", "topic:orders --file x", "topic:orders hello --meta a=1",
    ],
)  # fmt: skip
def test_any_other_line_is_typers(line: str) -> None:
    assert parse_send(["send", *line.split()], {}) is None


def test_nothing_empty_is_read() -> None:
    assert parse_send(["send", "topic:orders", ""], {}) is None
    assert parse_send(["send", "topic:orders", "hello", "--id", ""], {}) is None


def test_other_verbs_and_completion_are_typers() -> None:
    assert parse_send([], {}) is None
    assert parse_send(["outbox", "list"], {}) is None
    assert parse_send(["send", "topic:orders", "hello"], {"_POSTROOM_COMPLETE": "complete_bash"}) is None
