"""The other side of spans: a collector that speaks OTLP over HTTP, and what a test asks of spans."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = TRACE[:-2] + "00"


def traceparent_of(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return _written(context)


def parent_of(span: ReadableSpan) -> str | None:
    """Return the parent as a traceparent."""
    return None if span.parent is None else _written(span.parent)


def links_of(span: ReadableSpan) -> list[str]:
    """Return what a span has links to, as traceparents."""
    return [_written(link.context) for link in span.links]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Return a span's attributes."""
    return dict(span.attributes or {})


def _written(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


class Collected(NamedTuple):
    """A span as a collector got it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: list[str]  # ids of traces
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """Keeps what programs export to `url`."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Collected] = []
        self._news = asyncio.Condition()

    async def export(self, request: web.Request) -> web.Response:
        asked = ExportTraceServiceRequest.FromString(await request.read())
        for resource in asked.resource_spans:
            service = {each.key: each.value.string_value for each in resource.resource.attributes}["service.name"]
            self.spans += [_collected(service, span) for scope in resource.scope_spans for span in scope.spans]
        async with self._news:
            self._news.notify_all()
        media = {"Content-Type": "application/x-protobuf"}
        return web.Response(body=ExportTraceServiceResponse().SerializeToString(), headers=media)

    async def until(self, condition: Callable[[list[Collected]], bool]) -> None:
        """Wait until the spans are as a test wants them."""
        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(lambda: condition(self.spans))


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Run a collector for the length of the block."""
    collector = Collector()
    app = web.Application()
    app.router.add_post("/v1/traces", collector.export)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


def _collected(service: str, span: Any) -> Collected:
    attributes = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return Collected(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        [link.trace_id.hex() for link in span.links],
        attributes,
        span.status.code == span.status.STATUS_CODE_ERROR,
    )
