"""`postroom log`: what operators changed at the broker (docs/contract/operate.md#operate-37)."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.connect import with_broker
from cli.noun import Json, TokenFile, Url, noun
from cli.output import listing
from postroom._wire.administration import MAX_PAGE
from postroom._wire.nouns import OPERATOR_LOG, LogQuery

app = noun()


@app.command()
def log(
    *,
    thing: Annotated[str | None, typer.Option("--noun", metavar="NOUN", help="Only of a kind, such as job.")] = None,
    verb: Annotated[str | None, typer.Option(metavar="VERB", help="Only by a verb, such as cancel.")] = None,
    actor: Annotated[str | None, typer.Option(metavar="WHO", help="Only by this one, such as administrator.")] = None,
    key: Annotated[str | None, typer.Option(metavar="KEY", help="Only of this thing, as the list shows it.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_PAGE, help="How many lines to show.")] = 50,
    url: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Show what operators changed at the broker, and why, the latest first.

    \b
        postroom log --noun job --limit 10
    """  # noqa: D301 - \b: as it stands
    query = LogQuery(noun=thing, verb=verb, actor=actor, key=key, limit=limit)
    listing(
        with_broker(url, token_file, lambda client: client.list_things(OPERATOR_LOG, query)).lines,
        ("AT", "BY", "VERB", "NOUN", "KEY", "OUTCOME", "REASON"),
        lambda one: (one.at, one.actor, one.verb, one.noun, one.key, one.outcome, one.reason),
        as_json=as_json,
    )
