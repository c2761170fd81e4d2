"""The control plane: the daemon's health and readiness, its metrics, its version and its routes.

And pausing the relay, whose controls are in the outbox; and the mesh's topics, asked for as the daemon's member.
"""

from collections.abc import Callable
from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from ipc.connection import Answer, BodyReader, Request, json_answer
from ipc.services import Services
from postroom._wire.message import check_destination
from postroom._wire.moment import from_milliseconds
from postroom._wire.operations import PauseRequest, ResumeRequest
from postroom._wire.sends import Health, Ready, Version
from postroom._wire.words import counted
from postroom.errors import TryAgain

EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus
WAL_WARNING_BYTES: Final = 64 * 1024 * 1024
_DISK_FULL: Final = "the disk is full, so new messages are refused: free some space"
_MAKE_ROOM: Final = "wait for the relay, requeue or abort dead rows, or raise outbox.max_bytes"


async def health_of(services: Services) -> Health:
    """Return whether all is well, and if not, why."""
    counts = await services.outbox.counts()
    missing, progress = await services.outbox.missing(), await services.outbox.comparison()
    relay = services.relay.status()
    reasons = []
    if not services.outbox.healthy:
        reasons.append("the outbox cannot be written: check the disk and the log")
    if services.outbox.disk_full:
        reasons.append(_DISK_FULL)
    reasons += [
        f"the socket {path} was removed or replaced, so no caller finds it: start the daemon again"
        for path in services.lost_sockets()
    ]
    if relay.degraded:
        reasons.append(f"the relay makes no progress: {relay.reason}")
    if counts.due_ms > services.late_seconds * 1000:
        paused = counted(len(relay.paused_destinations), "paused destination")
        why = relay.reason or f"the relay is {relay.state}" + f", with {paused}" * bool(relay.paused_destinations)
        reasons.append(f"a message that is due has waited for {counts.due_ms // 1000} s: {why}")
    if missing.rows:
        pruned = f" ({missing.without_payload} of them without their payload, which was deleted)" * bool(
            missing.without_payload
        )
        reasons.append(
            f"the broker's database lacks {counted(missing.rows, 'message')} that it had accepted{pruned}: "
            "send them again with `postroom outbox resend --missing`"
        )
    if counts.wal_bytes > WAL_WARNING_BYTES:
        reasons.append(f"the write-ahead log has {counts.wal_bytes} bytes: a reader keeps it from being emptied")
    if services.outbox.filling_up:
        reasons.append(f"the outbox is nearly full of waiting rows: {_MAKE_ROOM}")
    if (trouble := services.inbox.trouble()) is not None:
        reasons.append(f"nothing arrives in the inbox: {trouble}")
    return Health(
        status="degraded" if reasons else "ok",
        reasons=reasons,
        rows=dict(counts.rows.items()),
        relay=relay,
        oldest_pending_at=from_milliseconds(counts.oldest_pending_at),
        wal_bytes=counts.wal_bytes,
        outbox_bytes=counts.file_bytes,
        comparing=progress is not None and not progress.ended,
        missing=missing.rows,
        missing_without_payload=missing.without_payload,
    )


class ControlRoutes:
    """The handlers of the control plane."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.document: Callable[[], dict[str, Any]] = dict  # the OpenAPI document, once the route table is complete

    async def health(self, _request: Request) -> web.StreamResponse:
        """Answer whether all is well, and if not, why."""
        return json_answer(await health_of(self._services))

    async def ready(self, _request: Request) -> web.StreamResponse:
        """Answer whether a send would be accepted now; it never depends on the broker."""
        outbox = self._services.outbox
        detail = None
        if not outbox.healthy:
            detail = "the outbox cannot be written: see `postroom doctor`"
        elif outbox.full:
            detail = f"the outbox is full of waiting rows: {_MAKE_ROOM}"
        elif outbox.disk_full:
            detail = _DISK_FULL
        if detail is not None:
            raise TryAgain.of("not_ready", detail, retryable=True, retry_after=1.0)
        return json_answer(Ready(ready=True))

    async def metrics(self, _request: Request) -> web.StreamResponse:
        """Expose the metrics in Prometheus' text format."""
        return Answer(HTTPStatus.OK, await self._services.expose(), EXPOSITION)

    async def version(self, _request: Request) -> web.StreamResponse:
        """Name the program, its version and its mesh."""
        return json_answer(Version(name="postroomd", version=self._services.version, mesh=self._services.mesh))

    async def openapi(self, _request: Request) -> web.StreamResponse:
        """Describe every route (OpenAPI 3.1)."""
        return json_answer(self.document())


class RelayRoutes:
    """The handlers of the relay; the route table lets only operators in."""

    def __init__(self, services: Services) -> None:
        self._outbox = services.outbox
        self._relay = services.relay
        self._reader = BodyReader(services.limits, services.budget)

    async def pause(self, request: Request) -> web.StreamResponse:
        """Stop relaying until a resume; answers the relay's status."""
        return await self._set(request, PauseRequest)

    async def resume(self, request: Request) -> web.StreamResponse:
        """Relay again, at a rate where one is given; answers the relay's status."""
        return await self._set(request, ResumeRequest)

    async def _set(self, request: Request, kind: type[PauseRequest | ResumeRequest]) -> web.StreamResponse:
        asked = await self._reader.decode(request, kind)
        await self._outbox.set_relay_control(
            check_destination(asked.destination),
            paused=isinstance(asked, PauseRequest),
            rate_per_second=asked.rate_per_second if isinstance(asked, ResumeRequest) else None,
            caller=request.caller,
            reason=asked.reason,
        )
        await self._relay.controls_changed()
        return json_answer(self._relay.status())


class TopicRoutes:
    """The handlers of topics."""

    def __init__(self, services: Services) -> None:
        self._topics = services.topics

    async def list(self, _request: Request) -> web.StreamResponse:
        """List the topics of the mesh."""
        return json_answer(await self._topics.topics())

    async def subscribe(self, request: Request) -> web.StreamResponse:
        """Subscribe this member to a topic."""
        return json_answer(await self._topics.subscribe(request.params["topic"]), 201)

    async def unsubscribe(self, request: Request) -> web.StreamResponse:
        """End this member's subscription to a topic."""
        await self._topics.unsubscribe(request.params["topic"])
        return Answer(204, b"")
