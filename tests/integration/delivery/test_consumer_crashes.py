"""A consumer killed (-9) at every step of a message: each effect once, each dead letter once, nothing missing."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from support.jetstream import Context
from support.waiting import until_so
from support.zygote import Forked, Zygote

PROGRAM = Path(__file__).with_name("consumer_process.py")
TESTS = Path(__file__).parents[2]
COUNT = 60


def start(zygote: Zygote, url: str, context: str, effects: Path, *, point: str, victim: str) -> Forked:
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    words = [str(PROGRAM), url, context, point, victim, str(effects)]
    with effects.with_name("log").open("ab") as log:
        return zygote.start(words, environment, log)


@pytest.mark.parametrize(
    ("point", "victim"),
    [
        ("before handle", "33"),
        ("after handle", "33"),
        ("before ack", "33"),
        ("after ack", "33"),
        ("before letter", "30"),
        ("after letter", "30"),
        ("before ack", "30"),
        ("after ack", "30"),
    ],
)
async def test_a_consumer_killed_at(
    context: Context, nats_url: str, tmp_path: Path, zygote: Zygote, *, point: str, victim: str
):
    effects = tmp_path / "effects"
    effects.touch()
    await context.publish(str(number) for number in range(COUNT))
    killed = start(zygote, nats_url, context.name, effects, point=point, victim=victim)
    assert await asyncio.to_thread(killed.wait, 30) == -signal.SIGKILL
    survivor = start(zygote, nats_url, context.name, effects, point="never", victim=victim)
    try:
        await until_so(lambda: _is_settled(context), "everything is settled")
    finally:
        survivor.kill()
        survivor.wait()
    poison = [str(number) for number in range(0, COUNT, 10)]
    happened = effects.read_text().split()
    assert sorted(happened) == sorted({str(number) for number in range(COUNT)} - set(poison))
    assert sorted(letter.message_id or "" for letter in await context.letters()) == sorted(poison)


async def _is_settled(context: Context) -> bool:
    info = await context.info()
    return info.num_ack_pending == 0 and info.num_pending == 0
