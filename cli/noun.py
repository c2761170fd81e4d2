"""What every noun of the command line is made of: its Typer application, the options that several verbs share.

Durations, times and rates are read as people write them. Which things a verb means are ids on the command line, ids
from standard input (`-`), or all that a filter matches.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.models import TyperPath

from cli import completion
from cli.connect import PATIENCE, TIMEOUT, TOKEN_FILES, read_token
from cli.output import json_line, listing, note
from postroom._wire.ids import MAX_ID_LENGTH
from postroom._wire.names import check_name
from postroom._wire.sends import MAX_PAGE
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import InvalidMessage

if TYPE_CHECKING:
    from postroom import BrokerClient
    from postroom.delivery.applications import Application

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., None])

_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_DURATION: Final = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?[smhdw])+")
_PART: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")
_RATE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:/s)?")
_MOST_SECONDS: Final = 100 * 365.25 * 86400  # beyond a hundred years it is a slip of the pen
MAX_LINE: Final = 64 * 1024  # bytes of one line of standard input
_MAY_BE_EMPTY: Final = ("tenant", "topic", "group")  # options: these parts of a key of `once` may be


def duration(text: str) -> float:
    """Read `90s`, `1h30m`, `7d` as seconds."""
    if _DURATION.fullmatch(text) is None:
        raise typer.BadParameter(f"{text!r} is not a duration: write 90s, 15m, 1h30m, 7d or 2w")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(text))
    if seconds > _MOST_SECONDS:
        raise typer.BadParameter(f"{text!r} is longer than 100 years")
    return seconds


def time_of(text: str) -> datetime | None:
    """Read an RFC 3339 time, or a date, with its offset where it has one; None for anything else."""
    try:
        return datetime.fromisoformat(text.upper())  # Python reads no `z`
    except ValueError:
        return None


def moment(text: str) -> datetime:
    """Read a moment that is over: a time, in UTC unless it has an offset, or how long ago it was, as `duration`."""
    now = datetime.now(UTC)
    found = time_of(text)
    if found is None:
        if _DURATION.fullmatch(text) is None:
            raise typer.BadParameter(
                f"{text!r} is neither a time, as in 2026-01-31T12:00:00Z, nor how long ago it was, as in 90s, 1h30m, 7d"
            )
        return now - timedelta(seconds=duration(text))
    try:
        found = found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is out of range") from None
    if found > now:
        raise typer.BadParameter(f"{text!r} is in the future")
    return found


def age(text: str) -> dict[str, Any]:
    """Read the same as a condition of a filter, where a time stays one: only a duration needs the server's clock."""
    return {"older_than_seconds": duration(text)} if _DURATION.fullmatch(text) else {"before": moment(text)}


def recent(text: str) -> dict[str, Any]:
    """Read what `moment` reads as a condition too: how long ago a thing was, the clock that noted it has to say."""
    return {"last_seconds": duration(text)} if _DURATION.fullmatch(text) else {"since": moment(text)}


def rate(text: str) -> float:
    """Read `50/s` or `50` as messages a second."""
    match = _RATE.fullmatch(text)
    if match is None or not 0 < float(match[1]) < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a rate: write 50/s or 0.5/s")
    return float(match[1])


def choice(thing: str, words: Sequence[str]) -> dict[str, Any]:
    """Describe an option that is one of some words, in upper or lower case, which a shell offers."""

    def parse(text: str) -> str:
        for word in words:
            if text.lower() == word.lower():
                return word
        raise typer.BadParameter(f"{text!r} is not a {thing}: {', '.join(words)}")

    return {"parser": parse, "autocompletion": completion.words(words)}


def named(kind: Literal["mesh", "member", "operator", "topic", "queue"]) -> dict[str, Any]:
    """Describe an argument that is such a name, or an option that is several, for which a shell offers some."""

    def check(value: Any) -> Any:
        try:
            for name in value if isinstance(value, list) else [value]:
                if name is not None:
                    check_name(kind, name)
        except InvalidMessage as error:
            raise typer.BadParameter(str(error)) from error
        return value

    offered = {
        "mesh": completion.meshes,
        "member": completion.members,
        "operator": completion.operators,
        "topic": completion.topics,
        "queue": completion.queues,
    }
    return {"callback": check, "autocompletion": offered[kind]}


def file_name(file: Path | None) -> Path | None:
    """Check an argument that names a file to write."""
    if file is not None and str(file) == "-":
        raise typer.BadParameter("- is standard output elsewhere, and not the name of a file: name one")
    return file


