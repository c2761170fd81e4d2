"""Every operation on a file on a message's way through the outbox: crashed there, and told that the disk failed."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from support.mailroom import TOPIC, Mailroom

from faults.campaign import Missed, Run, goal
from faults.load import RESTARTED, accepted, kept, mailroom
from faults.nemesis import Shim, Strike
from faults.nursery import Nursery, Nursling, nursery
from postroom import AsyncClient, PostroomError, new_id
from postroom._wire.message import SendRequest

_WHY: Final = "the campaign wants it"
_SINGLE: Final = 2  # messages sent alone
_BATCH: Final = 20  # and together
_SECONDS: Final = 30.0
_SUFFERING: Final = 0.3  # seconds that a fault which stays is let stay


class Fault(NamedTuple):
    """What befalls one operation, or all from it on."""

    strike: Strike
    for_ever: bool = False

    def __str__(self) -> str:
        return f"{self.strike.name}{' for ever' if self.for_ever else ''}"


CRASHES: Final = (Fault(Strike.KILL_BEFORE), Fault(Strike.KILL_HALFWAY))
FAILURES: Final = tuple(Fault(strike, ever) for strike in (Strike.EIO, Strike.ENOSPC) for ever in (False, True))


@dataclass
class Stage:
    """A daemon on a state directory of its own for each trial, under the shim, with a broker that works."""

    run: Run
    room: Mailroom
    shim: Shim
    nursery: Nursery
    state: Path
    program: Nursling | None = None
    acknowledged: dict[str, str] = field(default_factory=dict)  # bodies by id, of this trial
    asked: dict[str, str] = field(default_factory=dict)

    @property
    def client(self) -> AsyncClient:
        return AsyncClient(self.room.socket, patience=0, timeout=5)

    async def start(self) -> None:
        """Start the daemon; returns when it accepts, or has ended."""
        self.program = await self.nursery.start("daemon", self.room.daemon.settings)
        async with self.client as client:
            while self.program.running:
                try:
                    await client.ready()
                except PostroomError:
                    await asyncio.sleep(0.005)
                else:
                    return

    async def revived(self) -> None:
        """Go on after the fault as a service manager does; the daemon accepts when this returns."""
        async with self.client as client, asyncio.timeout(_SECONDS):
            while True:
                try:
                    await client.ready()
                except PostroomError:
                    await asyncio.sleep(0.01)
                else:
                    return
                if self.program is not None and not self.program.running:
                    code = await self.program.ended()
                    if code > 0 and code not in RESTARTED:
                        raise Missed(f"the daemon ended with {code}: {self.nursery.log()[-500:]}")
                    await self.start()

    async def stop(self) -> None:
        if self.program is not None:
            await self.program.kill()
        self.program = None

    async def send(self) -> None:
        """Send some messages, alone and together; what is acknowledged is remembered."""
        async with self.client as client:
            for _ in range(_SINGLE):
                name = self._ask()
                await client.send(TOPIC, self.asked[name], client_message_id=name)
                self.acknowledged[name] = self.asked[name]
            names = [self._ask() for _ in range(_BATCH)]
            sends = [SendRequest(to=TOPIC, body=self.asked[name], client_message_id=name) for name in names]
            async for each in client.send_many(sends):
                if each.result is not None:
                    self.acknowledged[each.result.client_message_id] = self.asked[each.result.client_message_id]

    async def settled(self) -> None:
        """Return when the outbox is empty, the daemon has ended, or a fault that stays has been suffered."""
        loop = asyncio.get_running_loop()
        end, suffered = loop.time() + _SECONDS, None
        while self.program is not None and self.program.running and loop.time() < end:
            if not set(kept(self.state).values()) & {"pending", "inflight"}:
                return
            if self.shim.striking and suffered is None:
                suffered = loop.time() + _SUFFERING
            if suffered is not None and loop.time() > suffered:
                return
            await asyncio.sleep(0.01)

    def rows(self, query: str) -> list[tuple[str, ...]]:
        with closing(sqlite3.connect(f"file:{self.state / 'outbox.db'}?mode=ro", uri=True)) as db:
            return db.execute(query).fetchall()

    def _ask(self) -> str:
        name = new_id()
        self.asked[name] = f"the body of {name}"
        return name


# The journeys: what is there before, what is done under the fault, and what must be true afterwards.


class Journey(NamedTuple):
    """`before` runs unharmed, `act` under the fault, and `after` once the fault is over and the daemon works again."""

    before: Callable[[Stage], Awaitable[None]]
    act: Callable[[Stage], Awaitable[None]]
    after: Callable[[Stage], Awaitable[None]]


async def _paused(stage: Stage) -> None:
    await stage.start()
    async with stage.client as client:
        await client.pause_relay(reason=_WHY)


async def _nothing_lost(stage: Stage) -> None:
    held = kept(stage.state)
    lost = stage.acknowledged.keys() - held.keys()
    stage.run.check(not lost, f"{len(lost)} of {len(stage.acknowledged)} acknowledged are not in the outbox")
    async with stage.client as client:  # who heard nothing sends again, under the same id
        for name, body in stage.asked.items():
            await client.send(TOPIC, body, client_message_id=name)


async def _waiting(stage: Stage) -> None:
    await _paused(stage)
    await stage.send()


async def _relay(stage: Stage) -> None:
    async with stage.client as client:
        await client.resume_relay(reason=_WHY)
    await stage.settled()


async def _accepted_once(stage: Stage) -> None:
    async with stage.client as client:
        await client.resume_relay(reason=_WHY)
        for name in stage.acknowledged:
            row = await client.wait(name, _SECONDS)
            stage.run.check(row.status == "done", f"{name} is {row.status}: {row.last_error}")
    held = await accepted(stage.room.database_url)
    wrong = [name for name, body in stage.acknowledged.items() if held.get(name) != [body.encode()]]
    stage.run.check(not wrong, f"{len(wrong)} of {len(stage.acknowledged)} are not accepted once: {wrong[:3]}")


async def _dead(stage: Stage) -> None:
    await stage.start()
    async with stage.client as client:
        for _ in range(_SINGLE):
            name = new_id()
            await client.send("topic:nowhere", name, client_message_id=name)
            row = await client.wait(name, _SECONDS)
            stage.run.check(row.status == "dead", f"{name} is {row.status}")
        await client.pause_relay(reason=_WHY)


async def _requeue(stage: Stage) -> None:
    async with stage.client as client:
        for (row_id,) in stage.rows("SELECT id FROM outbox WHERE status = 'dead' ORDER BY seq"):
            await client.act("requeue", row_id, reason=_WHY)


async def _one_successor_each(stage: Stage) -> None:
    await _requeue(stage)  # the operator presses again where a row is still dead
    states = [status for (status,) in stage.rows("SELECT status FROM outbox ORDER BY seq")]
    expected = ["aborted"] * _SINGLE + ["pending"] * _SINGLE
    stage.run.check(states == expected, f"the rows are {states}")
    broken = stage.rows(
        "SELECT id FROM outbox AS old WHERE status = 'aborted' AND NOT EXISTS "
        "(SELECT 1 FROM outbox WHERE id = old.superseded_by)"
    )
    stage.run.check(not broken, f"{len(broken)} requeued rows have no successor")


async def _stopped(stage: Stage) -> None:
    await _waiting(stage)
    await stage.stop()


async def _recover(stage: Stage) -> None:
    settings = stage.room.daemon.settings
    stage.program = await stage.nursery.start("cli", settings, "outbox", "recover", "--yes")
    await stage.program.ended()


async def _recovered(stage: Stage) -> None:
    await stage.stop()
    if not (stage.state / "outbox.db").exists() or not list(stage.state.glob("outbox.db.damaged-*")):
        await _recover(stage)  # it was not done when the fault struck
    held = kept(stage.state)
    lost = stage.acknowledged.keys() - held.keys()
    stage.run.check(not lost, f"{len(lost)} of {len(stage.acknowledged)} ids are free after a recovery")
    await stage.start()
    stage.run.check(stage.program is not None and stage.program.running, f"no start: {stage.nursery.log()[-500:]}")


async def _no_file(_stage: Stage) -> None:
    """Begin with an empty directory."""


async def _migrate(stage: Stage) -> None:
    await stage.start()


async def _works(stage: Stage) -> None:
    await stage.send()
    await _nothing_lost(stage)


JOURNEYS: Final[dict[str, Journey]] = {
    "accept": Journey(_paused, Stage.send, _nothing_lost),
    "relay": Journey(_waiting, _relay, _accepted_once),
    "requeue": Journey(_dead, _requeue, _one_successor_each),
    "recover": Journey(_stopped, _recover, _recovered),
    "migrate": Journey(_no_file, _migrate, _works),
}


async def _travel(stage: Stage, journey: Journey, at: int, fault: Fault) -> int:
    """Take a journey with a fault at one operation (0: with none); return how many operations its act had."""
    stage.acknowledged, stage.asked = {}, {}
    stage.shim.count()
    shutil.rmtree(stage.state, ignore_errors=True)
    await journey.before(stage)
    stage.shim.arm(at, fault.strike, for_ever=fault.for_ever)
    with contextlib.suppress(PostroomError):
        await journey.act(stage)
    seen, struck = stage.shim.seen, stage.shim.lift()
    if struck:
        stage.run.struck[str(fault)] += 1
    if stage.program is not None and journey.act is not _recover:
        await stage.revived()
    await journey.after(stage)
    await stage.stop()
    return seen


async def _everywhere(run: Run, faults: tuple[Fault, ...]) -> None:
    async with mailroom(run) as room:
        room.daemon.stop()
        shim = Shim(run.place(), room.state)
        async with nursery(run.place(), shim.environment, "daemon.__main__", "cli.main") as children:
            stage = Stage(run, room, shim, children, room.state)
            for name, journey in JOURNEYS.items():
                operations = await _travel(stage, journey, 0, faults[0])
                run.figures.append(f"{name}: {operations} operations")
                for at, fault in _chosen(run, operations, faults):
                    try:
                        await _travel(stage, journey, at, fault)
                    except (Missed, PostroomError, TimeoutError) as error:
                        raise Missed(f"{name}, {fault} at operation {at} of {operations}: {error}") from error
                    run.trials += 1


def _chosen(run: Run, operations: int, faults: tuple[Fault, ...]) -> Iterator[tuple[int, Fault]]:
    """Yield every operation with every fault, or each so-many-th while developing."""
    every = [(at, fault) for at in range(1, operations + 1) for fault in faults]
    return iter(every[:: round(1 / run.scale) | 1])


@goal("F2", "a crash at every write of accept, relay, requeue, recover, migrate")
async def crashed_everywhere(run: Run) -> None:
    await _everywhere(run, CRASHES)


@goal("F3", "EIO and ENOSPC at each of these points, once and for ever")
async def failing_everywhere(run: Run) -> None:
    await _everywhere(run, FAILURES)
