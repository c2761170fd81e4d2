"""The daemon's API as one literal table: method, path, handler, who may call, and the types in and out.

`access` is `caller` (every peer that the socket admits) or `operator` (a uid in the config's `operators`).
"""

from collections.abc import Iterable
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Final

import msgspec

from ipc.control import EXPOSITION, ControlRoutes, RelayRoutes, TopicRoutes
from ipc.inbox import InboxRoutes
from ipc.outbox import OutboxRoutes
from ipc.sends import SendRoutes
from ipc.services import Services
from postroom._wire import operations
from postroom._wire import sends as api
from postroom._wire.administration import Subscription, TopicList
from postroom._wire.cloudevents import STRUCTURED, CloudEventQuery
from postroom._wire.message import SendRequest
from postroom._wire.nouns import OPERATOR_LOG, LogPage, LogQuery
from postroom._wire.trace import Story, TraceQuery
from postroom._wire.transport import EVENT_STREAM, NDJSON, SQLITE
from postroom.chassis.routes import Access, Route, openapi

CALLER = "caller"
OPERATOR = "operator"
_BODY = (400, 403, 413, 415)  # statuses of refused bodies
_SEND = (*_BODY, 409, 429, 503, 507)
_VERB = (*_BODY, 404, 409, 507)
_SEND_HEADERS: Final = MappingProxyType(
    {
        "Idempotency-Key": "the message's id; it wins over the `client_message_id` of the body",
        "traceparent": "the trace that the message belongs to (W3C Trace Context)",
    }
)
_EVENT_HEADERS: Final = MappingProxyType(
    {f"ce-{name}": f"in binary mode, the event's `{name}`" for name in ("id", "source", "specversion", "type")}
)
_SENT_HEADERS: Final = MappingProxyType(
    {
        202: {"Location": "where to ask what became of it", "Idempotent-Replayed": "`true` for a repeated send"},
        200: {"Idempotent-Replayed": "`true`: the message had been sent under this id before"},
    }
)
_ACCESS: Final = MappingProxyType(
    {
        CALLER: Access("every user that the socket admits", "optional"),
        OPERATOR: Access("users that `socket.operators` names; root and the daemon's own user without it", "optional"),
    }
)
_BEARER: Final = "The local token, over TCP. The Unix socket needs none: the kernel identifies the calling user."
_ABOUT: Final = (
    "The API of a daemon on its Unix socket, and on 127.0.0.1 if `tcp.port` is set. Every error is a problem "
    "(RFC 9457), with a stable `code`; docs/contract/send.md has the rules."
)


