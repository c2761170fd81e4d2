"""What a consumer posts, as others read it: Standard Webhooks' own library, and `handler_request` in users' tests."""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cloudevents.core.bindings.http import HTTPMessage, from_http, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from standardwebhooks import Webhook, WebhookVerificationError
from support.handlers import Call, CountingHandler
from support.http_consumers import settled
from support.jetstream import Context, named

from postroom.handler import HandlerRequest
from postroom.testing import FakeAsyncClient, handler_request
from postroom.worker.consumer import HttpConsumer

Start = Callable[..., AbstractAsyncContextManager[HttpConsumer]]
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
KEY = bytes(range(32))


@pytest.mark.parametrize(
    ("secret", "theirs"),
    [
        (b"a secret of both sides", b"a secret of both sides"),
        (b"whsec_" + base64.b64encode(KEY), f"whsec_{base64.b64encode(KEY).decode()}"),
        (b"whsec_of no base64!", b"whsec_of no base64!"),
    ],
)
async def test_a_library_of_standard_webhooks_believes_a_consumer(
    start: Start, context: Context, handler: CountingHandler, tmp_path: Path, *, secret: bytes, theirs: str | bytes
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(secret)
    file.chmod(0o600)
    async with start({"secret_file": file}):
        await context.publish(["m-1"])
        await settled(context)

    (call,) = handler.calls
    assert Webhook(theirs).verify(call.body, call.headers)["message_id"] == "m-1"
    assert call.headers["webhook-id"] == "m-1"
    with pytest.raises(WebhookVerificationError):
        Webhook(theirs).verify(call.body + b" ", call.headers)
    with pytest.raises(WebhookVerificationError):
        Webhook(b"another secret").verify(call.body, call.headers)


async def test_a_request_for_tests_is_what_the_consumer_posts_byte_for_byte(
    start: Start, context: Context, handler: CountingHandler, tmp_path: Path
) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"a secret of both sides")
    file.chmod(0o600)
    handler.answer = lambda call: web.Response(status=200 if call.attempt == 2 else 503, text="not now, é")
    headers = {"X-Correlation-Id": "c-1", "X-Causation-Id": "m-0", "traceparent": TRACE}
    async with start({"secret_file": file}):
        await context.js.publish(context.subject, b'{"order":17}', headers={**named("m-1"), **headers})
        await settled(context)

    assert [call.attempt for call in handler.calls] == [1, 2]
    for call, last_error in zip(handler.calls, (None, "http_503: not now, é"), strict=True):
        assert posted(call) == requested(call, last_error)


def requested(call: Call, last_error: str | None) -> tuple[bytes, dict[str, str]]:
    request = handler_request(
        {"order": 17},
        subject=call.request.subject,
        consumer=call.request.consumer or "",
        message_id="m-1",
        attempt=call.attempt,
        last_error=last_error,
        occurred_at=call.request.occurred_at,
        correlation_id="c-1",
        causation_id="m-0",
        traceparent=TRACE,
        secret=b"a secret of both sides",
        signed_at=int(call.headers["webhook-timestamp"]),
    )
    assert request.message_id == "m-1"
    return request.body, request.headers


def posted(call: Call) -> tuple[bytes, dict[str, str]]:
    of_http = {"Host", "User-Agent", "Accept", "Accept-Encoding", "Content-Length"}
    return call.body, {name: value for name, value in call.headers.items() if name not in of_http}


@pytest.mark.parametrize("form", ["cloudevents", "cloudevents-binary"])
async def test_a_library_of_cloudevents_reads_what_a_consumer_posts(start: Start, context: Context, form: str) -> None:
    calls: dict[str, HTTPMessage] = {}

    async def keep(request: web.Request) -> web.Response:
        calls[request.headers["Idempotency-Key"]] = HTTPMessage(dict(request.headers), await request.read())
        return web.Response()

    app = web.Application()
    app.router.add_post("/", keep)
    named = {"id": "17", "source": "/shop", "type": "com.example.order", "shop": "é 1"}
    sent = CloudEvent({**named, "datacontenttype": "application/json"}, {"order": 17})
    written = to_structured(sent, JSONFormat())
    post = FakeAsyncClient()
    await post.send_cloudevent("topic:orders", written.headers, written.body)
    accepted = msgspec.json.decode(handler_request(post.sent[0]).body, type=HandlerRequest)
    async with TestServer(app) as server, start({"format": form, "url": str(server.make_url("/"))}):
        await context.publish(["m-1"], b'{"order":18}')
        await context.publish(["m-2"], msgspec.json.encode(accepted.payload))
        await settled(context)

    ours, theirs = (from_http(calls[key], JSONFormat(), CloudEvent) for key in ("m-1", "m-2"))
    assert (ours.get_id(), ours.get_type(), ours.get_data()) == ("m-1", "order_placed", {"order": 18})
    assert ours.get_source() == f"urn:postroom:{context.name}"
    assert theirs.get_data() == {"order": 17}
    assert {**theirs.get_attributes(), "time": None} == {**sent.get_attributes(), "time": None}
