"""Webhooks of a topic: registered, listed and deleted by an admin of its mesh; the worker delivers to them."""

from __future__ import annotations

import secrets
from typing import Final
from uuid import UUID

from aiohttp import web

from broker.administration import find_topic_id, missing, path_mesh
from broker.authentication import PRINCIPAL
from broker.database import QUERIES, Database
from broker.requests import changing, decode_body
from postroom._wire import administration as api
from postroom.chassis.routes import json_response
from postroom.delivery.http.addresses import Guard
from postroom.errors import Conflict, NotFound

MOST_PER_TOPIC: Final = 10  # each is a consumer at every worker


class Webhooks:
    """The handlers of the webhook routes."""

    def __init__(self, database: Database, guard: Guard) -> None:
        self._database = database
        self._guard = guard

    async def create_webhook(self, request: web.Request) -> web.Response:
        """`POST /v1/topics/{mesh}/{name}/webhooks`: the answer is the only place where the secret is shown."""
        wanted = await decode_body(request, api.CreateWebhook)
        mesh, topic = path_mesh(request), request.match_info["name"]
        await self._guard.check(wanted.url)
        secret = f"whsec_{secrets.token_urlsafe(32)}"
        async with changing(self._database, request) as connection:
            topic_id = await find_topic_id(connection, mesh, topic)
            if await connection.fetchval(QUERIES["lock_topic"], topic_id) is None:
                raise missing("topic", topic)
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
        async with self._database.read(request[PRINCIPAL].whose) as connection:
            rows = await connection.fetch(QUERIES["list_webhooks"], await find_topic_id(connection, mesh, topic))
        found = [api.Webhook(id=str(key), mesh=mesh, topic=topic, url=url, created_at=at) for key, url, at in rows]
        return json_response(api.WebhookList(webhooks=found))

    async def delete_webhook(self, request: web.Request) -> web.Response:
        """`DELETE /v1/topics/{mesh}/{name}/webhooks/{webhook}`: nothing is posted there once the workers know."""
        mesh, topic, webhook = path_mesh(request), request.match_info["name"], request.match_info["webhook"]
        async with changing(self._database, request) as connection:
            key = await find_topic_id(connection, mesh, topic), _uuid(webhook)
            if await connection.fetchval(QUERIES["delete_webhook"], *key) is None:
                raise _missing(webhook)
        return web.Response(status=204)


def _uuid(text: str) -> UUID:
    try:
        return UUID(text)
    except ValueError as error:
        raise _missing(text) from error


def _missing(webhook: str) -> NotFound:
    return NotFound.of("webhook_not_found", f"the topic has no webhook {webhook[:64]!r}")
