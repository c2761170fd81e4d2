"""What a client's application sees of its sends, where it has configured OpenTelemetry (docs/monitoring.md)."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags
from support.mailroom import LoneDaemon
from support.traces import TRACE, UNSAMPLED, attributes, parent_of, traceparent_of

from postroom import AsyncClient, Client, InvalidMessage, SendRequest
from postroom._wire import spans

OUTER = TracerProvider(shutdown_on_exit=False).get_tracer("application")


async def traceparent(client: AsyncClient, client_message_id: str) -> str | None:
    return (await client.inspect(client_message_id)).row.traceparent


async def test_a_send_is_a_span_whose_traceparent_the_message_has(
    daemon: LoneDaemon, recorded: InMemorySpanExporter
) -> None:
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello")
        (span,) = recorded.get_finished_spans()
        assert await traceparent(client, sent.client_message_id) == traceparent_of(span)
    assert (span.name, span.kind, span.parent) == ("send topic:orders", SpanKind.PRODUCER, None)
    assert attributes(span) == {
        "messaging.system": "postroom",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "topic:orders",
        "messaging.message.id": sent.client_message_id,
    }


def test_a_send_is_a_child_of_the_current_span(daemon: LoneDaemon, recorded: InMemorySpanExporter) -> None:
    with Client(daemon.socket) as client, OUTER.start_as_current_span("checkout") as outer:
        client.send("topic:orders", "hello")
        client.send_cloudevent(
            "topic:orders", {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}, b""
        )
        for _ in client.send_many([SendRequest(to="topic:orders", client_message_id=name) for name in "ab"]):
            assert trace.get_current_span() is outer
        assert trace.get_current_span() is outer
        rows = [client.inspect(name).row.traceparent for name in "ab"]
    one, event, many = recorded.get_finished_spans()
    assert {parent_of(span) for span in (one, event, many)} == {traceparent_of(outer)}
    assert (many.name, attributes(many)["messaging.batch.message_count"]) == ("send", 2)
    assert rows == [traceparent_of(many)] * 2


async def test_a_traceparent_that_is_given_is_what_the_message_has(
    daemon: LoneDaemon, recorded: InMemorySpanExporter
) -> None:
    async with AsyncClient(daemon.socket) as client:
        with OUTER.start_as_current_span("another"):
            sent = await client.send("topic:orders", "hello", traceparent=TRACE)
        assert await traceparent(client, sent.client_message_id) == TRACE
    (span,) = recorded.get_finished_spans()
    assert parent_of(span) == TRACE


async def test_what_is_not_sampled_is_sent_as_such(
    daemon: LoneDaemon, recorded: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncClient(daemon.socket) as client:
        await client.send("topic:orders", "hello", traceparent=UNSAMPLED)
        off = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("postroom")
        monkeypatch.setattr(spans, "_tracer", lambda: off)
        sent = await client.send("topic:orders", "hello")
        said = await traceparent(client, sent.client_message_id)
    assert said is not None
    assert not int(said[-2:], 16) & TraceFlags.SAMPLED
    assert recorded.get_finished_spans() == ()


async def test_a_refused_send_is_a_span_with_the_refusals_code(
    daemon: LoneDaemon, recorded: InMemorySpanExporter
) -> None:
    async with AsyncClient(daemon.socket) as client:
        with pytest.raises(InvalidMessage) as caught:
            await client.send("nowhere", "hello")
    (span,) = recorded.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == caught.value.code


async def test_an_application_that_configures_nothing_has_no_spans_and_its_messages_no_trace(
    daemon: LoneDaemon,
) -> None:
    async with AsyncClient(daemon.socket) as client:
        sent = await client.send("topic:orders", "hello")
        assert await traceparent(client, sent.client_message_id) is None


def test_the_library_never_loads_opentelemetry_by_itself(daemon: LoneDaemon) -> None:
    program = (
        "import sys\nfrom postroom import Client\n"
        f"with Client({str(daemon.socket)!r}) as client: client.send('topic:orders', 'hello')\n"
        "print(any(name.partition('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
