"""The table of verbs is the whole of it: each verb has its module, its help, and options that everybody knows."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import VERBS

READING = {"list", "show", "tree", "explain", "inspect", "subscribers", "features"}
READING |= {"check", "orphan-check", "doctor", "status", "log"}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command that can be run, by its words."""
    for noun, verb in VERBS.items():
        command = verb.command()
        for name, each in getattr(command, "commands", {}).items():
            yield f"{noun} {name}", each
        if not hasattr(command, "commands"):
            yield noun, command


def named_commands() -> Iterator[str]:
    """Every command that a string of the product names or is, with `x` in the place of what is not known yet."""
    root = Path(__file__).parents[3]
    for room in ("broker", "broker_client", "cli", "daemon", "embedded", "inbox", "ipc", "outbox", "pipeline", "sdk"):
        for file in sorted((root / room).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in node.values)
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    text = node.value
                else:
                    continue
                yield from re.findall(r"`postroom ([^`]+)`", text)
                yield from re.findall(r"^postroom (.+)$", text)


COMMANDS = dict(commands())


def options(words: str) -> set[str]:
    return {option for parameter in COMMANDS[words].params for option in parameter.opts}


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_says_what_it_does_and_every_option_too(words: str) -> None:
    assert COMMANDS[words].help
    for parameter in COMMANDS[words].params:
        assert getattr(parameter, "help", "help"), parameter.name


@pytest.mark.parametrize("words", [words for words in COMMANDS if words.split()[-1] in READING])
def test_every_reading_verb_has_json(words: str) -> None:
    assert "--json" in options(words)


@pytest.mark.parametrize("verb", ["requeue", "abort", "hold", "release", "flush"])
def test_every_operator_verb_takes_ids_filters_a_reason_and_a_dry_run(verb: str) -> None:
    assert {
        "ids",
        "--all",
        "--status",
        "--code",
        "--older-than",
        "--reason",
        "--dry-run",
        "--yes",
        "--json",
    } <= options(f"outbox {verb}")


@pytest.mark.parametrize(
    "words",
    [
        "mesh delete",
        "topic delete",
        "queue delete",
        "member revoke",
        "member rotate-token",
        "operator revoke",
        "operator rotate-token",
        "outbox prune",
        "outbox recover",
        "dlq replay",
        "dlq drop",
        "jobs retry",
        "jobs cancel",
    ],
)
def test_every_destructive_verb_can_be_told_not_to_ask(words: str) -> None:
    assert "--yes" in options(words)


@pytest.mark.parametrize("named", sorted({named for named in named_commands() if named.split()[0] in VERBS}))
def test_every_command_that_a_message_names_can_be_run(named: str) -> None:
    noun, *words = shlex.split(named)
    command: Any = VERBS[noun].command()
    while words and (below := getattr(command, "commands", {})):
        if words[0] in ("x", "…") or words[0].startswith("-"):  # any verb, or an option of all of them
            return
        command = below[words.pop(0)]
    command.make_parser(typer.Context(command)).parse_args(words)
