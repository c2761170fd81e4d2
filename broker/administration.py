"""Administration of a broker, from meshes to queues (docs/contract/accept.md#accept-4).

The table of routes says who may call; `own_mesh` checks here that a member stays in its own mesh.
"""

import base64
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from aiohttp import web

from broker.authentication import PRINCIPAL, Authentication, Member, digest, new_token, own_mesh
from broker.database import QUERIES
from broker.operator import NATS_UNREACHABLE, PATIENCE, READ, WRITE, Handlers, Nats, missing
from broker.requests import decode_body
from postroom._wire import administration as api
from postroom._wire.dead_letters import LetterFilter
from postroom.chassis.postgres import Connection, uuid_of
from postroom.chassis.routes import Route, decode_query, json_response
from postroom.delivery.dead_letters.operations import LetterOperations
from postroom.delivery.http.addresses import Guard
from postroom.delivery.programs import forget_daemons
from postroom.errors import Conflict, NotFound, NotPermitted, PostroomError

MOST_PER_TOPIC: Final = 10  # webhooks: each is a consumer at every worker


@dataclass(frozen=True, eq=False)
class Administration(Handlers):
    """The handlers of the administration routes."""

    _authentication: Authentication
    _nats: Nats

    async def whoami(self, request: web.Request) -> web.Response:
        """`GET /v1/whoami`."""
        principal = request[PRINCIPAL]
        return json_response(api.WhoAmI(actor=principal.actor, role=principal.role, mesh=principal.mesh))

    async def create_mesh(self, request: web.Request) -> web.Response:
        """`POST /v1/meshes`."""
        wanted = await decode_body(request, api.CreateMesh)
        async with self.changing(request, "create", "mesh", wanted.slug) as connection:
            row = await connection.fetchrow(QUERIES["create_mesh"], wanted.slug)
            if row is None:
                raise _exists("mesh", wanted.slug)
        return json_response(api.Mesh(**row), 201)

    async def list_meshes(self, request: web.Request) -> web.Response:
        """`GET /v1/meshes`."""
        async with self.reading(request) as connection:
            rows = await connection.fetch(QUERIES["list_meshes"])
        return json_response(api.MeshList(meshes=[api.Mesh(**row) for row in rows]))

    async def delete_mesh(self, request: web.Request) -> web.Response:
        """`DELETE /v1/meshes/{mesh}`; 409 while a new mesh of its name would have something of it."""
        slug = request.match_info["mesh"]
        async with (
            self._nats.opened(PATIENCE) as (js, unread),
            self.changing(request, "delete", "mesh", slug) as connection,
        ):
            # An accept that waited for the mesh would hold its numbers, which go with it.
            await connection.execute(QUERIES["accept_alone"], await _mesh_id(connection, slug))
            mesh_id = await _there("mesh", slug, connection, QUERIES["lock_mesh"], slug)
            (holds,) = await connection.fetch(QUERIES["mesh_holds"], mesh_id, slug)
            if holds["messages"]:
                why = f"the mesh {slug} still has messages, or ids of some by which duplicates are recognised"
                raise Conflict.of("mesh_holds_messages", f"{why}: delete it again once retention has deleted the last")
            letters = LetterOperations(connection, js, slug, actor=request[PRINCIPAL].actor)
            if (await letters.page(LetterFilter(), limit=1)).letters:
                why = f"the mesh {slug} still has dead letters: settle them first (`postroom dlq list --mesh {slug}`)"
                raise Conflict.of("mesh_holds_letters", why)
            if holds["replays"]:
                raise Conflict.of("mesh_holds_letters", _waiting("replays", slug))
            if unread is not None and unread.code == NATS_UNREACHABLE:  # there may be more in their stream
                raise PostroomError(unread)
            if holds["jobs"]:
                why = f"the mesh {slug} still has jobs: delete it again once retention has deleted the last of them"
                raise Conflict.of("mesh_holds_jobs", why)
            if holds["events"]:
                raise Conflict.of("mesh_holds_messages", _waiting("events", slug))
            await connection.execute(QUERIES["delete_mesh"], mesh_id)
            await forget_daemons(connection, slug)
        self._authentication.forget()
        return web.Response(status=204)

    async def create_member(self, request: web.Request) -> web.Response:
        """`POST /v1/members`: the answer is the only place where the token is shown."""
        wanted = await decode_body(request, api.CreateMember)
        mesh = own_mesh(request[PRINCIPAL], wanted.mesh)
        token = new_token()
        async with self.changing(request, "create", "member", mesh, wanted.name) as connection:
            values = (await _mesh_id(connection, mesh, hold=True), wanted.name, wanted.role, digest(token))
            if await connection.fetchval(QUERIES["create_member"], *values) is None:
                raise _exists("member", wanted.name, with_token=True)
        return json_response(api.MemberToken(mesh=mesh, name=wanted.name, role=wanted.role, token=token), 201)

    async def list_members(self, request: web.Request) -> web.Response:
        """`GET /v1/members?mesh=`."""
        mesh = asked_mesh(request)
        async with self.reading(request) as connection:
            rows = await connection.fetch(QUERIES["list_members"], await _mesh_id(connection, mesh))
        return json_response(api.MemberList(members=[api.Member(mesh=mesh, **row) for row in rows]))

    async def revoke_member(self, request: web.Request) -> web.Response:
        """`DELETE /v1/members/{mesh}/{name}`: its token is refused from now on, and its name stays taken."""
        mesh, name = path_mesh(request), request.match_info["name"]
        async with self.changing(request, "revoke", "member", mesh, name) as connection:
            mesh_id = await _mesh_id(connection, mesh, hold=True)
            await _there("member", name, connection, QUERIES["revoke_member"], mesh_id, name)
            await forget_daemons(connection, mesh, name)
        self._authentication.forget()
        return web.Response(status=204)

    async def rotate_token(self, request: web.Request) -> web.Response:
        """`POST /v1/members/{mesh}/{name}/token`: by an admin, or by the member itself.

        With `keep_old` the old token stays valid until it is retired; a member has two tokens at most.
        """
        mesh, name = path_mesh(request), request.match_info["name"]
        keep = decode_query(request, api.RotateQuery).keep_old
        _require_self_or_admin(request, name)
        token, verb = new_token(), "add-token" if keep else "rotate-token"
        async with self.changing(request, verb, "member", mesh, name) as connection:
            mesh_id = await _mesh_id(connection, mesh, hold=True)
            query = QUERIES["add_token"] if keep else QUERIES["rotate_token"]
            role = await connection.fetchval(query, mesh_id, name, digest(token))
            if role is None:
                if not keep or not await connection.fetchval(QUERIES["has_member"], mesh_id, name):
                    raise missing("member", name)
                sentence = (
                    f"the member {name} has two tokens already: `postroom member retire-token {name}` ends the old "
                    f"one; if the new one was lost, `postroom member rotate-token {name}` replaces both"
                )
                raise Conflict.of("two_tokens", sentence)
        self._authentication.forget()
        return json_response(api.MemberToken(mesh=mesh, name=name, role=role, token=token))

    async def retire_token(self, request: web.Request) -> web.Response:
        """`DELETE /v1/members/{mesh}/{name}/old_token`: by an admin, or by the member itself."""
        mesh, name = path_mesh(request), request.match_info["name"]
        _require_self_or_admin(request, name)
        async with self.changing(request, "retire-token", "member", mesh, name) as connection:
            mesh_id = await _mesh_id(connection, mesh, hold=True)
            if await connection.fetchval(QUERIES["retire_token"], mesh_id, name) is None:
                sentence = f"there is no member {name} with an old token in the mesh {mesh}: see `postroom member list`"
                raise NotFound.of("no_old_token", sentence)
        self._authentication.forget()
        return web.Response(status=204)

    async def subscribe(self, request: web.Request) -> web.Response:
        """`POST /v1/topics/{mesh}/{name}/subscriptions`: 201, or 200 where the member was subscribed already."""
        wanted = await decode_body(request, api.Subscribe)
        mesh, topic = path_mesh(request), request.match_info["name"]
        principal, member = request[PRINCIPAL], wanted.member
        if member is not None:
            _require_self_or_admin(request, member)
        elif isinstance(principal, Member):
            member = principal.name
        else:
            sentence = f"{principal.actor} is not a member: pass the member to subscribe (`member`)"
            raise NotPermitted.of("member_required", sentence)
        async with self.changing(request, "subscribe", "topic", mesh, topic, member) as connection:
            topic_id, member_id = await _hold_subscription(connection, mesh, topic, member)
            row = await connection.fetchrow(QUERIES["subscribe"], topic_id, member_id)
            if row is None:  # another request subscribed or unsubscribed the member at the same moment
                sentence = "the subscription is being changed: try again"
                raise Conflict.of("subscription_changed", sentence, retryable=True)
        answer = api.Subscription(mesh=mesh, topic=topic, member=member, created_at=row["created_at"])
        return json_response(answer, 201 if row["created"] else 200)

    async def list_subscriptions(self, request: web.Request) -> web.Response:
        """`GET /v1/topics/{mesh}/{name}/subscriptions`."""
        mesh, topic = path_mesh(request), request.match_info["name"]
        async with self.reading(request) as connection:
            rows = await connection.fetch(QUERIES["list_subscriptions"], await _topic_id(connection, mesh, topic))
        found = [api.Subscription(mesh=mesh, topic=topic, member=name, created_at=since) for name, since in rows]
        return json_response(api.SubscriptionList(subscriptions=found))

    async def unsubscribe(self, request: web.Request) -> web.Response:
        """`DELETE /v1/topics/{mesh}/{name}/subscriptions/{member}`: by an admin, or by the member itself."""
        mesh, topic, member = path_mesh(request), request.match_info["name"], request.match_info["member"]
        _require_self_or_admin(request, member)
        async with self.changing(request, "unsubscribe", "topic", mesh, topic, member) as connection:
            topic_id, member_id = await _hold_subscription(connection, mesh, topic, member)
            if await connection.fetchval(QUERIES["unsubscribe"], topic_id, member_id) is None:
                raise NotFound.of(
                    "not_subscribed",
                    f"{member} is not subscribed to topic:{topic}: `postroom topic subscribers {topic}` shows them",
                )
        return web.Response(status=204)


