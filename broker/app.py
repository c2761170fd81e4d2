"""The broker's API: one table of routes, and the application built from it (docs/contract/accept.md#accept-1)."""

from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from types import MappingProxyType
from typing import Any, Final

from aiohttp import web

from broker.accept import AcceptService
from broker.administration import Administration, Destinations, Operators, Webhooks
from broker.authentication import Authentication, member_of
from broker.config import BrokerConfig
from broker.database import QUERIES, Database
from broker.dead_letters import DeadLetters
from broker.history import History, LookUp
from broker.jobs import Jobs
from broker.limiter import Limiter
from broker.metrics import CONTENT_TYPE, Metrics
from broker.once import Keys
from broker.operator import READ, WRITE, Nats, OperatorLog, routes_of
from broker.programs import Health, Minutes, Programs
from broker.requests import CONFIG, ROOM, decode_body, received
from broker.shares import Shares
from broker.trace import Traces
from broker.unpublished import Consumers, Sources, Unpublished
from postroom._wire import accept as wire
from postroom._wire import administration as api
from postroom._wire.dead_letters import DEAD_LETTERS, LetterCauses
from postroom._wire.jobs import JOBS, MessagePage, StartedJob, StartJob
from postroom._wire.nouns import OPERATOR_LOG
from postroom._wire.once import KEYS
from postroom._wire.programs import MINUTES, PROGRAMS, Report
from postroom._wire.sends import EndedRows
from postroom._wire.trace import Story
from postroom._wire.unpublished import CONSUMERS, SOURCES, UNPUBLISHED
from postroom.chassis.listener import may_be_gone
from postroom.chassis.routes import Access, Route, application, json_response, openapi
from postroom.delivery.http.addresses import Guard
from postroom.delivery.publication.postgres import DELIVERIES, EVENTS, REPLAYS

_ACCESS: Final = MappingProxyType(
    {
        "anyone": Access("anyone, without a token", "none"),
        "member": Access("a member of a mesh, about itself"),
        "reader": Access("everybody with a token"),
        "itself": Access("the member that it is about, and callers that may `administer` its mesh"),
        "look": Access("an operator of the mesh that may `look`, `repair` or `administer`; a mesh's admin"),
        "repair": Access("an operator of the mesh that may `repair` or `administer`; a mesh's admin"),
        "administer": Access("an operator of the mesh that may `administer`; a mesh's admin"),
        "broker_look": Access("an operator of every mesh"),
        "broker_repair": Access("an operator of every mesh that may `repair` or `administer`"),
        "broker_administer": Access("an operator of every mesh that may `administer`"),
    }
)
_BEARER: Final = "The token of a member or an operator, or the administrator's."
_ABOUT: Final = (
    "The requests of daemons, operators and readers. Every error is a problem (RFC 9457), with a stable `code`; "
    "docs/contract/accept.md has the rules."
)


@dataclass(frozen=True, kw_only=True)
class Services:
    """Everything that the handlers need."""

    config: BrokerConfig
    database: Database
    authentication: Authentication
    accepting: AcceptService
    limiter: Limiter
    metrics: Metrics
    health: Health
    guard: Guard


def build(services: Services) -> web.Application:
    """Build the application."""
    app = application(
        routes(services), services.authentication.authorize, client_max_size=services.config.max_request_bytes
    )
    app[CONFIG] = services.config
    app[ROOM] = Shares(services.config.buffered_bytes)
    return app


