"""`postroom consumer …`: give the messages of a stream to a handler behind HTTP, and see how far each consumer is."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from cli import completion
from cli.change import Change, asking, change_each, check_choice
from cli.noun import Config, Json, Reach, chosen_ids, noun, several
from cli.output import fields, listing, one_by_one
from postroom import BrokerClient
from postroom._wire.unpublished import CONSUMERS, ConsumerFilter, ConsumersQuery, Durable
from postroom._wire.words import ago
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import error_for

app = noun("Post messages to an HTTP handler; see how far each consumer is, pause, resume and delete it.")

COLUMNS: Final = ("CONSUMER", "STREAM", "WAITING", "IN HAND", "OLDEST", "LAST SEEN", "STATE")


class Described(NamedTuple):
    """A consumer without a file."""

    context: Annotated[
        str | None,
        typer.Option(help="Without a file: the mesh whose events.", metavar="SLUG", autocompletion=completion.meshes),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(help="Without a file: the consumer's name; consumers of one name share the work.", metavar="NAME"),
    ] = None
    handler: Annotated[
        str | None, typer.Option(help="Without a file: where messages are posted to.", metavar="URL")
    ] = None
    stream: Annotated[
        str | None, typer.Option(help="Without a file: the stream [default: <CONTEXT>_EVENTS].", metavar="NAME")
    ] = None
    subject: Annotated[
        list[str] | None, typer.Option(help="Without a file: only these subjects [default: all].", metavar="FILTER")
    ] = None
    secret_file: Annotated[
        Path | None,
        typer.Option(help="Without a file: the secret that signs requests [default: unsigned].", metavar="FILE"),
    ] = None


@app.command("list")
def list_(*, reach: Reach, as_json: Json = False) -> None:
    """List the durable consumers of all kinds, whether they run or not, and how far behind each is."""

    def cells(one: Durable) -> tuple[Any, ...]:
        oldest, seen = ago(one.oldest_at), ago(one.seen_at)
        return (one.consumer, one.stream, one.waiting, one.in_hand, oldest, seen, one.state)

    listing(_find(reach), COLUMNS, cells, things="consumers", as_json=as_json)


@app.command()
def show(
    *,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The consumer (`postroom consumer list`), or STREAM/NAME.",
            autocompletion=completion.consumers,
        ),
    ],
    reach: Reach,
    as_json: Json = False,
) -> None:
    """Show a consumer: what waits for it and since when, what it has in hand, and whether it runs, or why not."""
    found = [one for one in _find(reach) if name in (one.consumer, one.id)]
    if not found:
        raise Fatal(Exit.NOT_FOUND, f"there is no consumer {name!r}: `postroom consumer list` shows them")
    one_by_one(found, _show, as_json=as_json)


Names = Annotated[list[str] | None, several("Consumers, or STREAM/NAME", completion.consumers, "[NAME]...")]


class Filters(NamedTuple):
    """The conditions that consumers match."""

    stream: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only those of this stream.", autocompletion=completion.streams)
    ] = None


def operate(verb: str, *, names: Names = None, filters: Filters, change: Change, reach: Reach) -> None:
    """Do `verb` to each chosen consumer; exit code 1 if it failed for some of several."""
    chosen, states = chosen_ids(names), CONSUMERS.verbs[verb].states
    check_choice("consumer", "consumer", chosen, change, filtered=filters != Filters())

    def find() -> list[str]:
        found = [one for one in _find(reach) if filters.stream in (None, one.stream)]
        return [one.id for one in found if ("active" if one.paused_by is None else "paused") in states]

    ask = asking(CONSUMERS, verb, ConsumerFilter(ids=chosen), reach, mesh=reach.mesh, find=find)
    change_each(CONSUMERS, verb, chosen, change, ask, things="consumers")


for _verb, _table in CONSUMERS.verbs.items():
    app.command(_verb, help=_table.effect)(partial(operate, _verb))


def _find(reach: Reach) -> list[Durable]:
    async def work(client: BrokerClient) -> list[Durable]:
        page = await client.list_things(CONSUMERS, ConsumersQuery(mesh=reach.mesh))
        if page.unread is not None:
            raise error_for(page.unread)
        return page.consumers

    return reach.broker.ask(work)


def _show(one: Durable) -> None:
    fields(
        [
            ("consumer", one.consumer),
            ("stream", one.stream),
            ("takes", ", ".join(one.filters)),
            ("state", one.state),
            ("waiting", one.waiting),
            ("in hand", one.in_hand),
            ("came before", one.again),
            ("begun", one.begun),
            ("oldest", one.oldest_at),
            ("last seen", one.seen_at),
        ]
    )


@app.command()
def run(*, config: Config = None, described: Described) -> None:
    """Consume until a signal says stop, with a config file (--config), or with --context, --name and --handler.

    Without a file, POSTROOM_NATS_URL and POSTROOM_DATABASE_URL name the servers, as `postroom up` sets them.
    """
    from cli.worker import become_worker, options  # noqa: PLC0415

    become_worker("consumer", *options(config=config, **described._asdict()))
