"""`postroom topic …`: administer topics, subscriptions and (`cli.webhook`) webhooks.

Where no member is named, a subscription goes through the daemon, for the member that it acts as.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.connect import mesh_of, with_broker, with_daemon
from cli.noun import Json, Mesh, Socket, TokenFile, Url, Yes, named, noun
from cli.output import confirm, json_line, line, listing
from cli.webhook import app as webhook

if TYPE_CHECKING:
    from postroom import BrokerClient
    from postroom._wire.administration import Subscription, Topic

app = noun("Administer topics and their subscribers.")
app.add_typer(webhook, name="webhook")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The topic, in snake_case.", callback=named("topic"))]
Member = Annotated[
    str | None,
    typer.Argument(
        metavar="[MEMBER]",
        help="The member [default: the daemon's own, through its socket].",
        callback=named("member"),
    ),
]


@app.command()
def create(
    *, name: Name, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None
) -> None:
    """Create a topic."""

    async def work(client: BrokerClient) -> Topic:
        return await client.create_topic(await mesh_of(client, mesh), name)

    topic = with_broker(url, token_file, work)
    json_line(topic) if as_json else line(f"created topic {topic.name} in {topic.mesh}")


@app.command("list")
def list_(*, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None) -> None:
    """List the topics of a mesh."""

    async def work(client: BrokerClient) -> list[Topic]:
        return await client.list_topics(await mesh_of(client, mesh))

    listing(
        with_broker(url, token_file, work),
        ("TOPIC", "MESH", "SUBSCRIBERS", "CREATED"),
        lambda topic: (topic.name, topic.mesh, topic.subscribers, topic.created_at),
        as_json=as_json,
    )


@app.command()
def delete(*, name: Name, yes: Yes = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None) -> None:
    """Delete a topic and its subscriptions; its messages stay in the history."""
    confirm(f"Delete the topic {name} and its subscriptions?", yes=yes)

    async def work(client: BrokerClient) -> None:
        await client.delete_topic(await mesh_of(client, mesh), name)

    with_broker(url, token_file, work)
    line(f"deleted topic {name}")


@app.command()
def subscribe(
    *,
    name: Name,
    member: Member = None,
    as_json: Json = False,
    mesh: Mesh = None,
    url: Url = None,
    token_file: TokenFile = None,
    socket: Socket = None,
) -> None:
    """Let a member receive, and post to, a topic."""

    async def work(client: BrokerClient) -> Subscription:
        return await client.subscribe(await mesh_of(client, mesh), name, member)

    if member is None:
        subscription = with_daemon(socket, lambda client: client.subscribe(name))
    else:
        subscription = with_broker(url, token_file, work)
    json_line(subscription) if as_json else line(f"{subscription.member} gets {subscription.topic}")


@app.command()
def unsubscribe(
    *,
    name: Name,
    member: Member = None,
    mesh: Mesh = None,
    url: Url = None,
    token_file: TokenFile = None,
    socket: Socket = None,
) -> None:
    """End a member's subscription; it can be subscribed again."""

    async def work(client: BrokerClient) -> None:
        await client.unsubscribe(await mesh_of(client, mesh), name, str(member))

    if member is None:
        with_daemon(socket, lambda client: client.unsubscribe(name))
    else:
        with_broker(url, token_file, work)
    line(f"{member or 'the member of this daemon'} is no longer subscribed to {name}")


@app.command()
def subscribers(
    *, name: Name, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None
) -> None:
    """List the subscribers of a topic."""

    async def work(client: BrokerClient) -> list[Subscription]:
        return await client.list_subscriptions(await mesh_of(client, mesh), name)

    listing(
        with_broker(url, token_file, work),
        ("MEMBER", "TOPIC", "SINCE"),
        lambda subscription: (subscription.member, subscription.topic, subscription.created_at),
        as_json=as_json,
    )
