"""`postroom member …`: administer the identities of a mesh, and their tokens."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.connect import mesh_of, with_broker
from cli.noun import Json, Mesh, TokenFile, Url, Yes, named, noun
from cli.output import confirm, json_line, line, listing
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import BrokerClient
    from postroom._wire.administration import Member, MemberToken

app = noun("Administer the members of a mesh.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="The member.", callback=named("member"))]
TokenOut = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the token to this new file, mode 0600 [default: show it once]."),
]


@app.command()
def create(
    *,
    name: Name,
    admin: Annotated[bool, typer.Option("--admin", help="May administer its mesh.")] = False,
    token_out: TokenOut = None,
    as_json: Json = False,
    mesh: Mesh = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> None:
    """Create a member; its token is shown only once, and stored nowhere."""

    async def work(client: BrokerClient) -> MemberToken:
        return await client.create_member(await mesh_of(client, mesh), name, "admin" if admin else "member")

    _hand_over(token_out, as_json=as_json, issue=lambda: with_broker(url, token_file, work))


@app.command()
def rotate_token(
    *,
    name: Name,
    token_out: TokenOut = None,
    yes: Yes = False,
    as_json: Json = False,
    mesh: Mesh = None,
    url: Url = None,
    token_file: TokenFile = None,
) -> None:
    """Give a member a new token; the old one is refused from then on."""
    confirm(f"Replace the token of {name}, so that what uses the old one is refused?", yes=yes)

    async def work(client: BrokerClient) -> MemberToken:
        return await client.rotate_member_token(await mesh_of(client, mesh), name)

    _hand_over(token_out, as_json=as_json, issue=lambda: with_broker(url, token_file, work))


@app.command("list")
def list_(*, as_json: Json = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None) -> None:
    """List the members of a mesh, the revoked ones too."""

    async def work(client: BrokerClient) -> list[Member]:
        return await client.list_members(await mesh_of(client, mesh))

    listing(
        with_broker(url, token_file, work),
        ("MEMBER", "MESH", "ROLE", "CREATED", "REVOKED"),
        lambda member: (member.name, member.mesh, member.role, member.created_at, member.revoked_at),
        as_json=as_json,
    )


@app.command()
def revoke(*, name: Name, yes: Yes = False, mesh: Mesh = None, url: Url = None, token_file: TokenFile = None) -> None:
    """End a member's access permanently; its name stays taken."""
    confirm(f"Revoke {name} permanently?", yes=yes)

    async def work(client: BrokerClient) -> None:
        await client.revoke_member(await mesh_of(client, mesh), name)

    with_broker(url, token_file, work)
    line(f"revoked {name}")


def _hand_over(token_out: Path | None, *, as_json: bool, issue: Callable[[], MemberToken]) -> None:
    """Have a token issued and give it to whoever asked; the file is made first, so that no token is issued in vain."""
    if token_out is None:
        issued = issue()
        json_line(issued) if as_json else line(issued.token)
        return
    try:
        descriptor = os.open(token_out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Fatal(Exit.USAGE, f"cannot write {token_out}: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as stream:
            issued = issue()
            stream.write(f"{issued.token}\n")
    except BaseException:
        token_out.unlink()
        raise
    line(f"the token of {issued.name} in {issued.mesh} is in {token_out}")
