"""The manual page `postroom(1)`, from the help of every verb."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from typer.main import get_command


def manual(root: Any, version: str, day: datetime) -> str:
    """Write the page of a Typer application: its verbs, each with its options, in the order of the help."""
    command = get_command(root)
    context = command.context_class(command, info_name="postroom", **command.context_settings)
    lines = [
        f'.TH POSTROOM 1 "{day.astimezone(UTC):%Y-%m-%d}" "postroom {version}" "User Commands"',
        ".SH NAME",
        r"postroom \- the mail room of a machine",
        ".SH SYNOPSIS",
        r"\fBpostroom\fR [\fIOPTIONS\fR] \fICOMMAND\fR [\fIARGS\fR]...",
        ".SH DESCRIPTION",
        "A program hands a message to a daemon on its own host and carries on. This command sends and reads messages,",
        "shows what became of them, repairs what could not be delivered, and runs the programs of an installation.",
        ".SH OPTIONS",
        *_options(command, context),
        ".SH COMMANDS",
        *_commands(command, context, "postroom"),
        ".SH EXIT STATUS",
        _text(command.epilog),
        ".SH SEE ALSO",
        r"\fBsystemctl\fR(1), \fBjournalctl\fR(1), the guides in \fI/usr/share/doc/postroom/docs\fR",
    ]
    return "\n".join(lines) + "\n"


def _commands(group: Any, context: Any, words: str) -> Iterator[str]:
    """Yield a subsection for each verb of a group, and of the groups in it."""
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        inner = verb.context_class(verb, info_name=name, parent=context)
        if verb.hidden:
            continue
        if hasattr(verb, "list_commands"):
            yield from _commands(verb, inner, f"{words} {name}")
            continue
        yield f'.SS "{_text(" ".join([words, name, *verb.collect_usage_pieces(inner)]))}"'
        for paragraph in (verb.help or "").split("\n\n"):
            yield from (_text(" ".join(paragraph.split())), "")
        yield from _options(verb, inner)


def _options(command: Any, context: Any) -> Iterator[str]:
    for parameter in command.get_params(context):
        if record := parameter.get_help_record(context):
            name, meaning = record
            yield from (".TP", rf"\fB{_text(name)}\fR", _text(" ".join(meaning.split())) or r"\&")


def _text(plain: str) -> str:
    """Escape what roff would read as its own."""
    escaped = plain.replace("\\", r"\e").replace("-", r"\-").replace('"', r"\(dq")
    return rf"\&{escaped}" if escaped.startswith((".", "'")) else escaped
