"""What every noun of the command line is made of: its Typer application and the options that several verbs share."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import typer
from typer.core import TyperGroup

from cli.quantities import moment


def named(kind: Literal["mesh", "member", "topic", "queue"]) -> Callable[[Any], Any]:
    """Make the check of an argument that is such a name, or of an option that is several."""

    def check(value: Any) -> Any:
        from postroom._wire.administration import check_name  # noqa: PLC0415
        from postroom.errors import InvalidMessage  # noqa: PLC0415

        try:
            for name in value if isinstance(value, list) else [value]:
                if name is not None:
                    check_name(kind, name)
        except InvalidMessage as error:
            raise typer.BadParameter(str(error)) from error
        return value

    return check


Socket = Annotated[
    Path | None,
    typer.Option(
        "--socket",
        envvar="POSTROOM_SOCKET",
        help="The daemon's socket [default: the only one]",
        metavar="PATH",
        readable=False,  # connecting says better what is wrong, and a socket is not read
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line, for programs.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would happen.")]
Reason = Annotated[
    str | None, typer.Option("--reason", help="Why; kept in the operator log. Asked for on a terminal.", metavar="TEXT")
]
Since = Annotated[
    datetime,
    typer.Option(
        "--since",
        parser=moment,
        help="Since when: a time in UTC, as in 2026-01-31T12:00:00, or how long ago, as in 90s, 1h30m, 7d.",
        metavar="TIME",
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="The TOML file [default: the environment alone].",
        metavar="FILE",
        readable=False,  # reading it says better what is wrong
    ),
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="POSTROOM_DATABASE_URL",
        help="The Postgres database; an address with a password belongs in the environment.",
        metavar="URL",
    ),
]
Url = Annotated[
    str | None, typer.Option("--url", envvar="POSTROOM_BROKER_URL", help="The broker's address.", metavar="URL")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        envvar=["POSTROOM_ADMIN_TOKEN_FILE", "POSTROOM_BROKER_TOKEN_FILE"],
        help="The file with the token to use.",
        readable=False,
        metavar="FILE",
    ),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        envvar="POSTROOM_MESH",
        help="The mesh [default: the token's].",
        metavar="SLUG",
        callback=named("mesh"),
    ),
]


class Reach(NamedTuple):
    """Which mesh is meant, at which broker, and who asks."""

    mesh: Mesh = None
    url: Url = None
    token_file: TokenFile = None


class NounGroup(TyperGroup):
    """The verbs of a noun; the help says of each what its docstring says first, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line or more for each verb."""
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(each.name, (each.help or "").split("\n\n")[0]) for each in commands if each])


def noun(help_text: str | None = None, **options: Any) -> typer.Typer:
    """Make the application of one noun, in the style of all of them."""
    return typer.Typer(
        cls=NounGroup,
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=help_text is not None,
        **options,
    )


def with_options(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """Make the command of a function that takes some of its options together, as a NamedTuple of them.

    Each field is an option; those `without` are not, and keep their defaults.
    """

    def expand(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
        for each in parameters:
            if not hasattr(each.annotation, "_field_defaults"):
                yield each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            hints, defaults = get_type_hints(each.annotation, include_extras=True), each.annotation._field_defaults
            fields = (each.replace(name=name, default=defaults[name], annotation=hints[name]) for name in hints)
            yield from expand(field for field in fields if field.name not in without)

    def gather(group: Any, given: dict[str, Any]) -> Any:
        hints = get_type_hints(group)
        groups = {name: gather(hint, given) for name, hint in hints.items() if hasattr(hint, "_field_defaults")}
        return group(**groups, **{name: given.pop(name) for name in hints if name in given})

    own = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        for name, each in own.parameters.items():
            if hasattr(each.annotation, "_field_defaults"):
                given[name] = gather(each.annotation, given)
        command(**given)

    parameters = list(expand(own.parameters.values()))
    vars(run)["__signature__"] = own.replace(parameters=parameters)  # what Typer reads
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    return run