Socket = Annotated[
    Path | None,
    typer.Option(
        "--socket", envvar="POSTROOM_SOCKET", help="The daemon's socket [default: the only one]", metavar="PATH"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per line, for programs.")]
All = Annotated[bool, typer.Option("--all", help="Everything that the filters match.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would happen.")]
Reason = Annotated[
    str | None, typer.Option("--reason", help="Why; kept in the operator log. Asked for on a terminal.", metavar="TEXT")
]
OlderThan = Annotated[
    dict[str, Any] | None,
    typer.Option("--older-than", parser=age, metavar="DURATION", help="Only older than 90s, 15m, 7d, or than a time."),
]
Since = Annotated[
    dict[str, Any],
    typer.Option(
        "--since",
        parser=recent,
        help="Since when: a time in UTC, as in 2026-01-31T12:00:00, or how long ago, as in 90s, 1h30m, 7d.",
        metavar="TIME",
    ),
]
Config = Annotated[
    Path | None, typer.Option("--config", help="The TOML file [default: the environment alone].", metavar="FILE")
]
OutboxDatabase = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="POSTROOM_OUTBOX_DATABASE_URL",
        help="The outbox in an application's own Postgres, postgresql://…; an address with a password belongs in the "
        "environment [default: that of the broker's database].",
        metavar="URL",
    ),
]
Url = Annotated[
    str | None, typer.Option("--url", envvar="POSTROOM_BROKER_URL", help="The broker's address.", metavar="URL")
]
TokenFile = Annotated[
    Path | None,
    typer.Option("--token-file", envvar=[*TOKEN_FILES], help="The file with the token to use.", metavar="FILE"),
]
Mesh = Annotated[
    str | None,
    typer.Option(
        "--mesh", envvar="POSTROOM_MESH", help="The mesh [default: the token's].", metavar="SLUG", **named("mesh")
    ),
]


def several(help_text: str, offered: Any, metavar: str = "[ID]...") -> Any:
    """Describe the argument that names things, of which a shell offers some."""
    help_text += "; `-` reads them from standard input."
    return typer.Argument(metavar=metavar, help=help_text, autocompletion=offered)


class Paging(NamedTuple):
    """How much of a list is shown, and where it begins."""

    limit: Annotated[int, typer.Option(min=1, help="How many to show.")] = 50
    everything: Annotated[bool, typer.Option("--all", help="All of them, without a limit.")] = False
    cursor: Annotated[str | None, typer.Option(help="Continue where the last list ended.")] = None

    def show(
        self,
        ask: Callable[[str | None, int], tuple[Sequence[T], str | None]],
        columns: Sequence[str],
        cells: Callable[[T], Sequence[Any]],
        *,
        things: str,
        as_json: bool,
    ) -> None:
        """Write a list that `ask` returns page by page, of at most so many, each with the cursor of the next.

        What goes on after the last page is said beside the list.
        """
        shown: list[T] = []
        count, cursor = 0, self.cursor
        while True:
            items, cursor = ask(cursor, MAX_PAGE if self.everything else min(MAX_PAGE, self.limit - count))
            count += len(items)
            if as_json:
                for item in items:
                    json_line(item)
            else:
                shown += items
            if cursor is None or (count == self.limit and not self.everything):
                break
        if not as_json:
            listing(shown, columns, cells, things=things, as_json=False)
        if cursor is not None:
            note(f"There are more {things}: --all, or --cursor {cursor}")


class BrokerPlace(NamedTuple):
    """The broker, and the token to ask it with."""

    url: Url = None
    token_file: TokenFile = None

    def ask(
        self, work: Callable[[BrokerClient], Awaitable[T]], *, patience: float = PATIENCE, timeout: float = TIMEOUT
    ) -> T:
        """Run `work` with a client of the broker; `patience` and `timeout` are in seconds."""
        import asyncio  # noqa: PLC0415 - the daemon's commands do without it

        from postroom import BrokerClient  # noqa: PLC0415

        if (url := self.url) is None:
            raise Fatal(Exit.USAGE, "no broker is configured: set POSTROOM_BROKER_URL, or --url")
        token = read_token(self.token_file)

        async def run() -> T:
            if timeout > TIMEOUT:  # else one that hangs would be waited for as long as what takes longest
                async with BrokerClient(url, token, patience=patience, timeout=TIMEOUT) as client:
                    await client.whoami()
            async with BrokerClient(url, token, patience=patience, timeout=timeout) as client:
                return await work(client)

        return asyncio.run(run())


class Reach(NamedTuple):
    """A mesh of the broker: the one named, else the token's."""

    mesh: Mesh = None
    broker: BrokerPlace = BrokerPlace()

    def ask(self, work: Callable[[BrokerClient, str], Awaitable[T]], *, timeout: float = TIMEOUT) -> T:
        """Run `work` with a client of the broker and the mesh."""

        async def run(client: BrokerClient) -> T:
            return await work(client, await self.mesh_of(client))

        return self.broker.ask(run, timeout=timeout)

    async def mesh_of(self, client: BrokerClient) -> str:
        """Return the mesh; raises `Fatal` where the token is for every mesh, and none is named."""
        if self.mesh is not None:
            return self.mesh
        caller = await client.whoami()
        if caller.mesh is None:
            sentence = f"name the mesh with --mesh, or set POSTROOM_MESH: the token of {caller.actor} is for every mesh"
            raise Fatal(Exit.USAGE, sentence)
        return caller.mesh


