"""The sender's retry policy at an HTTP handler: what was tried, and why it failed, lies in the inbox."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from aiohttp import web
from support.handlers import Call, CountingHandler
from support.http_consumers import Inbox, settled
from support.jetstream import DURABLE, Context
from support.waiting import until_so

from postroom.worker.consumer import HttpConsumer

Start = Callable[..., AbstractAsyncContextManager[HttpConsumer]]
BODY = b'{"message":{"to":"topic:orders","meta":{"retry_policy":{"max_attempts":3,"backoff_ms":1}}}}'


def away(call: Call) -> web.StreamResponse:
    return web.Response(status=503, text=f'{{"detail":"try {call.attempt}"}}')


async def test_after_its_last_attempt_a_message_is_dead_and_each_was_told_why_the_one_before_failed(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox
) -> None:
    handler.answer = away
    await context.publish(["m-1"], BODY)
    async with start(max_deliver=20):
        await handler.saw(3)
        await settled(context)

    row = await inbox.row("m-1")
    (letter,) = await context.letters()
    assert (row["attempts"], row["dead_reason"]) == (3, "max_deliver")
    assert (letter.attempts, letter.last_error) == (3, "http_503: try 3")
    told = [call.headers.get("Postroom-Last-Error") for call in handler.calls]
    assert told == [None, "http_503: try 1", "http_503: try 2"]


async def test_attempts_and_the_last_error_outlive_the_durable_consumer(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox
) -> None:
    """JetStream counts anew for a consumer that was made anew; the inbox does not."""
    handler.answer = lambda _: web.Response(status=503, headers={"Retry-After": "60"})
    await context.publish(["m-1"], BODY)
    async with start(max_deliver=20):
        await handler.saw(1)
        await until_so(lambda: _failed(inbox), "the failure is recorded")
    await context.js.delete_consumer(context.events, DURABLE)
    handler.answer = away
    async with start(max_deliver=20):
        await until_so(lambda: _dead(context), "the dead letter")

    assert [call.attempt for call in handler.calls] == [1, 2, 3]
    assert handler.calls[1].headers["Postroom-Last-Error"] == "http_503"


async def _failed(inbox: Inbox) -> bool:
    return (await inbox.row("m-1")).get("last_error") is not None


async def _dead(context: Context) -> bool:
    return bool(await context.letters())
