"""The table of verbs is the whole of it: each verb has its module, its help, and options that everybody knows."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import typer

from cli.app import VERBS
from cli.change import Asked, Change, Portion, change_all
from outbox import operations as rows
from postroom._wire.dead_letters import DEAD_LETTERS
from postroom._wire.jobs import JOBS
from postroom._wire.once import KEYS
from postroom._wire.operations import VERBS as ROW_VERBS
from postroom._wire.sql import load_queries
from postroom._wire.unpublished import CONSUMERS, UNPUBLISHED
from postroom.delivery import durables
from postroom.delivery.dead_letters import operations as letters
from postroom.delivery.publication import postgres as publication
from postroom.errors import NotPermitted
from postroom.ledger import operations as jobs

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


def strings() -> Iterator[str]:
    """Every string of the product, with `x` in the place of what is not known yet."""
    root = Path(__file__).parents[3]
    for room in (
        "broker",
        "broker_client",
        "cli",
        "daemon",
        "embedded",
        "inbox",
        "ipc",
        "outbox",
        "pipeline",
        "console",
        "sdk",
    ):
        for file in sorted((root / room).rglob("*.py")):
            nodes = list(ast.walk(ast.parse(file.read_text())))
            parts = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
            for node in nodes:
                if isinstance(node, ast.JoinedStr):
                    text = ""
                    for part in node.values:  # what directly follows a word is options, or none
                        known = part.value if isinstance(part, ast.Constant) else ""
                        text += str(known or ("" if re.search(r"\w'?$", text) else "x"))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts:
                    text = node.value
                else:
                    continue
                yield text


def commands_in(texts: Iterable[str], pattern: str) -> list[str]:
    """Every command that the texts name where the pattern finds one, without the word `postroom`."""
    return sorted({found for text in texts for found in re.findall(pattern, text) if found.split()[0] in VERBS})


COMMANDS = dict(commands())


def parsed(named: str) -> tuple[Any, dict[str, Any]]:
    """Find a command by its words, and read the rest of them; None for one of any verb, or an option of all."""
    noun, *words = shlex.split(named, comments=True)
    command: Any = VERBS[noun].command()
    while words and (below := getattr(command, "commands", {})):
        if words[0] in ("x", "…") or words[0].startswith("-"):
            if words[0] != "x":
                return None, {}
            words[0] = next(name for name, each in below.items() if words[1] in getattr(each, "commands", {}))
        command = below[words.pop(0)]
    given, _, _ = command.make_parser(typer.Context(command)).parse_args(words)
    return command, given


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


TABLES: dict[str, tuple[Mapping[Any, Any], Mapping[Any, Any]]] = {
    "outbox": (ROW_VERBS, rows.EFFECTS),
    "dlq": (DEAD_LETTERS.verbs, letters.EFFECTS),
    "jobs": (JOBS.verbs, jobs.EFFECTS),
    "consumer": (CONSUMERS.verbs, durables.EFFECTS),
    **{f"worker {name}": (noun.verbs, publication.EFFECTS) for name, noun in UNPUBLISHED.items()},
}
CHANGING = [f"{words} {verb}" for words, (verbs, _) in TABLES.items() for verb in verbs]


@pytest.mark.parametrize("words", TABLES)
def test_every_verb_of_a_table_has_an_effect(words: str) -> None:
    verbs, effects = TABLES[words]
    assert effects.keys() == verbs.keys()


def test_every_verb_on_a_key_has_a_query() -> None:
    assert KEYS.verbs.keys() <= load_queries("postroom.once", "sql/postgres.sql").keys()


@pytest.mark.parametrize("words", CHANGING)
def test_every_verb_on_many_things_names_them_in_the_one_way(words: str) -> None:
    command: Any = COMMANDS.get(words)
    for word in words.split() if command is None else ():
        command = VERBS[word].command() if command is None else command.commands[word]
    found = {option for parameter in command.params for option in parameter.opts}
    filters = {"--stream"} if words.startswith("consumer") else {"--older-than"}
    assert {"--all", "--reason", "--dry-run", "--yes", "--json", *filters} <= found
    (ids,) = (parameter for parameter in command.params if parameter.param_type_name == "argument")
    assert ids.nargs == -1
    assert "`-` reads" in ids.help


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
    ],
)
def test_every_destructive_verb_can_be_told_not_to_ask(words: str) -> None:
    assert "--yes" in options(words)


@pytest.fixture(scope="module")
def texts() -> set[str]:
    return set(strings())


def test_every_command_that_a_message_names_can_be_run(texts: set[str]) -> None:
    named = commands_in(texts, r"`postroom ([^`]+)`")
    assert len(named) > 50
    for each in named:
        parsed(each)


def test_every_command_that_is_suggested_is_ready_to_paste(texts: set[str]) -> None:
    """Nothing is asked for that a person does not decide: all that is required is given, a reason too."""
    suggested = commands_in(texts, r"^postroom (.+)$")  # whole strings
    assert len(suggested) > 10
    for words in suggested:
        command, given = parsed(words)
        if given.get("help"):
            continue
        wanted = [each.name for each in command.params if each.required or each.name == "reason"]
        assert (words, [name for name in wanted if given.get(name) in (None, ())]) == (words, [])
        if words.startswith("dlq"):  # whoever may see every mesh has to say which
            assert (words, given["mesh"]) != (words, None)


def test_a_verb_that_breaks_off_says_how_many_things_it_was_done_to(capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[Asked] = []

    def ask(request: Asked) -> Portion:
        asked.append(request)
        if len(asked) == 6:  # three dry runs, and the third request
            raise NotPermitted.of("unauthorized", "the broker refused the token")
        return Portion(request.ids or (), {})

    change = Change(everything=False, reason="test", dry_run=False, yes=True, as_json=False)
    with pytest.raises(NotPermitted):
        list(change_all("letter", "drop", ["a", "b", "c", "d", "e"], change, ask, size=2))
    assert capsys.readouterr().err == "at least 4 of 5 letters were done: repeat the command for the others\n"
