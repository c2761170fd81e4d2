"""`postroom mesh`, `member`, `operator`, `topic`, `topic webhook` and `queue`: administer what a broker has.

Meshes and operators need a token that may administer every mesh. Where no member is named, a subscription goes through
the daemon, for the member that it acts as.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Final, cast, get_args

import typer

from cli.connect import with_daemon
from cli.files import new_file
from cli.noun import BrokerPlace, Json, Reach, Socket, Yes, choice, file_name, named, noun
from cli.output import confirm, json_line, line, listing, note
from postroom._wire.administration import MemberToken, OperatorRole, OperatorToken, Role

_TOKEN_ROOM: Final = 256  # bytes: more than any token has

meshes = noun()
members = noun()
operators = noun("Administer who operates the broker: by looking, repairing or administering.")
topics = noun()
webhooks = noun("Administer the webhooks of a topic.")
queues = noun()
topics.add_typer(webhooks, name="webhook")


MeshName = Annotated[str, typer.Argument(metavar="SLUG", help="The mesh, in snake_case.", **named("mesh"))]
MemberName = Annotated[str, typer.Argument(metavar="NAME", help="The member.", **named("member"))]
OperatorName = Annotated[str, typer.Argument(metavar="NAME", help="The operator.", **named("operator"))]
TopicName = Annotated[str, typer.Argument(metavar="NAME", help="The topic, in snake_case.", **named("topic"))]
QueueName = Annotated[
    str, typer.Argument(metavar="NAME", help="The queue: one to four words joined by dots.", **named("queue"))
]
Subscriber = Annotated[
    str | None,
    typer.Argument(
        metavar="[MEMBER]", help="The member [default: the daemon's own, through its socket].", **named("member")
    ),
]
WebhookTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic, in snake_case.", **named("topic"))]
TokenOut = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the token to this new file, mode 0600 [default: show it once].", callback=file_name
    ),
]


@meshes.command("create")
def create_mesh(*, slug: MeshName, as_json: Json = False, broker: BrokerPlace) -> None:
    """Create a mesh."""
    mesh = broker.ask(lambda client: client.create_mesh(slug))
    json_line(mesh) if as_json else line(f"created mesh {mesh.slug}")


@meshes.command("list")
def list_meshes(*, as_json: Json = False, broker: BrokerPlace) -> None:
    """List the meshes."""
    found = broker.ask(lambda client: client.list_meshes())
    listing(found, ("MESH", "CREATED"), lambda mesh: (mesh.slug, mesh.created_at), things="meshes", as_json=as_json)


@meshes.command("delete")
def delete_mesh(*, slug: MeshName, yes: Yes = False, broker: BrokerPlace) -> None:
    """Delete a mesh that has no messages, dead letters or jobs, with its members, topics and queues."""
    confirm(f"Delete the mesh {slug} with its members, topics and queues?", yes=yes)
    broker.ask(lambda client: client.delete_mesh(slug))
    line(f"deleted mesh {slug}")


@members.command("create")
def create_member(
    *,
    name: MemberName,
    admin: Annotated[bool, typer.Option("--admin", help="May administer its mesh.")] = False,
    token_out: TokenOut = None,
    as_json: Json = False,
    reach: Reach,
) -> None:
    """Create a member; its token is shown only once, and stored nowhere."""
    role: Role = "admin" if admin else "member"
    issue = partial(reach.ask, lambda client, mesh: client.create_member(mesh, name, role))
    _issue_token(token_out, issue, as_json=as_json)


@members.command("rotate-token")
def rotate_token(
    *,
    name: MemberName,
    keep_old: Annotated[
        bool, typer.Option("--keep-old", help="Leave the old token valid until `retire-token` ends it.")
    ] = False,
    token_out: TokenOut = None,
    yes: Yes = False,
    as_json: Json = False,
    reach: Reach,
) -> None:
    """Give a member a new token; the old one is refused from then on, unless it is kept."""
    if not keep_old:
        confirm(f"Replace the token of {name}, so that what uses the old one is refused?", yes=yes)
    issue = partial(reach.ask, lambda client, mesh: client.rotate_member_token(mesh, name, keep_old=keep_old))
    _issue_token(token_out, issue, as_json=as_json)


@members.command("retire-token")
def retire_token(*, name: MemberName, yes: Yes = False, reach: Reach) -> None:
    """End the old one of a member's two tokens: what still uses it is refused from then on."""
    confirm(f"End the old token of {name}, so that what still uses it is refused?", yes=yes)
    reach.ask(lambda client, mesh: client.retire_member_token(mesh, name))
    line(f"the old token of {name} is refused from now on")


