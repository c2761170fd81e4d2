"""`postroom topic webhook …`: administer where the messages of a topic are posted to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.connect import mesh_of, with_broker
from cli.noun import Json, Mesh, TokenFile, Url, Yes, named, noun
from cli.output import confirm, json_line, line, listing, note

if TYPE_CHECKING:
    from postroom import BrokerClient
    from postroom._wire.administration import NewWebhook, Webhook

app = noun("Administer the webhooks of a topic.")

Topic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic, in snake_case.", callback=named("topic"))]
Address = Annotated[str, typer.Argument(metavar="ADDRESS", help="Where messages are posted to: http:// or https://.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="The webhook's id, as `list` shows it.")]


@app.command()
def add(
    *,
    topic: Topic,
    address: Address,
    as_json: Json = False,
    mesh: Mesh = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> None:
    """Post a topic's messages to an address from now on; the secret that signs them is shown only once."""

    async def work(client: BrokerClient) -> NewWebhook:
        return await client.create_webhook(await mesh_of(client, mesh), topic, address)

    webhook = with_broker(url, token_file, work)
    if as_json:
        json_line(webhook)
        return
    note(f"webhook {webhook.id} receives {webhook.topic}; the secret that signs its requests is shown only once:")
    line(webhook.secret)


@app.command("list")
def list_(
    *, topic: Topic, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None
) -> None:
    """List the webhooks of a topic."""

    async def work(client: BrokerClient) -> list[Webhook]:
        return await client.list_webhooks(await mesh_of(client, mesh), topic)

    listing(
        with_broker(url, token_file, work),
        ("ID", "TOPIC", "ADDRESS", "CREATED"),
        lambda webhook: (webhook.id, webhook.topic, webhook.url, webhook.created_at),
        as_json=as_json,
    )


@app.command()
def remove(
    *,
    topic: Topic,
    webhook: Id,
    yes: Yes = False,
    mesh: Mesh = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> None:
    """Stop posting a topic's messages to an address; messages that wait for it are never posted."""
    confirm(f"Remove the webhook {webhook} of {topic}?", yes=yes)

    async def work(client: BrokerClient) -> None:
        await client.delete_webhook(await mesh_of(client, mesh), topic, webhook)

    with_broker(url, token_file, work)
    line(f"removed webhook {webhook}")
