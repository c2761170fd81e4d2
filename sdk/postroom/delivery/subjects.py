"""Subjects: the one place that builds, checks and parses them (docs/contract/delivery.md#delivery-1).

    {context}.event.{name}.v{n}                     what happened
    cmd.{context}.{workspace}.{agent}.{verb…}       work that exactly one worker takes
    {context}.inbox.{member}                        a member's daemon
    {context}.dlq.{name}.v{n}                       dead letters

A context is the slug of a mesh. What breaks a rule raises an `InvalidMessage` (`invalid_subject`) that states the rule.
"""

import re
from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

from postroom._wire.message import DestinationKind
from postroom._wire.names import MAX_NAME, SNAKE, WORD
from postroom.delivery.errors import invalid_subject

_VERSION: Final = re.compile(r"v([1-9][0-9]{0,8})")
_MOST_VERSION: Final = 999_999_999
_STREAM_KINDS: Final = frozenset({"events", "commands", "inbox", "dlq"})

DEFAULT_WORKSPACE: Final = "default"
DEFAULT_VERB: Final = "run"


class EventSubject(NamedTuple):
    """`{context}.event.{name}.v{n}`."""

    context: str
    name: str
    version: int


class CommandSubject(NamedTuple):
    """`cmd.{context}.{workspace}.{agent}.{verb…}`; the verb may have dots."""

    context: str
    workspace: str
    agent: str
    verb: str


class InboxSubject(NamedTuple):
    """`{context}.inbox.{member}`."""

    context: str
    member: str


class DeadLetterSubject(NamedTuple):
    """`{context}.dlq.{name}.v{n}`."""

    context: str
    name: str
    version: int


Subject: TypeAlias = EventSubject | CommandSubject | InboxSubject | DeadLetterSubject


def event_subject(context: str, name: str, version: int = 1) -> str:
    """Build the subject of an event."""
    if type(version) is not int or not 1 <= version <= _MOST_VERSION:
        raise invalid_subject(f"the version {version!r} is not a number from 1 to {_MOST_VERSION}")
    return f"{_context(context)}.event.{_word('name', name)}.v{version}"


def command_subject(context: str, queue: str) -> str:
    """Build the subject of a command from the queue's name.

    One segment is an agent, two are `agent.verb`, three or four `workspace.agent.verb…`; the rest has its default.
    """
    words = [_dashed("queue", word) for word in queue.split(".")]
    match words:
        case [agent]:
            path = [DEFAULT_WORKSPACE, agent, DEFAULT_VERB]
        case [agent, verb]:
            path = [DEFAULT_WORKSPACE, agent, verb]
        case [_, _, _] | [_, _, _, _]:
            path = words
        case _:
            raise invalid_subject(f"the queue {queue!r} has {len(words)} segments: at most four are allowed")
    return ".".join(["cmd", _context(context), *path])


@lru_cache(maxsize=4096)
def sent_subject(context: str, kind: DestinationKind, ref: str, version: int = 1) -> str | None:
    """Return the subject of a send: an event's for a topic, a command's for a queue, None for a dm."""
    match kind:
        case "topic":
            return event_subject(context, ref, version)
        case "queue":
            return command_subject(context, ref)
        case "dm":
            return None


def inbox_subject(context: str, member: str) -> str:
    """Build the subject on which a member's daemon gets its messages."""
    return f"{_context(context)}.inbox.{_dashed('member', member)}"


def dead_letter_subject(context: str, subject: str) -> str:
    """Build the subject on which `context` keeps the dead letter of a message that came on `subject`.

    An event keeps its name and version; a command is named `{agent}_{verb}`, an inbox message `inbox`, and a message
    on another program's subject by the last word of it that is a name; all these have version 1.
    """
    version = 1
    match known_subject(subject):
        case EventSubject(_, name, version) | DeadLetterSubject(_, name, version):
            pass
        case CommandSubject(_, _, agent, verb):
            name = re.sub(r"[.-]", "_", f"{agent}_{verb}")[:MAX_NAME]
        case InboxSubject():
            name = "inbox"
        case None:
            words = reversed(subject.split("."))
            names = (word for word in words if SNAKE.allows(word) and not _VERSION.fullmatch(word))
            name = next(names, "other")
    return f"{_context(context)}.dlq.{name}.v{version}"


def parse_subject(subject: str) -> Subject:
    """Parse a subject of Postroom; raises `InvalidMessage` for any other."""
    parsed = known_subject(subject)
    if parsed is None:
        raise invalid_subject(
            f"{subject!r} is not one of <context>.event.<name>.v<n>, cmd.<context>.<workspace>.<agent>.<verb>, "
            "<context>.inbox.<member>, <context>.dlq.<name>.v<n>"
        )
    return parsed


def stream_name(context: str, kind: str) -> str:
    """Name the default stream of a context: `SEA_EVENTS` for `sea` and `events`."""
    return f"{_context(context)}_{kind}".upper()


def is_stream_name(name: str) -> bool:
    """Return whether it is the name of a default stream, of whichever context."""
    context, _, kind = name.lower().rpartition("_")
    return kind in _STREAM_KINDS and SNAKE.allows(context) and name.isupper()


@lru_cache(maxsize=4096)
def known_subject(subject: str) -> Subject | None:
    """Parse a subject; None for one that is not Postroom's, such as that of another program's stream."""
    match subject.split("."):
        case ["cmd", context, workspace, agent, *verb] if verb and all(map(WORD.allows, (workspace, agent, *verb))):
            return CommandSubject(context, workspace, agent, ".".join(verb)) if SNAKE.allows(context) else None
        case [context, "inbox", member] if SNAKE.allows(context) and WORD.allows(member):
            return InboxSubject(context, member)
        case [context, ("event" | "dlq") as kind, name, number] if SNAKE.allows(context) and SNAKE.allows(name):
            version = _VERSION.fullmatch(number)
            if version is None:
                return None
            shape = EventSubject if kind == "event" else DeadLetterSubject
            return shape(context, name, int(version[1]))
    return None


def mesh_named_by(subject: str) -> str | None:
    """Return the context in whose streams a subject is, well formed or not; None for that of another program."""
    match subject.split("."):
        case ["cmd", context, *_] | [context, "event" | "dlq" | "inbox", *_]:
            return context
    return None


def expression_of(*patterns: str) -> str:
    """Return the regular expression, of Postgres as of Python, of all that a pattern (`*`, `>` as in NATS) matches."""
    words = {"*": "[^.]+", ">": ".+"}
    each = (r"\.".join(words.get(word) or re.escape(word) for word in pattern.split(".")) for pattern in patterns)
    return f"^({'|'.join(each)})$"


def is_literal(subject: str) -> bool:
    """Return whether a subject names one place: NATS takes `*` and `>` in what is published for any text."""
    return not {"*", ">"} & set(subject.split("."))


def _context(text: str) -> str:
    if text == "cmd":
        raise invalid_subject("the context cannot be 'cmd': commands of every context begin with that word")
    return _word("context", text)


def _word(what: str, text: str) -> str:
    if not SNAKE.allows(text):
        raise invalid_subject(f"the {what} {text!r} is not snake_case: {SNAKE.words}")
    return text


def _dashed(what: str, text: str) -> str:
    if not WORD.allows(text):
        raise invalid_subject(f"the {what} segment {text!r} is not {WORD.words}")
    return text