@members.command("list")
def list_members(*, as_json: Json = False, reach: Reach) -> None:
    """List the members of a mesh, the revoked ones too."""
    listing(
        reach.ask(lambda client, mesh: client.list_members(mesh)),
        ("MEMBER", "MESH", "ROLE", "CREATED", "REVOKED"),
        lambda member: (member.name, member.mesh, member.role, member.created_at, member.revoked_at),
        things="members",
        as_json=as_json,
    )


@members.command("revoke")
def revoke_member(*, name: MemberName, yes: Yes = False, reach: Reach) -> None:
    """End a member's access permanently; its name stays taken."""
    confirm(f"Revoke {name} permanently?", yes=yes)
    reach.ask(lambda client, mesh: client.revoke_member(mesh, name))
    line(f"revoked {name}")


@operators.command("create")
def create_operator(
    *,
    name: OperatorName,
    role: Annotated[
        str,
        typer.Option(
            metavar="ROLE",
            **choice("role", get_args(OperatorRole)),
            help="What it may do: look (at all but bodies), repair (and read those), or administer (everything).",
        ),
    ],
    mesh: Annotated[
        str | None, typer.Option(metavar="SLUG", **named("mesh"), help="Only in this mesh [default: in every mesh].")
    ] = None,
    token_out: TokenOut = None,
    as_json: Json = False,
    broker: BrokerPlace,
) -> None:
    """Create an operator; its token is shown only once, and stored nowhere."""
    may = cast("OperatorRole", role)
    issue = partial(broker.ask, lambda client: client.create_operator(name, may, mesh))
    _issue_token(token_out, issue, as_json=as_json)


@operators.command("rotate-token")
def rotate_operator_token(
    *, name: OperatorName, token_out: TokenOut = None, yes: Yes = False, as_json: Json = False, broker: BrokerPlace
) -> None:
    """Give an operator a new token; the old one is refused from then on."""
    confirm(f"Replace the token of {name}, so that the old one is refused?", yes=yes)
    issue = partial(broker.ask, lambda client: client.rotate_operator_token(name))
    _issue_token(token_out, issue, as_json=as_json)


@operators.command("list")
def list_operators(*, as_json: Json = False, broker: BrokerPlace) -> None:
    """List the operators, the revoked ones too."""
    listing(
        broker.ask(lambda client: client.list_operators()),
        ("OPERATOR", "ROLE", "MESH", "CREATED", "REVOKED"),
        lambda one: (one.name, one.role, one.mesh or "every mesh", one.created_at, one.revoked_at),
        things="operators",
        as_json=as_json,
    )


@operators.command("revoke")
def revoke_operator(*, name: OperatorName, yes: Yes = False, broker: BrokerPlace) -> None:
    """End an operator's access permanently; its name stays taken."""
    confirm(f"Revoke {name} permanently?", yes=yes)
    broker.ask(lambda client: client.revoke_operator(name))
    line(f"revoked {name}")


@topics.command("create")
def create_topic(*, name: TopicName, as_json: Json = False, reach: Reach) -> None:
    """Create a topic."""
    topic = reach.ask(lambda client, mesh: client.create_topic(mesh, name))
    json_line(topic) if as_json else line(f"created topic {topic.name} in {topic.mesh}")


@topics.command("list")
def list_topics(*, as_json: Json = False, reach: Reach) -> None:
    """List the topics of a mesh."""
    found = reach.ask(lambda client, mesh: client.list_topics(mesh))
    columns = ("TOPIC", "MESH", "SUBSCRIBERS", "CREATED")
    listing(found, columns, lambda t: (t.name, t.mesh, t.subscribers, t.created_at), things="topics", as_json=as_json)


@topics.command("delete")
def delete_topic(*, name: TopicName, yes: Yes = False, reach: Reach) -> None:
    """Delete a topic and its subscriptions; its messages stay in the history."""
    confirm(f"Delete the topic {name} and its subscriptions?", yes=yes)
    reach.ask(lambda client, mesh: client.delete_topic(mesh, name))
    line(f"deleted topic {name}")


