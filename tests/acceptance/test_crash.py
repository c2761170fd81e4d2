"""The promise of the whole: what a daemon acknowledged is accepted exactly once, however often it is killed."""

import asyncio
import os
import random

import pytest
from support.mailroom import Mailroom
from support.writers import Writers

from postroom import AsyncClient

KILLS = 20  # the fault campaign does 200
WRITERS = 8
ACKNOWLEDGED = 2_000


async def crash_again_and_again(room: Mailroom, *, kills: int, acknowledged: int, seed: int) -> dict[str, bytes]:
    """Kill the daemon at random moments under load; return what it had acknowledged, by id."""
    chance = random.Random(seed)
    writers = Writers(room.socket, chance)
    async with asyncio.TaskGroup() as group:
        for _ in range(WRITERS):
            group.create_task(writers.write())
        for kill in range(1, kills + 1):
            due = acknowledged * kill // kills
            await writers.reached(max(due, len(writers.acknowledged) + chance.randrange(1, 40)))
            room.daemon.kill()
            room.daemon.start()
        await writers.reached(acknowledged)
        writers.enough.set()
    return writers.acknowledged


async def everything_done(room: Mailroom) -> None:
    """Return when the broker has accepted every send that the outbox holds."""
    async with AsyncClient(room.socket, patience=60) as client:
        waiting = [row.client_message_id async for row in client.export() if row.status != "done"]
        for message_id in waiting:
            assert (await client.wait(message_id, 300)).status == "done"


@pytest.mark.timeout(1800)
async def test_every_acknowledged_send_is_accepted_once_byte_for_byte_after_20_kills(mailroom, accepted):
    acknowledged = await crash_again_and_again(mailroom, kills=KILLS, acknowledged=ACKNOWLEDGED, seed=20)
    await mailroom.daemon_ready()
    await everything_done(mailroom)
    held = await accepted()
    assert len(acknowledged) >= ACKNOWLEDGED
    assert {key: held.get(key) for key in acknowledged} == acknowledged


@pytest.mark.soak
@pytest.mark.timeout(0)
async def test_the_same_for_as_long_as_it_is_let(mailroom, accepted):
    kills = int(os.environ.get("POSTROOM_SOAK_KILLS", "2000"))
    acknowledged = await crash_again_and_again(
        mailroom, kills=kills, acknowledged=100 * kills, seed=random.randrange(10**6)
    )
    await mailroom.daemon_ready()
    await everything_done(mailroom)
    held = await accepted()
    assert {key: held.get(key) for key in acknowledged} == acknowledged
