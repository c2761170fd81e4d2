"""What every noun of the command line is made of: its Typer application and the options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

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