class OutboxPlace(NamedTuple):
    """Which outbox to ask: that in the broker's database, or one in an application's own, which is read directly."""

    database: OutboxDatabase = None
    broker: BrokerPlace = BrokerPlace()

    def ask(
        self,
        broker: Callable[[BrokerClient], Awaitable[T]],
        own: Callable[[Application], Awaitable[T]],
        *,
        timeout: float = TIMEOUT,
    ) -> T:
        """Ask the broker, or the application's database if one is named."""
        if (database := self.database) is None:
            return self.broker.ask(broker, timeout=timeout)
        import asyncio  # noqa: PLC0415

        from postroom.delivery.applications import open_application  # noqa: PLC0415

        async def run() -> T:
            async with open_application(database) as application:
                return await own(application)

        return asyncio.run(run())


class NounGroup(TyperGroup):
    """The verbs of a noun; the help says of each what its docstring says first, whole."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a line or more for each verb."""
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl([(each.name, (each.help or "").split("\n\n")[0]) for each in commands if each])


class VerbCommand(TyperCommand):
    """A verb; it refuses an empty value, as of a script's variable that is not set: `--state ""` would be here.

    It also refuses a second value of an option that takes one: the first would count for nothing.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Look at the words before a path is made of any of them."""
        given, _, order = self.make_parser(ctx).parse_args(args=list(args))
        if ctx.resilient_parsing:  # for completion, which has no words for a mistake
            return super().parse_args(ctx, args)
        for option in self.params:
            if isinstance(option.type, TyperPath):
                option.type.readable = False  # whoever opens it says better what is wrong, and a socket is not read
            values = given.get(option.name or "")
            if not isinstance(option, TyperOption):
                continue
            repeatable = option.multiple or (option.is_flag and not option.secondary_opts)
            if order.count(option) > 1 and not repeatable:
                raise typer.BadParameter("it is given twice: give it once", ctx=ctx, param_hint=option.opts[0])
            if option.name in _MAY_BE_EMPTY:
                continue
            if "" in (values if isinstance(values, list) else [values]):
                raise typer.BadParameter("it is empty: give a value, or omit it", ctx=ctx, param_hint=option.opts[0])
        return super().parse_args(ctx, args)


class Verbs(typer.Typer):
    """The application of a noun, whose commands are verbs."""

    def command(
        self, name: str | None = None, *, without: Collection[str] = (), **options: Any
    ) -> Callable[[Command], Command]:
        """Make a verb of a function, which may take some of its options together, as a NamedTuple of them.

        Each field is an option, or an argument; those `without` are not, and keep their defaults.
        """
        register = super().command(name, cls=VerbCommand, **options)

        def make(function: Command) -> Command:
            register(_with_options(function, without))
            return function

        return make


def noun(help_text: str | None = None, **options: Any) -> Verbs:
    """Make the application of one noun, in the style of all of them."""
    return Verbs(
        cls=NounGroup,
        help=help_text,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
        **options,
    )


def _with_options(command: Callable[..., None], without: Collection[str]) -> Callable[..., None]:
    def expand(parameters: Iterable[inspect.Parameter]) -> Iterator[inspect.Parameter]:
        for each in parameters:
            if not hasattr(each.annotation, "_field_defaults"):
                yield each.replace(kind=inspect.Parameter.KEYWORD_ONLY)
                continue
            hints, defaults = get_type_hints(each.annotation, include_extras=True), each.annotation._field_defaults
            fields = (
                each.replace(name=name, default=defaults.get(name, each.empty), annotation=hints[name])
                for name in hints
            )
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


def chosen_ids(arguments: Sequence[str] | None) -> list[str]:
    """Return the ids of the command line, `-` replaced by those of standard input, each once, in order.

    Where `-` brings none there is nothing to do, which is no mistake: the command ends, with exit code 0.
    """
    ids: dict[str, None] = {}
    for argument in arguments or ():
        ids.update(dict.fromkeys(ids_from_input() if argument == "-" else [argument]))
    if "" in ids:
        raise Fatal(Exit.USAGE, "an id is empty: name things by their ids")
    if arguments and not ids:
        note("there are no ids on standard input: nothing to do")
        raise typer.Exit
    return list(ids)


def ids_from_input() -> Iterator[str]:
    """Yield the ids on standard input: one a line, or the `id` of a line of JSON, as `outbox list --json` writes."""
    for number, text in enumerate(iter(lambda: sys.stdin.buffer.readline(MAX_LINE), b""), 1):
        words = text.strip()
        try:
            row_id = msgspec.json.decode(words)["id"] if words.startswith(b"{") else words.decode("ascii")
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError, RecursionError):
            row_id = None
        if not isinstance(row_id, str) or len(row_id) > MAX_ID_LENGTH:
            raise Fatal(Exit.USAGE, f"line {number} of standard input has no id: write one a line, or JSON with an id")
        if row_id:
            yield row_id
