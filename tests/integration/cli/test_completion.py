"""What a shell offers behind a verb: ids and names that daemon and broker know; nothing, in silence, without them."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.operated import operated_broker
from support.terminal import COMMAND, SECONDS, Outcome, Terminal

from broker.database import migrate
from cli.app import VERBS

NAMED = {"DESTINATION", "MEMBER", "PLACE", "PRIORITY", "ROW", "SLUG", "STATE", "STATUS", "TO"}  # metavars
COMPLETE = """
complete_it() {
    COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=()
    _postroom_completion postroom
    printf '%s\\n' "${COMPREPLY[@]}"
}
"""


@pytest.fixture
def administrator(database_url: str, short_directory: Path) -> Iterator[Terminal]:
    """The administrator of a broker with two meshes, of which one has names in it."""
    asyncio.run(migrate(database_url))
    with operated_broker(short_directory, database_url) as reach:
        user = Terminal(**reach)
        for words in ("mesh create sea", "mesh create land", "topic create orders --mesh sea"):
            assert user.run(*words.split()).code == 0
        for words in ("topic create offers --mesh sea", "queue create work.slow --mesh sea"):
            assert user.run(*words.split()).code == 0
        assert user.run("member", "create", "alice", "--mesh", "sea").code == 0
        yield user


def offered(user: Terminal, *words: str, shell: str = "bash") -> list[str]:
    """What the shell is told for the last of the words."""
    done = asked(user, *words, shell=shell)
    assert (done.code, done.err) == (0, "")
    return [line for line in done.out.splitlines() if line]


def asked(user: Terminal, *words: str, shell: str = "bash") -> Outcome:
    asking = {"COMP_WORDS": "\n".join(["postroom", *words]), "COMP_CWORD": str(len(words))}
    if shell != "bash":
        asking = {"_TYPER_COMPLETE_ARGS": " ".join(["postroom", *words]), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    return Terminal(**user.environment, **asking, _POSTROOM_COMPLETE=f"complete_{shell}").process()


def test_rows_are_offered_by_the_verb_that_is_for_them_each_once(terminal: Terminal) -> None:
    lines = (json.dumps({"to": "topic:orders", "body": "x", "client_message_id": f"order-{each}"}) for each in "abc")
    assert terminal.run("send", "--ndjson", stdin="\n".join(lines)).code == 0
    assert terminal.run("outbox", "hold", "order-b", "--reason", "a test").code == 0
    rows = {row["client_message_id"][-1]: row["id"] for row in terminal.run("outbox", "list", "--json").json}
    assert offered(terminal, "outbox", "abort", "") == list(rows.values())
    assert offered(terminal, "outbox", "abort", rows["a"], "") == [rows["b"], rows["c"]]
    assert offered(terminal, "outbox", "release", "") == [rows["b"]]
    assert offered(terminal, "outbox", "hold", "order-") == ["order-a", "order-c"]
    assert offered(terminal, "trace", "order-b") == ["order-b"]
    assert offered(terminal, "outbox", "list", "--destination", "") == ["topic:orders"]
    for shell in ("zsh", "fish"):
        assert rows["b"] in "".join(offered(terminal, "outbox", "release", "", shell=shell))


def test_names_are_offered_of_the_mesh_that_is_meant(administrator: Terminal) -> None:
    administrator.environment.pop("POSTROOM_MESH", None)
    assert offered(administrator, "topic", "list", "--mesh", "") == ["land", "sea"]
    assert offered(administrator, "topic", "delete", "--mesh", "sea", "o") == ["offers", "orders"]
    assert offered(administrator, "queue", "delete", "--mesh", "sea", "") == ["work.slow"]
    assert offered(administrator, "member", "revoke", "--mesh", "sea", "a") == ["alice"]
    administrator.environment["POSTROOM_MESH"] = "sea"
    assert offered(administrator, "send", "") == ["topic:offers", "topic:orders", "queue:work.slow", "dm:alice"]


def test_operators_are_offered_to_who_administers_them(administrator: Terminal) -> None:
    for name in ("lea", "max"):
        assert administrator.run("operator", "create", name, "--role", "repair").code == 0
    assert administrator.run("operator", "revoke", "max", "--yes").code == 0
    assert offered(administrator, "operator", "revoke", "") == ["lea"]
    assert offered(administrator, "operator", "create", "ina", "--role", "repair", "--mesh", "s") == ["sea"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("outbox", "list", "--status", "d"), ["done", "dead"]),
        (("send", "dm:bob", "hello", "--priority", ""), ["now", "next", "low"]),
        (("once", "list", "--state", ""), ["PENDING", "COMMITTED", "FAILED"]),
        (("jobs", "cancel", "--state", "c"), ["closed", "completed", "cancelled"]),
        (("operator", "create", "lea", "--role", "r"), ["repair"]),
        (("log", "--at", ""), ["broker", "daemon"]),
        (("pipeline", "run", "audit"), ["audit-log"]),
    ],
)
def test_what_is_one_of_a_few_words_is_offered_without_any_server(words: tuple[str, ...], expected: list[str]) -> None:
    assert offered(Terminal(), *words) == expected


def parameters(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Each parameter of a command, and of those below it, with the words that lead to it."""
    for name, below in getattr(command, "commands", {}).items():
        yield from parameters(below, f"{path} {name}")
    yield from ((path, each) for each in command.params)