def routes(services: Services) -> list[Route]:
    """Build the table over the rooms that the daemon has opened."""
    sends, outbox, relay = SendRoutes(services), OutboxRoutes(services), RelayRoutes(services)
    inbox, topics, control = InboxRoutes(services), TopicRoutes(services), ControlRoutes(services)
    # fmt: off
    table = [
        Route("POST", "/v1/send", sends.send, CALLER, "send one message", body=SendRequest, headers=_SEND_HEADERS,
              answers={202: api.SendResult, 200: api.SendResult}, answer_headers=_SENT_HEADERS, problems=_SEND),
        Route("POST", "/v1/send/batch", sends.batch, CALLER, "send a stream of messages, one per line",
              body=SendRequest, body_media=NDJSON, answers={200: api.BatchResult}, answer_media=NDJSON, problems=_BODY),
        Route("POST", "/v1/cloudevents", sends.cloudevent, CALLER, "send one CloudEvent, structured or binary",
              query=CloudEventQuery, body=dict[str, Any], body_media=STRUCTURED, headers=_EVENT_HEADERS,
              answers={202: api.SendResult, 200: api.SendResult}, answer_headers=_SENT_HEADERS, problems=_SEND),
        Route("GET", "/v1/sends/{client_message_id}", sends.where, CALLER, "the state of a send",
              query=operations.WaitQuery, answers={200: api.OutboxRow}, problems=(400, 404)),
        Route("POST", "/v1/sends", sends.where_all, CALLER, "the states of many sends",
              body=operations.SendsQuery, answers={200: api.SendList}, problems=_BODY),

        Route("GET", "/v1/outbox", outbox.list, OPERATOR, "list rows, page by page",
              query=operations.ListQuery, answers={200: api.OutboxPage}, problems=(400, 403)),
        Route("GET", "/v1/outbox/export", outbox.export, OPERATOR, "stream rows, one per line",
              query=operations.ExportQuery, answers={200: api.OutboxRow}, answer_media=NDJSON, problems=(400, 403)),
        Route("GET", "/v1/outbox/{id}", outbox.inspect, OPERATOR, "one row, its chain of requeues and its log",
              answers={200: api.RowChain}, problems=(400, 403, 404)),
        *(Route("POST", f"/v1/outbox/{{id}}/{verb}", outbox.one(verb), OPERATOR, f"{verb} one row: {each.effect}",
                body=each.body, answers={200: api.OutboxRow}, problems=_VERB)
          for verb, each in operations.VERBS.items()),
        *(Route("POST", f"/v1/outbox/{verb}", outbox.bulk(verb), OPERATOR, f"{verb} many rows: {each.effect}",
                body=operations.BulkRequest, answers={200: api.BulkResult}, problems=_BODY)
          for verb, each in operations.VERBS.items()),
        Route("GET", OPERATOR_LOG.path, outbox.log, OPERATOR, "what operators did to rows and to the relay, and why",
              query=LogQuery, answers={200: LogPage}, problems=(400, 403)),
        Route("GET", "/v1/trace/{id}", outbox.trace, OPERATOR, "what became of a message here, and where it waits",
              query=TraceQuery, answers={200: Story}, problems=(400, 403, 404, 503)),
        Route("POST", "/v1/outbox/prune", outbox.prune, OPERATOR, "delete the payloads of old settled rows",
              body=operations.PruneRequest, answers={200: operations.PruneResult}, problems=_BODY),
        Route("POST", "/v1/outbox/resend", outbox.resend, OPERATOR, "send again what the broker's database lost",
              body=operations.ResendRequest, answers={200: operations.ResendResult}, problems=_BODY),
        Route("POST", "/v1/outbox/backup", outbox.backup, OPERATOR, "a copy of the whole outbox, payloads too",
              body=operations.BackupRequest, answers={200: msgspec.Raw}, answer_media=SQLITE,
              problems=(*_BODY, 429, 500, 503, 507)),

        Route("POST", "/v1/relay/pause", relay.pause, OPERATOR, "pause the relay, or one destination",
              body=operations.PauseRequest, answers={200: api.RelayStatus}, problems=_BODY),
        Route("POST", "/v1/relay/resume", relay.resume, OPERATOR, "resume the relay, at a rate if one is given",
              body=operations.ResumeRequest, answers={200: api.RelayStatus}, problems=_BODY),

        Route("GET", "/v1/inbox", inbox.list, CALLER, "received messages, page by page",
              query=api.InboxQuery, answers={200: api.InboxPage}, problems=(400, 404, 503)),
        Route("GET", "/v1/events", inbox.events, CALLER, "received messages as a live stream, from Last-Event-ID on",
              query=api.EventsQuery, headers={"Last-Event-ID": "the position to resume after, instead of `since`"},
              answers={200: api.InboxMessage}, answer_media=EVENT_STREAM, problems=(400, 404, 429, 503)),

        Route("GET", "/v1/topics", topics.list, CALLER, "the topics of the mesh",
              answers={200: TopicList}, problems=(400, 503)),
        Route("POST", "/v1/topics/{topic}/subscription", topics.subscribe, OPERATOR, "subscribe this member",
              answers={201: Subscription}, problems=(400, 403, 404, 503)),
        Route("DELETE", "/v1/topics/{topic}/subscription", topics.unsubscribe, OPERATOR, "unsubscribe this member",
              answers={204: None}, problems=(400, 403, 404, 503)),

        Route("GET", "/v1/health", control.health, CALLER, "ok or degraded, and why", answers={200: api.Health}),
        Route("GET", "/v1/ready", control.ready, CALLER, "whether a send would be accepted now",
              answers={200: api.Ready}, problems=(400, 503)),
        Route("GET", "/v1/metrics", control.metrics, CALLER, "the metrics, for Prometheus",
              answers={200: str}, answer_media=EXPOSITION),
        Route("GET", "/v1/version", control.version, CALLER, "the program, its version, its mesh",
              answers={200: api.Version}),
        Route("GET", "/v1/openapi.json", control.openapi, CALLER, "this document", answers={200: dict[str, Any]}),
    ]
    # fmt: on
    control.document = cache(partial(document, table, services.version))
    return table


def document(table: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the OpenAPI document of the daemon."""
    return openapi(table, title="Postroom daemon", version=version, description=_ABOUT, bearer=_BEARER, access=_ACCESS)


def metrics_routes(services: Services) -> list[Route]:
    """Build the table of the port for Prometheus, which has only the metrics."""
    metrics = ControlRoutes(services).metrics
    return [Route("GET", "/metrics", metrics, CALLER, "the metrics", answers={200: str}, answer_media=EXPOSITION)]
