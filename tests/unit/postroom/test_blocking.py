"""`Client` is `AsyncClient`, method for method."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from postroom import AsyncClient, Client, SendRequest
from postroom._wire.loop_thread import LoopThread
from postroom.testing import FakeClient

METHODS = [name for name, _ in inspect.getmembers(AsyncClient, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_of_the_async_client_has_its_blocking_face(name: str) -> None:
    assert parameters(getattr(Client, name)) == parameters(getattr(AsyncClient, name))
    assert inspect.getdoc(getattr(Client, name))


def test_nothing_else_is_there() -> None:
    blocking = {name for name, _ in inspect.getmembers(Client, inspect.isfunction) if not name.startswith("_")}
    assert blocking == set(METHODS)


def parameters(method: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(each.name, each.kind, each.default) for each in inspect.signature(method).parameters.values()]


def test_ctrl_c_ends_a_stream_wherever_it_comes(tmp_path: Path) -> None:
    """At each point in turn where Python handles signals; the client can be used afterwards."""
    with Client(tmp_path / "absent") as client:
        assert list(client.send_many_in_chunks([])) == []
        point = 0
        while interrupted(client, point):
            assert list(client.send_many_in_chunks([])) == []
            point += 1
    assert point > 20


def interrupted(client: Client, point: int) -> bool:
    """Interrupt a stream at its `point`th begin of a function or end of one in C; False where it ended before.

    The stream is in the middle of its work until the thread waits for it.
    """
    left, waits, begun, over = point, False, 0, 0

    async def messages() -> AsyncIterator[SendRequest]:
        nonlocal begun, over
        begun += 1
        try:
            while not waits:  # noqa: ASYNC110 - an Event would be set through the loop that is being tested
                await asyncio.sleep(0)
        finally:
            over += 1
        return
        yield

    def watch(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left, waits
        if event in {"call", "c_return"} and frame.f_code.co_name != "_remove":  # of a WeakSet: nobody hears it there
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
        waits = waits or (event == "c_call" and called.__name__ in {"acquire", "get"})

    chunks = client.send_many_in_chunks(messages())
    try:
        sys.setprofile(watch)
        assert list(chunks) == []
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(None)
        assert begun == over
    return False


@pytest.mark.parametrize("raised", [SystemExit(3), KeyboardInterrupt()])
def test_a_stream_of_messages_that_ends_its_program_does_so_and_the_client_lives_on(raised: BaseException) -> None:
    """An event loop stops at these two."""

    def messages() -> Iterator[SendRequest]:
        yield SendRequest(to="topic:orders")
        raise raised

    async def async_messages() -> AsyncIterator[SendRequest]:
        for message in messages():
            yield message

    with FakeClient() as client:
        for given in (messages(), async_messages()):
            with pytest.raises(type(raised)):
                list(client.send_many(given))
        assert [each.line for each in client.send_many([SendRequest(to="topic:orders")])] == [1]


def test_what_an_interrupted_end_left_running_is_ended_with_the_loop() -> None:
    """A second Ctrl-C comes while the first one is ending an iteration."""
    ended, left = list[bool](), list[asyncio.Task[None]]()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def leave() -> None:
        left.append(asyncio.create_task(endless()))
        await asyncio.sleep(0)  # until it has begun

    loop = LoopThread()
    loop.run(leave)
    loop.close()
    assert ended == [True]


@pytest.mark.parametrize("begins", [True, False])
def test_a_thread_that_waits_for_a_client_that_another_one_closes_is_told(
    monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    """Also where the loop stops before it has begun the work."""
    loop, waits, said = LoopThread(), threading.Event(), list[str]()

    async def endless() -> None:
        waits.set()
        await asyncio.Event().wait()

    def wait() -> None:
        with pytest.raises(RuntimeError) as raised:
            loop.run(endless)
        said.append(str(raised.value))

    with monkeypatch.context() as patch:
        if not begins:
            patch.setattr(loop._loop, "call_soon_threadsafe", lambda _: waits.set())
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        assert waits.wait(10)
    loop.close()
    thread.join(10)
    assert said == ["this client is closed"]