@dataclass(frozen=True, eq=False)
class Destinations(Handlers):
    """The handlers of the named destinations of a mesh: its topics, or its queues; their types and queries."""

    _noun: Literal["topic", "queue"]
    _wanted: type[api.CreateTopic | api.CreateQueue]
    _thing: type[Any]
    _things: type[Any]
    _create: str
    _find: str
    _delete: str

    def routes(self) -> Sequence[Route]:
        """Return the routes that create, list and delete them."""
        path = f"/v1/{self._noun}s"
        return [
            Route("POST", path, self.create, "administer", f"Create a {self._noun}",
                  body=self._wanted, answers={201: self._thing}, problems=WRITE),
            Route("GET", path, self.list, "reader", f"List the {self._noun}s of a mesh",
                  query=api.MeshQuery, answers={200: self._things}, problems=READ),
            Route("DELETE", f"{path}/{{mesh}}/{{name}}", self.delete, "administer",
                  f"Delete a {self._noun}; its messages stay in the history", answers={204: None}, problems=WRITE),
        ]  # fmt: skip

    async def create(self, request: web.Request) -> web.Response:
        """`POST /v1/topics`, say."""
        wanted = await decode_body(request, self._wanted)
        mesh, name = own_mesh(request[PRINCIPAL], wanted.mesh), wanted.name
        async with self.changing(request, "create", self._noun, mesh, name) as connection:
            row = await connection.fetchrow(self._create, await _mesh_id(connection, mesh, hold=True), name)
            if row is None:
                raise _exists(self._noun, name)
        return json_response(self._thing(mesh=mesh, **row), 201)

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/topics?mesh=`, say."""
        mesh = asked_mesh(request)
        async with self.reading(request) as connection:
            rows = await connection.fetch(self._find, await _mesh_id(connection, mesh))
        found = [self._thing(mesh=mesh, **row) for row in rows]
        return json_response(self._things(**{f"{self._noun}s": found}))

    async def delete(self, request: web.Request) -> web.Response:
        """`DELETE /v1/topics/{mesh}/{name}`, say, with its subscriptions; its messages stay in the history."""
        mesh, name = path_mesh(request), request.match_info["name"]
        async with self.changing(request, "delete", self._noun, mesh, name) as connection:
            mesh_id = await _mesh_id(connection, mesh, hold=True)
            await _there(self._noun, name, connection, self._delete, mesh_id, name)
        return web.Response(status=204)


@dataclass(frozen=True, eq=False)
class Operators(Handlers):
    """The handlers of the routes of operators."""

    _authentication: Authentication

    async def create_operator(self, request: web.Request) -> web.Response:
        """`POST /v1/operators`: the answer is the only place where the token is shown."""
        wanted = await decode_body(request, api.CreateOperator)
        token, may = new_token(), f"may {wanted.role} in {wanted.mesh or 'every mesh'}"
        async with self.changing(request, "create", "operator", wanted.name, outcome=may) as connection:
            mesh_id = None if wanted.mesh is None else await _mesh_id(connection, wanted.mesh, hold=True)
            values = (wanted.name, wanted.role, mesh_id, digest(token))
            if await connection.fetchval(QUERIES["create_operator"], *values) is None:
                raise _exists("operator", wanted.name, with_token=True)
        return json_response(api.OperatorToken(name=wanted.name, role=wanted.role, mesh=wanted.mesh, token=token), 201)

    async def list_operators(self, request: web.Request) -> web.Response:
        """`GET /v1/operators`."""
        async with self.reading(request) as connection:
            rows = await connection.fetch(QUERIES["list_operators"])
        return json_response(api.OperatorList(operators=[api.Operator(**row) for row in rows]))

    async def revoke_operator(self, request: web.Request) -> web.Response:
        """`DELETE /v1/operators/{name}`: its token is refused from now on, and its name stays taken."""
        name = request.match_info["name"]
        async with self.changing(request, "revoke", "operator", name) as connection:
            await _there("operator", name, connection, QUERIES["revoke_operator"], name)
        self._authentication.forget()
        return web.Response(status=204)

    async def rotate_operator_token(self, request: web.Request) -> web.Response:
        """`POST /v1/operators/{name}/token`."""
        name, token = request.match_info["name"], new_token()
        async with self.changing(request, "rotate-token", "operator", name) as connection:
            row = await connection.fetchrow(QUERIES["rotate_operator_token"], name, digest(token))
            if row is None:
                raise missing("operator", name)
        self._authentication.forget()
        return json_response(api.OperatorToken(name=name, token=token, **row))


@dataclass(frozen=True, eq=False)
class Webhooks(Handlers):
    """The handlers of the webhook routes."""

    _guard: Guard

    async def create_webhook(self, request: web.Request) -> web.Response:
        """`POST /v1/topics/{mesh}/{name}/webhooks`: the answer is the only place where the secret is shown."""
        wanted = await decode_body(request, api.CreateWebhook)
        mesh, topic = path_mesh(request), request.match_info["name"]
        await self._guard.check(wanted.url)
        # Libraries of Standard Webhooks refuse text that is not base64, padding included.
        secret = f"whsec_{base64.b64encode(secrets.token_bytes(32)).decode()}"
        async with self.changing(request, "create", "webhook", mesh, topic) as connection:
            topic_id = await _topic_id(connection, mesh, topic, hold=True)
            await _there("topic", topic, connection, QUERIES["lock_topic"], topic_id)
            row = await connection.fetchrow(QUERIES["create_webhook"], topic_id, wanted.url, secret, MOST_PER_TOPIC)
            if row is None:
                raise Conflict.of("too_many_webhooks", f"topic:{topic} has {MOST_PER_TOPIC} webhooks: delete one")
        made = api.NewWebhook(
            id=str(row["id"]), mesh=mesh, topic=topic, url=wanted.url, created_at=row["created_at"], secret=secret
        )
        return json_response(made, 201)

    async def list_webhooks(self, request: web.Request) -> web.Response:
        """`GET /v1/topics/{mesh}/{name}/webhooks`."""
        mesh, topic = path_mesh(request), request.match_info["name"]
        async with self.reading(request) as connection:
            rows = await connection.fetch(QUERIES["list_webhooks"], await _topic_id(connection, mesh, topic))
        found = [api.Webhook(id=str(key), mesh=mesh, topic=topic, url=url, created_at=at) for key, url, at in rows]
        return json_response(api.WebhookList(webhooks=found))

    async def delete_webhook(self, request: web.Request) -> web.Response:
        """`DELETE /v1/topics/{mesh}/{name}/webhooks/{webhook}`: nothing is posted there once the workers know."""
        mesh, topic, webhook = path_mesh(request), request.match_info["name"], request.match_info["webhook"]
        async with self.changing(request, "delete", "webhook", mesh, topic, webhook) as connection:
            topic_id = await _topic_id(connection, mesh, topic, hold=True)
            key = uuid_of(webhook)
            if key is None or not await connection.fetchval(QUERIES["delete_webhook"], topic_id, key):
                why = f"the topic has no webhook {webhook[:64]!r}: `postroom topic webhook list {topic}` shows them"
                raise NotFound.of("webhook_not_found", why)
        return web.Response(status=204)


def asked_mesh(request: web.Request) -> str:
    """Return the mesh in the query, or the caller's own."""
    return own_mesh(request[PRINCIPAL], decode_query(request, api.MeshQuery).mesh)


def path_mesh(request: web.Request) -> str:
    """Return the mesh in the path, which must be the caller's own."""
    return own_mesh(request[PRINCIPAL], request.match_info["mesh"])


def _require_self_or_admin(request: web.Request, name: str) -> None:
    principal = request[PRINCIPAL]
    if isinstance(principal, Member) and principal.role == "member" and principal.name != name:
        detail = f"only an admin of the mesh may do this for {name}: use the token of one"
        raise NotPermitted.of("not_permitted", detail)


async def _there(noun: str, name: str, connection: Connection, query: str, *values: object) -> Any:
    """Return the value of a query that finds or changes a thing; raises `NotFound` where there is no such thing."""
    if (found := await connection.fetchval(query, *values)) is None:
        raise missing(noun, name)
    return found


async def _mesh_id(connection: Connection, slug: str, *, hold: bool = False) -> int:
    """Return the id of a mesh; one that is to be changed is held until the transaction ends, before anything it has."""
    return int(await _there("mesh", slug, connection, QUERIES["hold_mesh"] if hold else QUERIES["find_mesh"], slug))


async def _topic_id(connection: Connection, mesh: str, topic: str, *, hold: bool = False) -> int:
    mesh_id = await _mesh_id(connection, mesh, hold=hold)
    query = QUERIES["hold_topic"] if hold else QUERIES["find_topic"]
    return int(await _there("topic", topic, connection, query, mesh_id, topic))


async def _hold_subscription(connection: Connection, mesh: str, topic: str, member: str) -> tuple[int, int]:
    topic_id, mesh_id = await _topic_id(connection, mesh, topic, hold=True), await _mesh_id(connection, mesh, hold=True)
    return topic_id, await _there("member", member, connection, QUERIES["hold_member"], mesh_id, member)


def _waiting(source: str, mesh: str) -> str:
    refused = f"`postroom worker {source} list --mesh {mesh}` shows those that are refused"
    return f"{source} of the mesh {mesh} wait to be published: delete it again once a worker has done so ({refused})"


def _exists(noun: str, name: str, *, with_token: bool = False) -> Conflict:
    detail = f"the {noun} {name} exists already: choose another name, or use that one"
    if with_token:  # as the caller may have created it, by a request whose answer was lost
        detail += f" (a revoked {noun} keeps its name); if its token was lost, `postroom {noun} rotate-token {name}` "
        detail += "issues another"
    return Conflict.of(f"{noun}_exists", detail)