def test_every_value_that_is_a_name_or_one_of_a_few_words_is_offered() -> None:
    assert not [
        (path, each.name)
        for name, verb in VERBS.items()
        for path, each in parameters(verb.command(), name)
        if (each.metavar or "").strip("[]") in NAMED and each._custom_shell_complete is None
    ]


def test_bash_completes_behind_a_colon_where_it_cuts_words(administrator: Terminal, tmp_path: Path) -> None:
    (program := tmp_path / "postroom").write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    administrator.environment |= {"POSTROOM_MESH": "sea", "PATH": f"{tmp_path}:{administrator.environment['PATH']}"}
    script = Terminal(**administrator.environment, _POSTROOM_COMPLETE="source_bash").process()
    assert script.code == 0
    for words, completed in (
        ("send topic : or", "orders"),
        ("send topic :", "offers\norders"),
        ("send que", "queue:work.slow"),
    ):
        done = subprocess.run(
            ["bash", "-c", f"{script.out}{COMPLETE}complete_it postroom {words}"],
            capture_output=True,
            env=administrator.environment,
            timeout=SECONDS,
            check=True,
        )
        assert (done.stdout.decode().strip(), done.stderr) == (completed, b"")


def test_who_cannot_be_reached_or_refuses_offers_nothing_and_says_nothing(short_directory: Path) -> None:
    """Not even a server that takes the connection and never answers."""
    (token := short_directory / "token").write_text("t" * 32)
    with socket.socket(socket.AF_UNIX) as silent, socket.create_server(("127.0.0.1", 0)) as mute:
        silent.bind(str(short_directory / "silent.sock"))
        silent.listen()
        for path, url in (
            (short_directory / "none.sock", "http://127.0.0.1:1"),
            (short_directory / "silent.sock", f"http://127.0.0.1:{mute.getsockname()[1]}"),
        ):
            user = Terminal(path, POSTROOM_BROKER_URL=url, POSTROOM_ADMIN_TOKEN_FILE=str(token))
            for words in (
                ("outbox", "abort", ""),
                ("dlq", "replay", ""),
                ("jobs", "show", ""),
                ("send", ""),
                ("trace", ""),
            ):
                assert offered(user, *words) == []
    assert offered(Terminal(), "dlq", "replay", "") == []


def test_a_verb_is_completed_without_a_client(terminal: Terminal) -> None:
    assert offered(terminal, "outbox", "requ") == ["requeue"]
    code = "import sys, cli.completion; sys.exit('aiohttp' in sys.modules or 'postroom' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