def routes(services: Services) -> list[Route]:
    """Return the table: method, path, handler, who may call, what goes in and out."""
    accept = _Accept(services)
    control = _Control(services)
    nats = Nats(services.config.nats)
    admin = Administration(services.database, services.authentication, nats)
    operators = Operators(services.database, services.authentication)
    history = History(services.database, services.accepting.slices)
    webhooks = Webhooks(services.database, services.guard)
    jobs = Jobs(services.database)
    letters = DeadLetters(services.database, nats)
    traces = Traces(services.database, nats)
    programs = Programs(services.database)
    topics = "/v1/topics/{mesh}/{name}"
    return [
        Route("POST", "/v1/accept", accept.accept, "member",
              "Accept a batch of messages from one member; an answer per message, in order",
              body=wire.AcceptBatch, answers={200: wire.AcceptResponse}, problems=(400, 401, 403, 408, 413, 415, 503)),
        Route("POST", "/v1/accepted", accept.accepted, "member",
              "Ask which of the member's own messages were accepted; writes nothing, costs no unit of a limit",
              body=wire.AcceptedQuery, answers={200: wire.AcceptResponse},
              problems=(400, 401, 403, 408, 413, 415, 503)),
        Route("GET", "/v1/features", accept.features, "member",
              "What this broker supports, and the member that the token belongs to",
              answers={200: wire.Features}, problems=(400, 401, 403, 503)),
        Route("GET", "/v1/whoami", admin.whoami, "reader", "The token's owner, and what it may do",
              answers={200: api.WhoAmI}, problems=(400, 401, 503)),
        Route("POST", "/v1/meshes", admin.create_mesh, "broker_administer", "Create a mesh",
              body=api.CreateMesh, answers={201: api.Mesh}, problems=WRITE),
        Route("GET", "/v1/meshes", admin.list_meshes, "broker_look", "List the meshes",
              answers={200: api.MeshList}, problems=READ),
        Route("DELETE", "/v1/meshes/{mesh}", admin.delete_mesh, "broker_administer",
              "Delete a mesh that has no messages", answers={204: None}, problems=(*WRITE, 502)),
        Route("POST", "/v1/operators", operators.create_operator, "broker_administer",
              "Create an operator, of one mesh or of all; its token is shown only once",
              body=api.CreateOperator, answers={201: api.OperatorToken}, problems=WRITE),
        Route("GET", "/v1/operators", operators.list_operators, "broker_look", "List the operators",
              answers={200: api.OperatorList}, problems=READ),
        Route("DELETE", "/v1/operators/{name}", operators.revoke_operator, "broker_administer",
              "Revoke an operator permanently", answers={204: None}, problems=WRITE),
        Route("POST", "/v1/operators/{name}/token", operators.rotate_operator_token, "broker_administer",
              "Give an operator a new token, shown only once", answers={200: api.OperatorToken}, problems=WRITE),
        Route("POST", "/v1/members", admin.create_member, "administer", "Create a member; its token is shown only once",
              body=api.CreateMember, answers={201: api.MemberToken}, problems=WRITE),
        Route("GET", "/v1/members", admin.list_members, "reader", "List the members of a mesh",
              query=api.MeshQuery, answers={200: api.MemberList}, problems=READ),
        Route("DELETE", "/v1/members/{mesh}/{name}", admin.revoke_member, "administer", "Revoke a member permanently",
              answers={204: None}, problems=WRITE),
        Route("POST", "/v1/members/{mesh}/{name}/token", admin.rotate_token, "itself",
              "Give a member a new token, shown only once; for an admin, or the member itself",
              query=api.RotateQuery, answers={200: api.MemberToken}, problems=WRITE),
        Route("DELETE", "/v1/members/{mesh}/{name}/old_token", admin.retire_token, "itself",
              "End the old one of two tokens; for an admin, or the member itself", answers={204: None}, problems=WRITE),
        *Destinations(services.database, "topic", api.CreateTopic, api.Topic, api.TopicList,
                      QUERIES["create_topic"], QUERIES["list_topics"], QUERIES["delete_topic"]).routes(),
        Route("POST", f"{topics}/subscriptions", admin.subscribe, "itself",
              "Subscribe a member; for an admin, or the member itself",
              body=api.Subscribe, answers={201: api.Subscription, 200: api.Subscription}, problems=WRITE),
        Route("GET", f"{topics}/subscriptions", admin.list_subscriptions, "reader", "List the subscribers of a topic",
              answers={200: api.SubscriptionList}, problems=READ),
        Route("DELETE", f"{topics}/subscriptions/{{member}}", admin.unsubscribe, "itself",
              "End a subscription; for an admin, or the member itself", answers={204: None}, problems=WRITE),
        Route("POST", f"{topics}/webhooks", webhooks.create_webhook, "administer",
              "Post a topic's messages to an address; the secret that signs them is shown only once",
              body=api.CreateWebhook, answers={201: api.NewWebhook}, problems=WRITE),
        Route("GET", f"{topics}/webhooks", webhooks.list_webhooks, "repair", "List the webhooks of a topic",
              answers={200: api.WebhookList}, problems=READ),
        Route("DELETE", f"{topics}/webhooks/{{webhook}}", webhooks.delete_webhook, "administer", "Delete a webhook",
              answers={204: None}, problems=WRITE),
        *Destinations(services.database, "queue", api.CreateQueue, api.Queue, api.QueueList,
                      QUERIES["create_queue"], QUERIES["list_queues"], QUERIES["delete_queue"]).routes(),
        Route("GET", "/v1/history", history.list_messages, "reader",
              "Read what a mesh accepted, in the order of the commits",
              query=api.HistoryQuery, answers={200: api.HistoryPage}, problems=(*READ, 410)),
        Route("GET", "/v1/messages", history.find_messages, "reader",
              "Find messages of a mesh, the latest first; never their bodies",
              query=api.MessagesQuery, answers={200: api.MessageLines}, problems=READ),
        Route("GET", "/v1/messages/{broker_message_id}", history.get_message, "reader", "Read one message",
              answers={200: api.HistoryMessage}, problems=READ),
        Route("POST", "/v1/ended_rows", traces.report, "member",
              "Report rows of the member's daemon that died or were retired, for their story",
              body=EndedRows, answers={204: None}, problems=(400, 401, 403, 408, 413, 415, 503)),
        Route("GET", "/v1/trace/{id}", traces.trace, "reader",
              "The story of a message, an event, a dead letter or a job, and where it waits",
              answers={200: Story}, problems=READ),
        *routes_of(DEAD_LETTERS, letters),
        Route("GET", f"{DEAD_LETTERS.path}/causes", letters.causes, DEAD_LETTERS.reads,
              "Why messages of a mesh are dead, with one example of each cause",
              query=api.MeshQuery, answers={200: LetterCauses}, problems=READ),
        *routes_of(UNPUBLISHED[EVENTS.name], Unpublished(services.database, EVENTS)),
        *routes_of(UNPUBLISHED[DELIVERIES.name], Unpublished(services.database, DELIVERIES)),
        *routes_of(UNPUBLISHED[REPLAYS.name], Unpublished(services.database, REPLAYS)),
        *routes_of(SOURCES, Sources(services.database)),
        *routes_of(CONSUMERS, Consumers(services.database, nats)),
        Route("POST", JOBS.path, jobs.start, JOBS.changes,
              "Start a job of a flow; a worker that runs the flow does the rest",
              body=StartJob, answers={201: StartedJob, 200: StartedJob}, problems=WRITE),
        Route("GET", f"{JOBS.path}/messages/{{id}}", jobs.explain, JOBS.reads,
              "What a message was for, and its outcome", answers={200: MessagePage}, problems=READ),
        *routes_of(JOBS, jobs),
        *routes_of(KEYS, Keys(services.database)),
        *routes_of(OPERATOR_LOG, OperatorLog(services.database)),
        Route("POST", PROGRAMS.path, programs.report, "member",
              "Report the state of a daemon of the member, periodically and when it changes",
              body=Report, answers={204: None}, problems=(400, 401, 403, 408, 413, 415, 503)),
        *routes_of(PROGRAMS, programs),
        *routes_of(MINUTES, Minutes(services.database)),
        Route("GET", "/health", control.health, "anyone", "Whether the process works, and what is wrong",
              answers={200: api.BrokerHealth}),
        Route("GET", "/ready", control.ready, "anyone", "Whether it can accept now",
              answers={200: api.BrokerHealth, 503: api.BrokerHealth}),
        Route("GET", "/metrics", control.metrics, "anyone", "Prometheus metrics",
              answers={200: str}, answer_media=CONTENT_TYPE),
        Route("GET", "/openapi.json", control.openapi, "anyone", "This document", answers={200: dict[str, Any]}),
    ]  # fmt: skip


