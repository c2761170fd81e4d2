"""`postroom queue …`: administer queues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cli.connect import mesh_of, with_broker
from cli.noun import Json, Mesh, TokenFile, Url, Yes, named, noun
from cli.output import confirm, json_line, line, listing

if TYPE_CHECKING:
    from postroom import BrokerClient
    from postroom._wire.administration import Queue

app = noun("Administer queues.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="The queue: one to four words joined by dots.", callback=named("queue")),
]


@app.command()
def create(
    *, name: Name, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None
) -> None:
    """Create a queue."""

    async def work(client: BrokerClient) -> Queue:
        return await client.create_queue(await mesh_of(client, mesh), name)

    queue = with_broker(url, token_file, work)
    json_line(queue) if as_json else line(f"created queue {queue.name} in {queue.mesh}")


@app.command("list")
def list_(*, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None) -> None:
    """List the queues of a mesh."""

    async def work(client: BrokerClient) -> list[Queue]:
        return await client.list_queues(await mesh_of(client, mesh))

    listing(
        with_broker(url, token_file, work),
        ("QUEUE", "MESH", "CREATED"),
        lambda queue: (queue.name, queue.mesh, queue.created_at),
        as_json=as_json,
    )


@app.command()
def delete(*, name: Name, yes: Yes = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None) -> None:
    """Delete a queue; its messages stay in the history."""
    confirm(f"Delete the queue {name}?", yes=yes)

    async def work(client: BrokerClient) -> None:
        await client.delete_queue(await mesh_of(client, mesh), name)

    with_broker(url, token_file, work)
    line(f"deleted queue {name}")
