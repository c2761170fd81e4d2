"""`postroom mesh …`: administer the tenants of a broker; needs the broker-wide administrator's token."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.connect import with_broker
from cli.noun import Json, TokenFile, Url, Yes, named, noun
from cli.output import confirm, json_line, line, listing

app = noun("Administer meshes.")

Slug = Annotated[str, typer.Argument(metavar="SLUG", help="The mesh, in snake_case.", callback=named("mesh"))]


@app.command()
def create(*, slug: Slug, as_json: Json = False, url: Url = None, token_file: TokenFile = None) -> None:
    """Create a mesh."""
    mesh = with_broker(url, token_file, lambda client: client.create_mesh(slug))
    json_line(mesh) if as_json else line(f"created mesh {mesh.slug}")


@app.command("list")
def list_(*, as_json: Json = False, url: Url = None, token_file: TokenFile = None) -> None:
    """List the meshes."""
    meshes = with_broker(url, token_file, lambda client: client.list_meshes())
    listing(meshes, ("MESH", "CREATED"), lambda mesh: (mesh.slug, mesh.created_at), as_json=as_json)


@app.command()
def delete(*, slug: Slug, yes: Yes = False, url: Url = None, token_file: TokenFile = None) -> None:
    """Delete a mesh that has no messages, with its members, topics and queues."""
    confirm(f"Delete the mesh {slug} with its members, topics and queues?", yes=yes)
    with_broker(url, token_file, lambda client: client.delete_mesh(slug))
    line(f"deleted mesh {slug}")