class _Accept:
    """The handlers of the accept API."""

    def __init__(self, services: Services) -> None:
        self._config = services.config
        self._database = services.database
        self._accepting = services.accepting
        self._look_up = LookUp(services.database, services.accepting)
        self._work = Shares(services.config.max_in_flight)

    async def accept(self, request: web.Request) -> web.Response:
        """`POST /v1/accept`: the body is read once there is room for it, and the batch then waits for its turn."""
        member = member_of(request)
        async with received(request) as body, self._work.hold(member.whose):
            answer = await self._accepting.accept(member, body, lambda: not may_be_gone(request))
        return web.Response(body=answer, content_type="application/json")

    async def accepted(self, request: web.Request) -> web.Response:
        asked = await decode_body(request, wire.AcceptedQuery)
        return json_response(await self._look_up.accepted(member_of(request), asked))

    async def features(self, request: web.Request) -> web.Response:
        member, config = member_of(request), self._config
        async with self._database.read(member.whose) as connection:
            incarnation = await connection.fetchval(QUERIES["current_incarnation"])
            last_history_id = await connection.fetchval(QUERIES["last_history_id"], member.mesh_id)
        mode, limiter = config.retention.mode, config.limiter
        days = None if mode == "permanent" else config.retention.dedupe_days
        features = wire.Features(
            mesh=member.mesh,
            member=member.name,
            max_batch=config.max_batch,
            client_message_id_dedupe=wire.DedupeFeature(
                version=1, mode=mode, request_fingerprint=True, dedupe_retention_days=days
            ),
            max_payload=wire.PayloadFeature(inline_bytes=config.max_inline_bytes),
            rate_limit=wire.RateLimitFeature(
                per_mesh=limiter.per_mesh, per_member=limiter.per_member, window_seconds=limiter.window_seconds
            ),
            incarnation=str(incarnation),
            last_history_id=last_history_id,
        )
        return json_response(features)


class _Control:
    """The handlers of the control plane."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._document = cache(partial(document, services))

    async def health(self, _request: web.Request) -> web.Response:
        """`GET /health`: 200 while the process answers; its reasons are those of `/ready`."""
        return json_response(await self._services.health.state())

    async def ready(self, _request: web.Request) -> web.Response:
        """`GET /ready`: 503 without a Postgres that takes writes, or a Redis where the limiter closes; else 200."""
        state = await self._services.health.state()
        return json_response(state, 503 if state.status == "unavailable" else 200)

    async def metrics(self, _request: web.Request) -> web.Response:
        """`GET /metrics`, with the state of its servers now."""
        await self._services.health.state()
        return web.Response(body=self._services.metrics.expose(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, _request: web.Request) -> web.Response:
        return json_response(self._document())


def document(services: Services) -> dict[str, Any]:
    """Return the OpenAPI document of the broker."""
    return openapi(
        routes(services),
        title="Postroom broker",
        version=version("postroom-server"),
        description=_ABOUT,
        bearer=_BEARER,
        access=_ACCESS,
    )
