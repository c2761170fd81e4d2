"""Every verb of `postroom` as one table; a verb's module is imported only when the verb is used.

A module is named after its noun and offers `app`, a `typer.Typer` made by `cli.noun.noun()`: with one command where the
noun is the verb itself (`postroom send`), with several where it is not (`postroom outbox list`). At its top it imports
Typer and the standard library; whatever costs more is imported inside the function that needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, cast

import typer
from typer.core import TyperGroup


class Verb(NamedTuple):
    """Where a verb lives, and the line that `postroom --help` shows for it without importing that."""

    module: str
    summary: str


VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "up": Verb("cli.up", "Start everything on this machine: broker, daemon and the servers under them."),
        "down": Verb("cli.down", "Stop what `up` started."),
        "status": Verb("cli.status", "Show what runs on this machine, and how far behind it is."),
        "demo": Verb("cli.demo", "Run a complete demo on embedded servers."),
        "send": Verb("cli.send", "Send a message, or a file or pipe of messages."),
        "trace": Verb("cli.trace", "Tell the story of a message, and where it waits now."),
        "outbox": Verb("cli.outbox", "See and repair what the daemon keeps."),
        "inbox": Verb("cli.inbox", "Read what the daemon has received, and follow it."),
        "relay": Verb("cli.relay", "Pause and resume the relay to the broker."),
        "mesh": Verb("cli.mesh", "Administer meshes."),
        "member": Verb("cli.member", "Administer the members of a mesh."),
        "topic": Verb("cli.topic", "Administer topics and their subscribers."),
        "queue": Verb("cli.queue", "Administer queues."),
        "dlq": Verb("cli.dead_letters", "See, replay and drop messages that could not be handled."),
        "daemon": Verb("cli.daemon", "Run and check the daemon."),
        "broker": Verb("cli.broker", "Run and check the broker."),
        "pipeline": Verb("cli.pipeline", "Run the pipelines over the history, with Spark."),
        "jobs": Verb("cli.jobs", "Start, inspect, retry and cancel jobs."),
        "once": Verb("cli.once", "List, inspect and delete keys of things done once."),
        "log": Verb("cli.log", "Show what operators changed at the broker."),
        "agent": Verb("cli.agent", "Run agents, and inspect their event stores."),
        "consumer": Verb("cli.consumer", "Post messages to an HTTP handler."),
        "worker": Verb("cli.worker", "Run the worker that publishes; see its backlog, publish again."),
        "doctor": Verb("cli.doctor", "Check this machine, and show what to do."),
        "install-service": Verb("cli.service", "Install the systemd units."),
    }
)


class LazyCommands(Mapping[str, Any]):
    """The commands by name; looking one up imports its module."""

    def __getitem__(self, name: str) -> Any:
        command = typer.main.get_command(importlib.import_module(VERBS[name].module).app)
        command.name = name
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


class LazyGroup(TyperGroup):
    """The group of all verbs, whose help needs none of their modules."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast("MutableMapping[str, Any]", LazyCommands())

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table into the help text."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])
