"""The inbox consumer with an HTTP handler: every answer; leases; sharing (docs/contract/delivery.md#delivery-35)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from support.handlers import Call, CountingHandler, serving
from support.http_consumers import Inbox, config_of, consuming, settled
from support.jetstream import DURABLE, QUICK, Context
from support.traces import TRACE, attributes, links_of, parent_of
from support.waiting import until as until_noticed
from support.waiting import until_so

from postroom._wire.retry import Backoff
from postroom.chassis.routes import exposition
from postroom.delivery import pull
from postroom.delivery.http import handler as http_handler
from postroom.delivery.settings import BackoffSettings, HandlerSettings
from postroom.signatures import verify
from postroom.worker.consumer import HttpConsumer

Start = Callable[..., AbstractAsyncContextManager[HttpConsumer]]
OTHERS = [f"other-{number}" for number in range(5)]


def answering(status: int, **headers: str) -> Callable[[Call], web.StreamResponse]:
    def answer(_call: Call) -> web.StreamResponse:
        return web.Response(status=status, text='{"detail":"as the test wants"}', headers=headers)

    return answer


async def silent(_call: Call) -> web.StreamResponse:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


PROCESSED = (200, 201, 204, 409)
RETRIED = (500, 502, 503, 408, 425, 429, 400, 401, 403, 404, 410, 418, 301, 302, 307)


@pytest.mark.parametrize("status", PROCESSED)
@pytest.mark.parametrize("max_deliver", [1, 3])
async def test_a_success_or_409_processes_the_message_first_or_last(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox, *, status: int, max_deliver: int
) -> None:
    handler.answer = answering(status)
    async with start(max_deliver=max_deliver):
        await context.publish(["m-1"])
        await settled(context)

    row = await inbox.row("m-1")
    assert (row["attempts"], row["last_error"], row["owner"]) == (1, None, None)
    assert row["processed_at"] >= row["received_at"]
    assert (len(handler.calls), await context.letters()) == (1, [])


@pytest.mark.parametrize("max_deliver", [1, 3])
async def test_422_is_dead_lettered_at_once_first_or_last(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox, max_deliver: int
) -> None:
    handler.answer = lambda call: answering(422 if call.request.message_id == "poison" else 200)(call)
    async with start(max_deliver=max_deliver):
        await context.publish(["poison", *OTHERS])
        await settled(context)

    row = await inbox.row("poison")
    assert (row["dead_reason"], row["processed_at"], row["attempts"]) == ("poison", None, 1)
    (letter,) = await context.letters()
    assert (letter.message_id, letter.reason, letter.attempts) == ("poison", "poison", 1)
    assert letter.last_error == "http_422: as the test wants"
    assert await inbox.processed() == set(OTHERS)


@pytest.mark.parametrize("status", RETRIED)
async def test_any_other_answer_is_tried_again(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox, status: int
) -> None:
    handler.answer = lambda call: answering(200 if call.attempt == 2 else status, Location=handler.url)(call)
    async with start(max_deliver=3):
        await context.publish(["m-1"])
        await settled(context)

    row = await inbox.row("m-1")
    assert (row["attempts"], row["processed_at"] is not None) == (2, True)
    assert row["last_error"].startswith(f"http_{status}: ")
    assert [call.attempt for call in handler.calls] == [1, 2]
    assert handler.calls[1].headers["Postroom-Last-Error"] == row["last_error"]
    assert await context.letters() == []


@pytest.mark.parametrize("status", RETRIED)
async def test_any_other_answer_to_the_last_delivery_dead_letters_it(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox, status: int
) -> None:
    handler.answer = answering(status)
    async with start(max_deliver=2):
        await context.publish(["m-1"])
        await settled(context)

    (letter,) = await context.letters()
    assert (letter.message_id, letter.reason, letter.attempts) == ("m-1", "max_deliver", 2)
    assert letter.last_error.startswith(f"http_{status}: ")
    row = await inbox.row("m-1")
    assert (row["dead_reason"], row["attempts"], len(handler.calls)) == ("max_deliver", 2, 2)


async def test_a_handler_that_is_silent_is_tried_again_and_at_last_buried(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox
) -> None:
    handler.answer = silent
    async with start({"timeout_seconds": 0.1}, max_deliver=2):
        await context.publish(["m-1"])
        await settled(context)

    (letter,) = await context.letters()
    assert (letter.reason, letter.last_error.partition(":")[0]) == ("max_deliver", "handler_timed_out")
    assert (await inbox.row("m-1"))["attempts"] == 2


async def test_a_handler_that_cannot_be_reached_is_waited_for_and_that_is_no_attempt(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_handler, "PAUSES", Backoff(0.02, 0.05))
    monkeypatch.setattr(pull, "TICK_SECONDS", 0.05)
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    async with start({"url": f"http://127.0.0.1:{port}/handle"}, max_deliver=2) as services:
        await context.publish(["m-1", "m-2", "m-3"])
        calls = services.consumer.handler.counters.answers
        await until_noticed(lambda: calls["handler_unreachable"] > 9)  # more than all attempts of all three
        assert services.consumer.room in {0, 1}
        (reason,) = services.reasons()
        assert reason.startswith("handler_unreachable: no connection")
        assert b"postroom_consumer_handler_reachable 0.0" in exposition(await services.metrics())
        app = web.Application()
        app.router.add_post("/handle", handler.handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await handler.saw(3)
        await settled(context)
        assert services.reasons() == []
        assert b"postroom_consumer_handler_reachable 1.0" in exposition(await services.metrics())
        await runner.cleanup()

    assert await context.letters() == []
    assert {call.attempt for call in handler.calls} == {1}
    assert (await inbox.row("m-1"))["attempts"] == 1


@pytest.mark.parametrize(
    ("garbage", "said"),
    [
        (b"", "handler_connection_lost: the connection broke"),
        (b"no HTTP at all\r\n\r\n", "handler_answer_invalid: {url} did not answer in HTTP: it does not speak HTTP/1.1"),
        (b"HTTP/1.1 200", "handler_connection_lost: the connection broke"),
    ],
)
async def test_what_is_no_answer_is_tried_again_and_at_last_buried(
    start: Start, context: Context, garbage: bytes, said: str
) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(garbage)
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
        async with start({"url": url}, max_deliver=2):
            await context.publish(["m-1"])
            await settled(context)

    (letter,) = await context.letters()
    assert (letter.reason, letter.last_error) == ("max_deliver", said.format(url=url))


async def test_retry_after_is_honoured_before_the_schedule(
    start: Start, context: Context, handler: CountingHandler
) -> None:
    times: list[float] = []

    def answer(call: Call) -> web.StreamResponse:
        times.append(asyncio.get_running_loop().time())
        return answering(503 if call.attempt == 1 else 200, **{"Retry-After": "0"})(call)

    handler.answer = answer
    async with start(backoff=QUICK):
        await context.publish(["m-1"])
        await settled(context)

    assert times[1] - times[0] >= 1.0  # clamped to a second at least; the schedule would have said 10 ms


async def test_a_redirect_is_not_followed(start: Start, context: Context, handler: CountingHandler) -> None:
    async with serving() as elsewhere:
        handler.answer = answering(307, Location=elsewhere.url)
        async with start(max_deliver=1):
            await context.publish(["m-1"])
            await settled(context)

        assert (len(handler.calls), elsewhere.calls) == (1, [])


async def test_an_answer_without_end_still_says_its_status(start: Start, context: Context, inbox: Inbox) -> None:
    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 422 X\r\nConnection: close\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except OSError:
            writer.close()

    async with await asyncio.start_server(flood, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with start({"url": f"http://127.0.0.1:{port}/", "max_answer_bytes": 1000}):
            await context.publish(["m-1"])
            await settled(context)

    row = await inbox.row("m-1")
    assert (row["dead_reason"], len(row["last_error"]) < 600) == ("poison", True)


async def test_the_request_is_the_seeds_with_key_trace_and_attempt_and_signed(
    start: Start, context: Context, handler: CountingHandler, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret of both sides\n")
    secret.chmod(0o600)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {
        "Nats-Msg-Id": "550e8400-e29b-41d4-a716-446655440000/3",
        "Postroom-Epoch": "3",
        "X-Correlation-Id": "c-1",
        "X-Causation-Id": "k-1",
        "X-Occurred-At": "2025-12-28T22:00:00Z",
        "traceparent": trace,
    }
    async with start({"secret_file": secret}):
        await context.js.publish(context.subject, b'{"total": 1.50}', headers=headers)
        await handler.saw(1)

    (call,) = handler.calls
    assert call.body == (
        b'{"message_id":"550e8400-e29b-41d4-a716-446655440000","subject":"%b","event_type":"order_placed",'
        b'"event_version":1,"occurred_at":"2025-12-28T22:00:00Z","correlation_id":"c-1","causation_id":"k-1",'
        b'"consumer":"%b","payload":{"total": 1.50}}' % (context.subject.encode(), DURABLE.encode())
    )
    sent = call.headers
    assert (sent["Idempotency-Key"], sent["Postroom-Attempt"]) == ("550e8400-e29b-41d4-a716-446655440000", "1")
    assert (sent["traceparent"], "Postroom-Last-Error" in sent) == (trace, False)
    verify(b"a secret of both sides", call.body, sent["Postroom-Signature"])


async def test_each_call_for_a_message_with_a_trace_is_a_span_and_that_of_a_replay_begins_one(
    start: Start, context: Context, handler: CountingHandler, recorded: InMemorySpanExporter
) -> None:
    trace = {"traceparent": TRACE}
    handler.answer = lambda call: web.Response(status=503 if call.attempt == 1 else 200)
    async with start():
        await context.js.publish(context.subject, b"{}", headers={"Nats-Msg-Id": "m-1", **trace})
        await handler.saw(2)
        handler.answer = answering(200)
        replay = {"Nats-Msg-Id": "m-2", "Postroom-Replay-Of": "m-1", **trace}
        await context.js.publish(context.subject, b"{}", headers=replay)
        await context.js.publish(context.subject, b"{}", headers={"Nats-Msg-Id": "m-3"})
        await settled(context)

    failed, handled, replayed = recorded.get_finished_spans()
    assert {span.name for span in (failed, handled, replayed)} == {f"process {context.subject}"}
    assert [(parent_of(span), links_of(span)) for span in (failed, handled, replayed)] == [
        (TRACE, []),
        (TRACE, []),
        (None, [TRACE]),
    ]
    assert [
        (attributes(span)["postroom.attempt"], attributes(span).get("error.type")) for span in (failed, handled)
    ] == [
        (1, "http_503"),
        (2, None),
    ]
    assert attributes(replayed)["messaging.message.id"] == "m-2"
    assert attributes(replayed)["messaging.consumer.group.name"] == DURABLE
    assert {call.headers.get("traceparent") for call in handler.calls} == {TRACE, None}  # as the sender set it


async def test_what_can_make_no_request_goes_to_the_dead_letters_and_the_others_go_on(
    start: Start, context: Context, handler: CountingHandler
) -> None:
    async with start():
        await context.js.publish(context.subject, b"{}")
        await context.publish(["not-json"], b"{nonsense")
        await context.publish(["an id with spaces"])
        await context.publish(["lost"], subject=f"{context.name}.event.Not-A-Name.v1")
        await context.publish(["good"])
        await settled(context)

    reasons = {letter.message_id: letter.reason for letter in await context.letters()}
    assert reasons == {
        None: "no_message_id",
        "not-json": "invalid_payload",
        "an id with spaces": "invalid_message_id",
        "lost": "unknown_subject",
    }
    assert handler.ids() == ["good"]


async def test_a_message_whose_first_run_failed_is_not_skipped_when_it_comes_again(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox
) -> None:
    """To skip whatever has a row would lose it (docs/contract/delivery.md#delivery-32)."""
    handler.answer = answering(503)
    async with start(backoff=BackoffSettings(first_seconds=60)):
        await context.publish(["m-1"])
        await handler.saw(1)
        await until_so(lambda: _has_error(inbox), "the failure is recorded")
    handler.answer = answering(200)
    await context.publish(["m-1/1"])  # redriven under a fresh id of the transport, the same message
    async with start():
        await handler.saw(2)
        await until_so(lambda: _is_processed(inbox), "it is processed")

    assert [call.attempt for call in handler.calls] == [1, 2]
    assert handler.effects == {"m-1": 1}


async def _has_error(inbox: Inbox) -> bool:
    return (await inbox.row("m-1")).get("last_error") is not None


async def _is_processed(inbox: Inbox) -> bool:
    return (await inbox.row("m-1"))["processed_at"] is not None


async def test_a_message_that_comes_again_after_it_was_processed_is_only_acknowledged(
    start: Start, context: Context, handler: CountingHandler
) -> None:
    async with start() as services:
        await context.publish(["m-1"])
        await settled(context)
        await context.publish(["m-1/1", "m-1/2"])
        await settled(context)

        assert services.consumer.handler.counters.duplicates == 2
    assert len(handler.calls) == 1


async def test_the_same_message_twice_in_one_batch_is_called_once_at_a_time(
    start: Start, context: Context, handler: CountingHandler
) -> None:
    await context.publish(["m-1", "m-1/1", "m-1/2"])
    async with start(ack_wait_seconds=1, max_deliver=100) as services:
        services_handler = services.consumer.handler
        await settled(context)

    assert (len(handler.calls), handler.most_at_once) == (1, 1)
    assert services_handler.counters.held >= 1


async def test_a_handler_that_outlives_its_lease_and_the_queue_before_it_is_not_run_twice(
    start: Start, context: Context, handler: CountingHandler
) -> None:
    """One place for calls and three messages: the last waits, and runs, far longer than `ack_wait`."""

    async def slow(call: Call) -> web.StreamResponse:
        await asyncio.sleep(1.4)  # longer than the lease (two thirds of `ack_wait`), shorter than the time-out
        return answering(200)(call)

    handler.answer = slow
    settings = {"timeout_seconds": 1.95, "calls_at_once": 1}
    async with start(settings, ack_wait_seconds=2), start(settings, ack_wait_seconds=2):
        await context.publish([f"m-{number}" for number in range(3)])
        await settled(context)

    assert sorted(handler.ids()) == [f"m-{number}" for number in range(3)]
    assert handler.most_at_once == 1


async def test_two_consumers_of_one_name_share_the_work(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox
) -> None:
    ids = [f"m-{number}" for number in range(400)]
    small = {"max_ack_pending": 20, "batch": 5}
    async with start(**small) as one, start(**small) as other:
        await context.publish(ids)
        await settled(context)
        shares = one.consumer.counters.done, other.consumer.counters.done

    assert (sum(shares), min(shares) > 20) == (400, True)
    assert sorted(handler.ids()) == sorted(ids)
    assert await inbox.processed() == set(ids)


async def test_consumers_of_two_names_both_get_every_message(
    start: Start, context: Context, handler: CountingHandler
) -> None:
    async with start(durable="one"), start(durable="two"):
        await context.publish(["m-1", "m-2"])
        await settled(context, "one")
        await settled(context, "two")

    assert sorted(handler.ids()) == ["m-1", "m-1", "m-2", "m-2"]


async def test_a_stopped_consumer_gives_back_what_it_has_not_begun(
    start: Start, context: Context, handler: CountingHandler, inbox: Inbox
) -> None:
    gate = asyncio.Event()

    async def wait(call: Call) -> web.StreamResponse:
        await gate.wait()
        return answering(200)(call)

    handler.answer = wait
    async with start({"calls_at_once": 1}) as services:
        await context.publish(["m-1", "m-2", "m-3"])
        await handler.saw(1)
        await until_so(lambda: _in_hand(services, 3), "all are in hand")
        services.consumer.handler.stop()
        gate.set()

    assert len(handler.calls) == 1
    assert sorted([(await inbox.row(f"m-{number}")).get("attempts", 0) for number in (1, 2, 3)]) == [0, 0, 1]
    async with start():
        await settled(context)
    assert handler.effects == {"m-1": 1, "m-2": 1, "m-3": 1}


async def _in_hand(services: HttpConsumer, messages: int) -> bool:
    return services.consumer.in_hand == messages


@pytest.mark.parametrize("filters", [("{}.event.>",), ()], ids=["filtered", "the_whole_stream"])
async def test_a_consumer_of_another_meshs_events_knows_its_backlog(
    context: Context, nats_url: str, inbox_database: str, handler: CountingHandler, filters: tuple[str, ...]
) -> None:
    handler.answer = answering(500)
    subjects, rarely = [each.format(context.name) for each in filters], BackoffSettings(first_seconds=60)
    settings = HandlerSettings(url=handler.url)
    config = config_of(context, nats_url, inbox_database, settings, filter_subjects=subjects, backoff=rarely)
    async with consuming(msgspec.structs.replace(config, context="sea")) as services:
        await context.publish(["m-1"])

        async def counted() -> bool:
            backlog = await services.backlog()
            return backlog is not None and backlog.messages == 1

        await until_so(counted, "the message is in the backlog")
