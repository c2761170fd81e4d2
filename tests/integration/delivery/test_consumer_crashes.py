"""A consumer killed (-9) at every step of a message: each effect once, each dead letter once, nothing missing."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.jetstream import Context
from support.waiting import until_so

from embedded.processes import tethered

PROGRAM = Path(__file__).with_name("consumer_process.py")
ROOT = Path(__file__).parents[3]
COUNT = 60


def start(url: str, context: str, point: str, victim: str, effects: Path) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
    command = [sys.executable, str(PROGRAM), url, context, point, victim, str(effects)]
    return subprocess.Popen(tethered(command), env={**os.environ, "PYTHONPATH": paths})


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
async def test_a_consumer_killed_at(context: Context, nats_url: str, tmp_path: Path, point: str, victim: str):
    effects = tmp_path / "effects"
    effects.touch()
    await context.publish(str(number) for number in range(COUNT))
    killed = start(nats_url, context.name, point, victim, effects)
    assert await asyncio.to_thread(killed.wait, 30) == -signal.SIGKILL
    survivor = start(nats_url, context.name, "never", victim, effects)
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
