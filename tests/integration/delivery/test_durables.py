"""A consumer that an operator pauses is given nothing until it is resumed, whoever asks; a deleted one is gone."""

from __future__ import annotations

import asyncio
from pathlib import Path

import nats
import pytest
from nats.js.errors import NotFoundError
from support.jetstream import Context, Script
from support.waiting import until_so

from embedded import EmbeddedNats
from postroom.claims import DONE, Done, Later, Outcome
from postroom.delivery.durables import OperatorPause, delete, pause, pause_of, resume
from postroom.delivery.message import Delivery
from postroom.errors import Conflict

ADA = OperatorPause("ada of sea", "it bills twice")


async def paused(context: Context) -> OperatorPause | None:
    return pause_of(await context.info())


async def test_a_paused_consumer_is_given_nothing_by_whichever_process_asks(context: Context) -> None:
    script, other = Script(), Script()
    async with context.consuming(script):
        await context.publish(["before"])
        await script.saw(1)
        await pause(context.js, await context.info(), ADA)
        assert await paused(context) == ADA
        await context.publish(["after"])
        async with context.consuming(other, max_ack_pending=7):  # which changes the durable, and not the pause
            changed = context.settings().max_waiting + 7

            async def reconciled() -> bool:
                return (await context.info()).config.max_ack_pending == changed

            await until_so(reconciled, "it is changed")
            info = await context.info()
            assert (info.num_pending, pause_of(info)) == (1, ADA)
            assert (script.ids(), other.ids()) == (["before"], [])
            await resume(context.js, info, ADA)
            await context.settled()
    assert sorted(script.ids() + other.ids()) == ["after", "before"]
    assert await paused(context) is None


async def test_what_is_in_hand_is_finished_and_what_fails_waits_with_the_rest(context: Context) -> None:
    begun, answer = asyncio.Event(), asyncio.Queue[Outcome]()

    async def judge(_: Delivery) -> Outcome:
        begun.set()
        return await answer.get()

    script = Script(judge)
    async with context.consuming(script):
        await context.publish(["done", "failing"])
        await script.saw(2)
        await pause(context.js, await context.info(), ADA)
        await answer.put(DONE)
        await answer.put(Later("not now", 0))

        async def handed_back() -> bool:
            return (await context.info()).num_ack_pending == 1

        await until_so(handed_back, "one is done")
        await context.publish(["later"])
        assert len(script.seen) == 2
        await resume(context.js, await context.info(), ADA)
        for _ in range(2):
            await answer.put(DONE)
        await context.settled()
    assert len(script.seen) == 4


async def test_a_pause_outlasts_the_server(tmp_path: Path) -> None:
    server = EmbeddedNats(tmp_path)
    connection = await nats.connect(server.start())
    context = Context(connection)
    await context.declare()
    await context.consumer(Script()).declare()
    await pause(context.js, await context.info(), ADA)
    await connection.close()
    server.stop()
    context.connection = connection = await nats.connect(server.start())
    context.js = connection.jetstream()
    await context.publish(["a"])
    script = Script(lambda _: Done())
    async with context.consuming(script):

        async def waits() -> bool:
            return (await context.info()).num_pending == 1

        await until_so(waits, "the message waits")
        info = await context.info()
        assert (pause_of(info), script.seen) == (ADA, [])
        await resume(context.js, info, ADA)
        await script.saw(1)
    await connection.close()
    server.stop()


async def test_a_consumer_is_deleted_where_no_program_runs_it(context: Context) -> None:
    script = Script()
    async with context.consuming(script):
        await context.publish(["before"])
        await script.saw(1)

        async def asks() -> bool:
            return bool((await context.info()).num_waiting)

        await until_so(asks, "it asks for more")
        with pytest.raises(Conflict, match="a program runs it now; stop that first"):
            await delete(context.js, await context.info(), ADA)

    async def left() -> bool:
        return not await asks()

    await until_so(left, "what it asked for last has run out")
    await delete(context.js, await context.info(), ADA)
    with pytest.raises(NotFoundError):
        await context.info()


async def test_who_paused_it_in_another_way_is_not_known(context: Context) -> None:
    await context.consumer(Script()).declare()
    await pause(context.js, await context.info(), ADA)
    await context.js.pause_consumer(context.events, context.settings().durable, "2099-01-01T00:00:00Z")
    found = await paused(context)
    assert found is not None
    assert found.by == "somebody"
