"""What a client tries again, under which id, and for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from support.wire import Serve

from postroom import AsyncClient, InvalidMessage, PostroomError, SendResult, TryAgain, Unavailable
from postroom._wire.operations import RowFilter


class Peer:
    """Answers the first requests with `faults`, and all later ones well; `bodies` is what came."""

    def __init__(self, *faults: PostroomError | None) -> None:
        self.faults = list(faults)
        self.bodies: list[Any] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.bodies.append(msgspec.json.decode(body) if body else None)
        if self.faults:
            fault = self.faults.pop(0)
            if fault is None:
                assert request.transport is not None
                request.transport.abort()
                return web.Response()
            return web.Response(
                status=fault.problem.status,
                body=msgspec.json.encode(fault.problem),
                content_type="application/problem+json",
            )
        sent = self.bodies[-1] or {}
        result = SendResult(client_message_id=sent.get("client_message_id", ""), outbox_id="r", status="queued")
        return web.Response(body=msgspec.json.encode(result), content_type="application/json")

    @property
    def ids(self) -> list[str]:
        return [body["client_message_id"] for body in self.bodies]


def later(code: str) -> TryAgain:
    return TryAgain.of(code, "not now", retryable=True, retry_after=0.01)


@pytest.mark.parametrize("fault", [later("busy"), later("outcome_unknown"), later("disk_full"), None])
async def test_a_send_is_tried_again_under_the_id_of_the_first_try(fault: PostroomError | None, serve: Serve) -> None:
    peer = Peer(fault, fault)
    async with AsyncClient(await serve(peer.handle), patience=20) as client:
        result = await client.send("topic:orders", "hello")
    assert len(peer.ids) == 3
    assert set(peer.ids) == {result.client_message_id}


async def test_a_callers_own_id_is_kept(serve: Serve) -> None:
    peer = Peer(later("outcome_unknown"))
    async with AsyncClient(await serve(peer.handle), patience=20) as client:
        await client.send("topic:orders", "hello", client_message_id="mine")
    assert peer.ids == ["mine", "mine"]


async def test_what_is_wrong_is_not_tried_again(serve: Serve) -> None:
    peer = Peer(InvalidMessage.of("invalid_destination", "no", field="to"))
    async with AsyncClient(await serve(peer.handle), patience=20) as client:
        with pytest.raises(InvalidMessage) as caught:
            await client.send("topic:orders", "hello")
    assert caught.value.problem.field == "to"
    assert len(peer.ids) == 1


async def test_patience_ends_with_the_last_error(serve: Serve) -> None:
    peer = Peer(*[later("too_many")] * 10_000)
    async with AsyncClient(await serve(peer.handle), patience=0.2) as client:
        with pytest.raises(TryAgain) as caught:
            await client.send("topic:orders", "hello")
    assert caught.value.code == "too_many"
    assert len(peer.ids) > 1


async def test_a_retry_after_beyond_the_deadline_is_not_waited_for(serve: Serve) -> None:
    peer = Peer(TryAgain.of("busy", "in an hour", retryable=True, retry_after=3600))
    async with AsyncClient(await serve(peer.handle), patience=20) as client:
        with pytest.raises(TryAgain):
            await client.send("topic:orders", "hello")
    assert len(peer.ids) == 1


async def test_a_daemon_that_comes_up_late_is_waited_for(short_directory: Path, serve: Serve) -> None:
    peer = Peer()
    tried = 0

    async with AsyncClient(short_directory / "peer.sock", patience=20) as client:
        original = client._transport.call

        async def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal tried
            tried += 1
            if tried == 3:
                await serve(peer.handle)
            return await original(*args, **kwargs)

        client._transport.call = call  # type: ignore[method-assign]
        await client.send("topic:orders", "hello")
    assert (tried, len(peer.ids)) == (3, 1)


@pytest.mark.parametrize("fault", [None, later("outcome_unknown")])
async def test_a_verb_whose_outcome_is_not_known_is_not_used_twice(fault: PostroomError | None, serve: Serve) -> None:
    peer = Peer(fault)
    async with AsyncClient(await serve(peer.handle), patience=20) as client:
        with pytest.raises((Unavailable, TryAgain)):
            await client.bulk("abort", RowFilter(ids=["a"]), reason="test")
    assert len(peer.bodies) == 1


async def test_nan_in_meta_is_refused_before_it_is_sent(serve: Serve) -> None:
    peer = Peer()
    async with AsyncClient(await serve(peer.handle)) as client:
        for meta in ({"x": float("nan")}, {"x": 2**53 + 1}, {"x": "\ud800"}):
            with pytest.raises(InvalidMessage) as caught:
                await client.send("topic:orders", "hello", meta=meta)
            assert caught.value.problem.field == "meta"
        with pytest.raises(InvalidMessage):
            await client.send("topic:orders", "\ud800")
    assert peer.bodies == []


async def test_bytes_travel_as_base64(serve: Serve) -> None:
    peer = Peer()
    async with AsyncClient(await serve(peer.handle)) as client:
        await client.send("topic:orders", b"\x00\xff")
    assert peer.bodies[0]["body_base64"] == "AP8="
