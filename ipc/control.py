"""The control plane: is the daemon well, can it accept, what does it count, which version and which routes it has."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from aiohttp import web

from ipc.answers import Answer, json_answer
from ipc.request import Request
from ipc.services import Services
from outbox.model import Missing, to_datetime
from postroom._wire.sends import Health, Ready, Version
from postroom.errors import TryAgain

EXPOSITION: Final = "text/plain; version=0.0.4; charset=utf-8"  # Prometheus
WAL_WARNING_BYTES: Final = 64 * 1024 * 1024
FULL_WARNING: Final = 0.8  # of outbox.max_bytes


class Control:
    """The handlers of the control plane."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.document: dict[str, Any] = {}  # the OpenAPI document, set when the route table is complete

    async def health(self, _request: Request) -> web.StreamResponse:
        """Say whether all is well, and if not, why."""
        return json_answer(await self._health())

    async def ready(self, _request: Request) -> web.StreamResponse:
        """Say whether a send would be accepted now; it never depends on the broker."""
        if not self._services.outbox.healthy:
            raise TryAgain.of("not_ready", "the outbox cannot be written", retryable=True, retry_after=1.0)
        return json_answer(Ready(ready=True))

    async def metrics(self, _request: Request) -> web.StreamResponse:
        """Expose the metrics in Prometheus' text format."""
        return Answer(HTTPStatus.OK, await self._services.expose(), EXPOSITION)

    async def version(self, _request: Request) -> web.StreamResponse:
        """Name the program, its version and its mesh."""
        return json_answer(Version(name="postroomd", version=self._services.version, mesh=self._services.mesh))

    async def openapi(self, _request: Request) -> web.StreamResponse:
        """Describe every route (OpenAPI 3.1)."""
        return json_answer(self.document)

    async def _health(self) -> Health:
        counts = await self._services.outbox.counts()
        missing, progress = await self._services.outbox.missing(), await self._services.outbox.comparison()
        relay = self._services.relay.status()
        reasons = []
        if not self._services.outbox.healthy:
            reasons.append("the outbox cannot be written: check the disk and the log")
        if relay.degraded:
            reasons.append(f"the relay makes no progress: {relay.reason}")
        if counts.due_ms > self._services.late_seconds * 1000:
            why = relay.reason or f"the relay is {relay.state}"
            reasons.append(f"a message that is due has waited for {counts.due_ms // 1000} s: {why}")
        if missing.rows:
            reasons.append(_missing(missing))
        if counts.wal_bytes > WAL_WARNING_BYTES:
            reasons.append(f"the write-ahead log has {counts.wal_bytes} bytes: a reader keeps it from being emptied")
        if counts.waiting_bytes > FULL_WARNING * self._services.outbox_max_bytes:
            advice = "wait for the relay, requeue or abort dead rows, or raise outbox.max_bytes"
            reasons.append(f"the outbox is nearly full of waiting rows: {advice}")
        if (trouble := self._services.inbox.trouble()) is not None:
            reasons.append(f"nothing arrives in the inbox: {trouble}")
        return Health(
            status="degraded" if reasons else "ok",
            reasons=reasons,
            rows=dict(counts.rows.items()),
            relay=relay,
            oldest_pending_at=to_datetime(counts.oldest_pending_at),
            wal_bytes=counts.wal_bytes,
            outbox_bytes=counts.file_bytes,
            comparing=progress is not None and not progress.ended,
            missing=missing.rows,
            missing_without_payload=missing.without_payload,
        )


def _missing(missing: Missing) -> str:
    gone = f" ({missing.without_payload} of them without their payload, which was deleted)" * bool(
        missing.without_payload
    )
    return (
        f"{missing.rows} messages that the broker had accepted are no longer in its database{gone}: "
        "send them again with `postroom outbox resend --missing`"
    )