@topics.command()
def subscribe(
    *, name: TopicName, member: Subscriber = None, as_json: Json = False, reach: Reach, socket: Socket = None
) -> None:
    """Let a member receive, and post to, a topic."""
    if member is None:
        made = with_daemon(socket, lambda client: client.subscribe(name))
    else:
        made = reach.ask(lambda client, mesh: client.subscribe(mesh, name, member))
    json_line(made) if as_json else line(f"{made.member} gets {made.topic}")


@topics.command()
def unsubscribe(*, name: TopicName, member: Subscriber = None, reach: Reach, socket: Socket = None) -> None:
    """End a member's subscription; it can be subscribed again."""
    if member is None:
        with_daemon(socket, lambda client: client.unsubscribe(name))
    else:
        reach.ask(lambda client, mesh: client.unsubscribe(mesh, name, member))
    line(f"{member or 'the member of this daemon'} is no longer subscribed to {name}")


@topics.command()
def subscribers(*, name: TopicName, as_json: Json = False, reach: Reach) -> None:
    """List the subscribers of a topic."""
    found = reach.ask(lambda client, mesh: client.list_subscriptions(mesh, name))
    columns = ("MEMBER", "TOPIC", "SINCE")
    listing(found, columns, lambda one: (one.member, one.topic, one.created_at), things="subscribers", as_json=as_json)


@webhooks.command()
def add(
    *,
    topic: WebhookTopic,
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="Where messages are posted to: http:// or https://.")
    ],
    as_json: Json = False,
    reach: Reach,
) -> None:
    """Post a topic's messages to an address from now on; the secret that signs them is shown only once."""
    made = reach.ask(lambda client, mesh: client.create_webhook(mesh, topic, address))
    if as_json:
        json_line(made)
        return
    note(f"webhook {made.id} receives {made.topic}; the secret that signs its requests is shown only once:")
    line(made.secret)


@webhooks.command("list")
def list_webhooks(*, topic: WebhookTopic, as_json: Json = False, reach: Reach) -> None:
    """List the webhooks of a topic."""
    found = reach.ask(lambda client, mesh: client.list_webhooks(mesh, topic))
    columns = ("ID", "TOPIC", "ADDRESS", "CREATED")
    listing(found, columns, lambda w: (w.id, w.topic, w.url, w.created_at), things="webhooks", as_json=as_json)


@webhooks.command()
def remove(
    *,
    topic: WebhookTopic,
    webhook: Annotated[str, typer.Argument(metavar="ID", help="The webhook's id, as `list` shows it.")],
    yes: Yes = False,
    reach: Reach,
) -> None:
    """Stop posting a topic's messages to an address; messages that wait for it are never posted."""
    confirm(f"Remove the webhook {webhook} of {topic}?", yes=yes)
    reach.ask(lambda client, mesh: client.delete_webhook(mesh, topic, webhook))
    line(f"removed webhook {webhook}")


@queues.command("create")
def create_queue(*, name: QueueName, as_json: Json = False, reach: Reach) -> None:
    """Create a queue."""
    queue = reach.ask(lambda client, mesh: client.create_queue(mesh, name))
    json_line(queue) if as_json else line(f"created queue {queue.name} in {queue.mesh}")


@queues.command("list")
def list_queues(*, as_json: Json = False, reach: Reach) -> None:
    """List the queues of a mesh."""
    found = reach.ask(lambda client, mesh: client.list_queues(mesh))
    columns = ("QUEUE", "MESH", "CREATED")
    listing(found, columns, lambda one: (one.name, one.mesh, one.created_at), things="queues", as_json=as_json)


@queues.command("delete")
def delete_queue(*, name: QueueName, yes: Yes = False, reach: Reach) -> None:
    """Delete a queue; its messages stay in the history."""
    confirm(f"Delete the queue {name}?", yes=yes)
    reach.ask(lambda client, mesh: client.delete_queue(mesh, name))
    line(f"deleted queue {name}")


def _issue_token(token_out: Path | None, issue: Callable[[], MemberToken | OperatorToken], *, as_json: bool) -> None:
    """Have a token issued and write it out; before it is issued, room for it is reserved in the file."""
    if token_out is None:
        issued = issue()
        json_line(issued) if as_json else line(issued.token)
        return
    with new_file(token_out) as stream:
        stream.write(bytes(_TOKEN_ROOM))  # a disk that is full says so now
        stream.flush()
        os.fsync(stream.fileno())
        issued = issue()
        stream.seek(0)
        stream.write(f"{issued.token}\n".encode("ascii"))
        stream.truncate()
    line(f"the token of {issued.name} in {issued.mesh or 'every mesh'} is in {token_out}")
