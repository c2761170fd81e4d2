"""One caller asks for all there is, and another one sends."""

from __future__ import annotations

import asyncio
import grp
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from support import loud_member
from support.mailroom import LoneDaemon

from bench.driver import Void
from bench.load import NOBODYS_GROUP
from bench.processes import load
from embedded.processes import tethered
from faults.attacker import KINDS
from faults.brokers import Poster
from faults.campaign import Lacking, Missed, Run, goal
from faults.load import mailroom
from postroom import BrokerClient

_VICTIM: Final = 60_001
_ATTACKER: Final = 60_002
_MOST: Final = 5.0  # times the quiet p99
_LEAST_QUIET: Final = 0.003  # seconds: what a p99 is taken for that is lower, on a machine that does other things too
_QUIET_SHARE: Final = 1 / 3  # of an attack's time, before it
_UNDER_WAY_SECONDS: Final = 1.0
_FIRST: Final = "sends"  # the attack that the control is tried with
_OUTBOX_BYTES: Final = 64 * 2**30


@goal("F17", "noisy users of a daemon", without="the shares", alone=True)
async def noisy_users(run: Run) -> None:
    """Attack a daemon in every way, as one user: the p99 of another's sends stays near its quiet one."""
    if os.geteuid() != 0:
        raise Lacking("root, who alone can be two users")
    kinds = sorted(KINDS, key=lambda kind: kind != _FIRST)
    for kind in kinds[: run.size.trials]:
        group = grp.getgrgid(NOBODYS_GROUP).gr_name
        daemon = LoneDaemon(run.place(), SOCKET_GROUP=group, OUTBOX_MAX_BYTES=_OUTBOX_BYTES, LOG_LEVEL="error")
        if run.without:
            daemon.process.become("faults.without", run.without, "daemon")
        await daemon.start()
        try:
            quiet = load(daemon.socket, connections=1, seconds=run.size.load * _QUIET_SHARE, first=0, uid=_VICTIM)
            command = ["-m", "faults.attacker", kind, "--socket", str(daemon.socket), "--uid", str(_ATTACKER)]
            with _attacking(command):
                loud = load(daemon.socket, connections=1, seconds=run.size.load, first=10**9, uid=_VICTIM)
        except Void as error:
            raise Missed(f"under {kind}: {error}") from error
        finally:
            daemon.stop()
        _judge(run, kind, quiet.p99, loud.p99, 0)


@goal("F17b", "noisy members of a broker", alone=True)
async def noisy_members(run: Run) -> None:
    """Attack a broker in every way, as one member: the p99 of a member of another mesh stays near its quiet one."""
    async with mailroom(run) as room:
        async with BrokerClient(room.broker_urls[0], room.admin_token) as administrator:
            await administrator.create_mesh("quiet")
            token = (await administrator.create_member("quiet", "zoe")).token
            await administrator.create_topic("quiet", "orders")
            await administrator.subscribe("quiet", "orders", "zoe")
        numbers = itertools.count()
        async with Poster(room, token) as zoe:
            for attack in list(loud_member.ATTACKS)[: run.size.trials]:
                quiet, _ = await _p99(zoe, numbers, run.size.load * _QUIET_SHARE)
                with _attacking([str(loud_member.__file__), attack, room.broker_urls[0], room.token]):
                    await asyncio.sleep(_UNDER_WAY_SECONDS)
                    loud, refused = await _p99(zoe, numbers, run.size.load)
                _judge(run, attack, quiet, loud, refused)
                await asyncio.sleep(_UNDER_WAY_SECONDS)  # until what it has begun is over


async def _p99(poster: Poster, numbers: Iterator[int], seconds: float) -> tuple[float, int]:
    """Post one message after the other; return the p99 in seconds, and how many were refused."""
    took, refused, end = [], 0, time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        (answer,) = await poster.post([(f"quiet-{next(numbers)}", "hello")])
        took.append(time.perf_counter() - began)
        refused += answer.status != 201
    return sorted(took)[len(took) * 99 // 100], refused


def _judge(run: Run, attack: str, quiet: float, loud: float, refused: int) -> None:
    times = loud / max(quiet, _LEAST_QUIET)
    run.struck[attack] += 1
    run.trials += 1
    run.figures.append(f"{attack}: {1000 * quiet:.1f} to {1000 * loud:.1f} ms")
    run.check(not refused, f"{refused} sends of another were refused under {attack}")
    run.check(times <= _MOST, f"under {attack} another's p99 is {times:.1f} times the quiet one")


@contextmanager
def _attacking(command: list[str]) -> Iterator[None]:
    """Run an attacker for the length of the block, from when it says that it is at it."""
    words = tethered([sys.executable, *command])
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path.cwd()) as attacker:
        assert attacker.stdout is not None
        try:
            attacker.stdout.readline()
            yield
        finally:
            attacker.kill()
