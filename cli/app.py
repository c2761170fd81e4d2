"""The command line as Typer sees it: the options of `postroom` itself, and every verb as one table.

A verb's module is imported only when the verb is used. It offers a `typer.Typer` made by `cli.noun.noun()`, called
`app` where it is the only one. What takes long to import, and only some of its verbs need, is imported inside the
function that needs it.
"""

import importlib
import io
import os
import sys
from collections.abc import Mapping, MutableMapping
from contextlib import redirect_stdout
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, cast

import typer
from typer.core import TyperGroup

EXIT_CODES = (
    "Exit codes: 0 ok, 1 failed, 2 usage, 3 not found, 4 conflict, 69 unavailable, 74 input or output failed, "
    "75 try again, 77 not permitted, 78 config, 130 interrupted, 141 the reader of the output closed it."
)


class Verb(NamedTuple):
    """Where a verb lives, and the line that `postroom --help` shows for it without importing that."""

    module: str
    summary: str
    app: str = "app"  # its name there

    def command(self) -> Any:
        """Return what Typer makes of it; a noun that says no more of itself has this summary as its help."""
        made = typer.main.get_command(getattr(importlib.import_module(self.module), self.app))
        made.help = made.help or self.summary
        return made


VERBS: Final[Mapping[str, Verb]] = MappingProxyType(
    {
        "up": Verb("cli.up", "Start everything on this machine: broker, daemon and the servers under them."),
        "down": Verb("cli.up", "Stop what `up` started.", "downs"),
        "status": Verb("cli.top", "Show how an installation is, what is wrong first.", "statuses"),
        "top": Verb("cli.top", "Watch an installation: rates, what waits, what is wrong."),
        "demo": Verb("cli.demo", "Run a complete demo on embedded servers."),
        "drill": Verb("cli.drill", "Rehearse a loss and the way back, on embedded servers."),
        "send": Verb("cli.send", "Send a message, or a file or pipe of messages."),
        "trace": Verb("cli.trace", "Tell the story of a message, and where it waits now."),
        "outbox": Verb("cli.outbox", "See and repair what the daemon keeps."),
        "inbox": Verb("cli.inbox", "Read what the daemon has received, and follow it."),
        "relay": Verb("cli.programs", "Pause and resume the relay to the broker.", "relays"),
        "mesh": Verb("cli.administration", "Administer meshes.", "meshes"),
        "member": Verb("cli.administration", "Administer the members of a mesh.", "members"),
        "operator": Verb("cli.administration", "Administer who operates the broker, and in which role.", "operators"),
        "topic": Verb("cli.administration", "Administer topics and their subscribers.", "topics"),
        "queue": Verb("cli.administration", "Administer queues.", "queues"),
        "dlq": Verb("cli.dead_letters", "See, replay and drop messages that could not be handled."),
        "daemon": Verb("cli.programs", "Run and check the daemon.", "daemons"),
        "broker": Verb("cli.programs", "Run and check the broker.", "brokers"),
        "pipeline": Verb("cli.programs", "Run the pipelines over the history, with Spark.", "pipelines"),
        "jobs": Verb("cli.jobs", "Start, inspect, retry and cancel jobs."),
        "once": Verb("cli.once", "List, inspect and delete keys of things done once."),
        "console": Verb("cli.programs", "Serve a page on which operators see and repair.", "consoles"),
        "log": Verb("cli.log", "Show what operators did, at the broker and at the daemon."),
        "agent": Verb("cli.agent", "Run agents, and inspect their event stores."),
        "consumer": Verb("cli.consumer", "Post messages to an HTTP handler."),
        "worker": Verb("cli.worker", "Run the worker that publishes; see its backlog, publish again."),
        "doctor": Verb("cli.doctor", "Check this machine, and show what to do."),
        "install-service": Verb("cli.service", "Install the systemd units."),
    }
)


class LazyGroup(TyperGroup):
    """The group of all verbs, whose help needs none of their modules."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.commands = cast("MutableMapping[str, Any]", VERBS)  # for their names

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the module of a verb, and return its command; None for a word that is not a verb."""
        del ctx
        if cmd_name not in VERBS:
            return None
        command = VERBS[cmd_name].command()
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the table into the help text."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, verb.summary) for name, verb in VERBS.items()])


app = typer.Typer(
    cls=LazyGroup,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=EXIT_CODES,
)


def show_version(wanted: bool) -> None:  # noqa: FBT001 - Typer's shape of an option's callback
    """Print the version and end."""
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - slow to import, and rarely wanted

        typer.echo(f"postroom {version('postroom-server')}")
        raise typer.Exit


@app.callback()
def postroom(
    *,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=show_version, help="Show the version.")
    ] = False,
) -> None:
    """Postroom, the mail room of a machine."""
    del version  # its callback has answered
    if debug:
        os.environ["POSTROOM_DEBUG"] = "1"


def call(arguments: list[str]) -> int:
    """Run one command and return the exit code that it chose (130 for Ctrl-C); raises whatever else ended it."""
    if "_POSTROOM_COMPLETE" in os.environ:  # bash cuts words at colons, and takes what follows the last of them alone
        from cli.completion import join_words  # noqa: PLC0415

        known, output = join_words(), io.StringIO()
        try:
            with redirect_stdout(output):
                typer.main.get_command(app).main(arguments, "postroom")
        finally:
            sys.stdout.write("".join(line[known:] for line in output.getvalue().splitlines(keepends=True)))
            sys.stdout.flush()
    code = typer.main.get_command(app).main(arguments, "postroom", standalone_mode=False)
    return code if isinstance(code, int) else 0
