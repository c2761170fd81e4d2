"""A simulation of daemons, a broker and a consumer, the programs' own code, in virtual time: one course per seed.

What is real: a daemon's outbox on SQLite, its relay, and how it speaks HTTP; the broker's whole application from the
HTTP server to what it asks of Postgres; another daemon's receiver: its client of NATS, the consumer core, the inbox on
SQLite. What is not: time, the network, NATS, Postgres (its rows for accepting are a dictionary here, with the same
promise: a statement is a transaction), the worker that publishes, and the socket that programs send to.

Run as a program, under virtual time: `python -m faults.virtual_time faults.simulation FIRST COUNT [SAFEGUARD]` prints
what each course showed, a line of JSON each.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import msgspec
import structlog
import ulid
from aiohttp import web_app

from broker.accept import AcceptService
from broker.app import Services
from broker.authentication import Authentication, Member, digest
from broker.config import BrokerConfig
from broker.database import Database
from broker.limiter import Limiter
from broker.metrics import Metrics
from broker.programs import Health
from broker.server import serving
from broker.store import AcceptStore, MessageIds
from broker_client.link import BrokerLink
from broker_client.relay import Relay
from broker_client.settings import BrokerClientSettings, RelaySettings
from daemon.receiver import Receiver
from embedded.processes import tethered
from faults.campaign import Missed, Run, goal
from faults.virtual_nats import Jetstream, Stored
from faults.virtual_postgres import Postgres
from faults.virtual_time import EPOCH, Crashed, Life, Loop, virtual_loop
from inbox import InboxSettings
from outbox import Caller, Outbox
from postroom._wire.accept import DedupeFeature, Features
from postroom._wire.ids import now_ms
from postroom._wire.message import SendRequest, prepare
from postroom.chassis import collect_rarely, sqlite, store
from postroom.delivery.http.addresses import Guard
from postroom.delivery.settings import NatsSettings, networks_of
from postroom.delivery.subjects import inbox_subject
from postroom.errors import PostroomError

T = TypeVar("T")

_MESH: Final = "demo"
_MEMBER: Final = "alice"
_TOKEN: Final = "postroom_simulated"
_NOWHERE: Final = "nowhere"  # a topic that there is not
_PORT: Final = 7420
_NATS_PORT: Final = 4222
_USER: Final = Caller(1000, 1000, "alice")
_WHY: Final[dict[str, Any]] = {"caller": Caller(0, 0, "root"), "reason": "the simulation wants it"}
_ROUGH_SECONDS: Final = 150.0
_SENDING_SECONDS: Final = 100.0
_REST_SECONDS: Final = 3600.0  # of virtual time, for everything to come to rest
_SENDERS: Final = 3
_MESSAGES: Final = 12  # of a sender
_PROCESSES: Final = 2
_REPEATED: Final = 20  # courses
_LOOK_SECONDS: Final = 2.0  # between two looks of the operator, on average
_DISK_SECONDS: Final = 0.004  # of a commit, at most
_SLOW: Final = 0.03  # the part of the commits for which a disk takes this long, at most:
_SLOW_SECONDS: Final = 8.0


class Seen(msgspec.Struct):
    """What one course showed."""

    seed: int
    course: str  # the digest of all that happened
    problem: str = ""
    messages: int = 0
    seconds: float = 0.0  # of virtual time
    struck: dict[str, int] = {}


@goal("F19", "simulation of daemons, broker and consumer in virtual time", without="the question before a requeue")
async def simulated(run: Run) -> None:
    """Let the same code take thousands of courses: nothing is lost or accepted twice, and each can be repeated."""
    first = run.chance.randrange(10**9)
    shares = [run.size.trials * number // _PROCESSES for number in range(_PROCESSES + 1)]
    parts = [_courses(first + start, end - start, run.without) for start, end in pairwise(shares)]
    again = _courses(first, min(_REPEATED, shares[1]), run.without)
    *courses, repeated = await asyncio.gather(*parts, again)
    seconds, struck = 0.0, run.struck
    for seen in itertools.chain.from_iterable(courses):
        if seen.problem:
            raise Missed(f"course {seen.seed}: {seen.problem}")
        run.trials += 1
        seconds += seen.seconds
        struck.update(seen.struck)
    for seen, same in zip(courses[0], repeated, strict=False):
        run.check(seen == same, f"course {seen.seed} is another one when it is repeated")
    run.figures += [f"{seconds / 86_400:,.0f} days of virtual time", f"{len(repeated)} repeated byte for byte"]


async def _courses(first: int, count: int, without: str | None) -> list[Seen]:
    """Simulate these courses, in a process of their own, with its own order of sets."""
    words = [sys.executable, "-m", "faults.virtual_time", "faults.simulation", str(first), str(count)]
    program = await asyncio.create_subprocess_exec(
        *tethered([*words, *([without] if without else [])]), stdout=asyncio.subprocess.PIPE
    )
    said, _ = await program.communicate()
    assert program.returncode == 0, f"the simulation of {first} to {first + count - 1} ended with {program.returncode}"
    return [msgspec.json.decode(line, type=Seen) for line in said.splitlines()]


class Inline:
    """The connection of a store without its thread: what it does takes a while, and then happens at once."""

    loop: Loop  # of the course that runs

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    @classmethod
    async def open(cls, connect: Callable[[], sqlite3.Connection]) -> Inline:
        return cls(connect())

    async def run(self, function: Callable[[sqlite3.Connection], T]) -> T:
        slow = self.loop.network.happens(_SLOW, "disk stalled")
        await asyncio.sleep(self.loop.chance.uniform(0, _SLOW_SECONDS if slow else _DISK_SECONDS))
        return function(self._db)

    async def close(self) -> None:
        self._db.close()


class Disk:
    """The state directory of a daemon: after a crash the next one has what was in it at that moment."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._crashes = 0

    @property
    def state(self) -> Path:
        return self._directory / str(self._crashes)

    def crash(self) -> None:
        """Leave what is there to the process that ends, and give the next one a copy."""
        before, self._crashes = self.state, self._crashes + 1
        if before.exists():
            shutil.copytree(before, self.state)


class World:
    """One course: programs that send, a daemon, a broker, Postgres, an operator, and what befalls them."""

    def __init__(self, loop: Loop, directory: Path) -> None:
        self.loop = loop
        self.struck: Counter[str] = Counter()
        self.failure = ""  # what must never be, whatever happens
        self._directory = directory
        self._course = hashlib.sha256()
        self._ids = random.Random(loop.chance.random())
        loop.network.note = self.note
        loop.network.struck = self._strike
        member = Member(name=_MEMBER, role="member", mesh_id=1, mesh=_MESH, member_id=1, token_sha256=digest(_TOKEN))
        self.postgres = Postgres(loop, member, _NOWHERE)
        self.acknowledged: dict[str, bytes] = {}  # fingerprints, by client_message_id
        self._token_file = directory / "token"
        self._token_file.touch(0o600)
        self._token_file.write_text(_TOKEN)
        self.sender = Disk(directory / "sender")
        self.receiver = Disk(directory / "receiver")
        self.daemon = self._no_daemon()
        self.outbox: Outbox | None = None
        self.jetstream = Jetstream(loop, f"{_MESH.upper()}_INBOX", inbox_subject(_MESH, "bob"))

    @property
    def course(self) -> str:
        return self._course.hexdigest()

    def fail(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Note what a callback raised; what a task raised is for whoever waits for it."""
        if "handle" in context:
            self.failure = self.failure or f"{context['message']}: {context.get('exception')!r}"

    def note(self, what: str) -> None:
        """Write down that something happened."""
        self._course.update(f"{self.loop.time():.9f} {what}\n".encode())

    async def run(self) -> None:
        """Let it take its course, and raise `Missed` where a promise is broken."""
        works = (self._keep_broker(), self._keep_daemon(), self._keep_receiver(), self._keep_nats(), self._publish())
        background = [self.loop.create_task(work) for work in works]
        operator = self.loop.create_task(self._operate())
        senders = [self.loop.create_task(self._send(number)) for number in range(_SENDERS)]
        await asyncio.sleep(_ROUGH_SECONDS)
        self.loop.network.rough = False
        try:
            async with asyncio.timeout(_REST_SECONDS):
                await asyncio.gather(*senders)
                await operator
                while self._states() & {"pending", "inflight"}:  # noqa: ASYNC110 - virtual
                    await asyncio.sleep(1)
                while self.postgres.accepted.keys() - set(self._filed()):  # noqa: ASYNC110 - the same
                    await asyncio.sleep(1)
        except TimeoutError:
            unfiled = len(self.postgres.accepted) - len(self._filed())
            rest = f"rows are {', '.join(sorted(self._states()))}, and {unfiled} accepted messages are in no inbox"
            raise Missed(f"not at rest after {_REST_SECONDS:.0f} s: {rest}") from None
        for task in background:
            if task.done():
                task.result()
        self._reckon()

    async def _keep_broker(self) -> None:
        """Run the broker, and start it again after each crash."""
        while True:
            life = Life(self.loop, "broker")
            life.start(self._serve())
            await self._until_crash(life, 40)

    async def _serve(self) -> None:
        config = BrokerConfig(database_url="postgresql://simulated", listen_port=_PORT)
        metrics = Metrics()
        pool = cast(Any, self.postgres)
        database = Database(pool, pool, pool)
        limiter = Limiter(None, config.limiter, metrics)
        accept = AcceptStore(database, config.retention, MessageIds(self._now, self._ids.randbytes))
        services = Services(
            config=config,
            database=database,
            authentication=Authentication(database, None),
            accepting=AcceptService(accept, limiter, metrics, config),
            limiter=limiter,
            metrics=metrics,
            health=Health(database, limiter, metrics, needs_redis=False),
            guard=Guard(networks_of(config.webhooks)),
        )
        async with serving(services):
            await asyncio.Event().wait()

    async def _keep_daemon(self) -> None:
        """Run the daemon; after each crash the next one has what was on disk."""
        while True:
            life = self.daemon = Life(self.loop, "daemon")
            running = life.start(self._relay(life))
            running.add_done_callback(self._ended)
            await self._until_crash(life, 30, self.sender)

    async def _keep_receiver(self) -> None:
        """Run the other daemon's receiver."""
        dedupe = DedupeFeature(version=1, mode="permanent", request_fingerprint=True)
        features = Features(mesh=_MESH, member="bob", max_batch=1, client_message_id_dedupe=dedupe)
        broker = BrokerClientSettings(url=f"http://127.0.0.1:{_PORT}", token_file=self._token_file)
        nats = NatsSettings(url=f"nats://127.0.0.1:{_NATS_PORT}")
        while True:
            life = Life(self.loop, "receiver")
            state = self.receiver.state
            one = Receiver(
                nats,
                broker,
                InboxSettings(),
                mesh=_MESH,
                state_directory=state,
                features=lambda: features,
                confirmed_time=self._time,
            )
            life.start(one.run())
            await self._until_crash(life, 30, self.receiver)

    async def _time(self) -> int:
        return now_ms()

    async def _keep_nats(self) -> None:
        """Run NATS."""
        while True:
            life = Life(self.loop, "NATS")
            life.start(self.jetstream.serve(_NATS_PORT))
            await self._until_crash(life, 60)

    async def _publish(self) -> None:
        """Publish what was accepted, some of it twice, as a worker does whose marks were lost."""
        subject = inbox_subject(_MESH, "bob")
        while True:
            await self.loop.pause(0.5)
            while self.postgres.unpublished:
                message = self.postgres.unpublished.popleft()
                stored = Stored(subject, f"{message.broker_message_id}.bob", msgspec.json.encode(message))
                self.jetstream.publish(stored)
                if self.loop.network.happens(0.05, "published twice"):
                    self.loop.call_later(self.loop.chance.uniform(0, 60), self.jetstream.publish, stored)

    async def _until_crash(self, life: Life, mean: float, disk: Disk | None = None) -> None:
        """Let a process run for a while, and crash while it is rough; return when another may begin."""
        await asyncio.sleep(self.loop.chance.expovariate(1 / mean))
        if not self.loop.network.rough:
            await life.until_over()
        if disk is not None:
            disk.crash()
        if disk is self.sender:
            self.outbox = None
        self._strike(f"{life.name} crashed")
        self.note(f"{life.name} crashed")
        life.crash()
        await asyncio.sleep(self.loop.chance.uniform(0.3, 10))

    async def _relay(self, life: Life) -> None:
        settings = BrokerClientSettings(url=f"http://127.0.0.1:{_PORT}", token_file=self._token_file)
        clock = self._now
        async with BrokerLink(settings, clock=clock) as link:
            outbox = await Outbox.open(self.sender.state, clock=clock, new_ids=self._new_ids, look_up=link.accepted)
            relay = Relay(
                outbox,
                link,
                RelaySettings(),
                state_directory=self.sender.state,
                mesh=_MESH,
                clock=clock,
                rng=random.Random(self.loop.chance.random()),
            )
            if not life.over:
                self.outbox = outbox
            await relay.run()

    def _ended(self, running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None and not self.daemon.over:
            self.failure = self.failure or f"the daemon ended: {error!r}"

    async def _send(self, number: int) -> None:
        """Send messages, each until it is acknowledged, and some of them again."""
        chance = random.Random(self.loop.chance.random())
        for count in range(_MESSAGES):
            await asyncio.sleep(chance.expovariate(_MESSAGES / _SENDING_SECONDS))
            name = f"sent-{number}-{count}"
            to = f"topic:{_NOWHERE if chance.random() < 0.05 else 'orders'}"
            prepared = prepare(SendRequest(to=to, body=f"{name} {chance.random()}", client_message_id=name))
            for _ in range(chance.choice((1, 1, 1, 2))):
                (row,) = await self._ask(lambda outbox, one=prepared: outbox.accept((one,), _USER))  # type: ignore[misc]
                if isinstance(row, PostroomError):
                    raise Missed(f"{name} was refused: {row}")
                self.acknowledged[name] = prepared.fingerprint
                self.note(f"acknowledged {name}")

    async def _operate(self) -> None:
        """Do what operators do to rows that wait, until it is calm."""
        chance = random.Random(self.loop.chance.random())
        while self.loop.network.rough:
            await asyncio.sleep(chance.expovariate(1 / _LOOK_SECONDS))
            verb = chance.choice(("flush", "requeue", "requeue", "abort"))
            waiting = [name for name, (status, *_) in sorted(self._rows().items()) if status == "pending"]
            if not waiting or self.outbox is None:
                continue
            name = chance.choice(waiting)
            with contextlib.suppress(Crashed, PostroomError):
                for row in await self.daemon.call(self.outbox.find_all([name])):
                    await self.daemon.call(self.outbox.act(cast(Any, verb), row.id, **_WHY))
                    self._strike(f"{verb} of a row")
                    self.note(f"{verb} {name}")

    async def _ask(self, what: Callable[[Outbox], Coroutine[Any, Any, T]]) -> T:
        """Ask the daemon, again where it crashed meanwhile or does not run, as a client does."""
        while True:
            with contextlib.suppress(Crashed):
                if self.outbox is not None:
                    return await self.daemon.call(what(self.outbox))
            await asyncio.sleep(0.5)

    def _rows(self) -> dict[str, tuple[str, str | None, str]]:
        """Return of each row its status, the id of its successor, and its own, by client_message_id."""
        file = self.sender.state / "outbox.db"
        if not file.exists():
            return {}
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
            rows = db.execute("SELECT client_message_id, status, superseded_by, id FROM outbox_whole")
            return {name: (status, successor, row_id) for name, status, successor, row_id in rows}

    def _states(self) -> set[str]:
        return {status for status, *_ in self._rows().values()}

    def _filed(self) -> list[str]:
        """Return the ids in the receiver's inbox."""
        file = self.receiver.state / "inbox.db"
        if not file.exists():
            return []
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as db:
            return [name for (name,) in db.execute("SELECT client_message_id FROM inbox ORDER BY position")]

    def _reckon(self) -> None:
        rows, accepted = self._rows(), self.postgres.accepted
        names = {row_id: name for name, (_, _, row_id) in rows.items()}
        for name, fingerprint in self.acknowledged.items():
            if name not in rows:
                raise Missed(f"{name} was acknowledged, and is lost")
            if name in accepted and accepted[name][4] != fingerprint:
                raise Missed(f"{name} was accepted with other content")
            line = [name]
            while (successor := rows[line[-1]][1]) is not None:
                line.append(names[successor])
            there = [each for each in line if each in accepted]
            if len(there) > 1:
                raise Missed(f"{name} was accepted twice, as {' and '.join(there)}")
            status = rows[line[-1]][0]
            if (status == "done") != bool(there):
                raise Missed(f"{name} is {status}, and was accepted {len(there)} times ({' → '.join(line)})")
        if strange := accepted.keys() - rows.keys():
            raise Missed(f"{min(strange)} was accepted, and the outbox does not know it")
        filed = self._filed()
        if len(filed) != len(set(filed)) or set(filed) != accepted.keys():
            raise Missed(f"the inbox has {len(filed)} messages of {len(accepted)}: {sorted(filed)}")
        for name, row in sorted(rows.items()):
            self.note(f"{name} {row}")
        self.note(" ".join(filed))

    def _strike(self, what: str) -> None:
        self.struck[what] += 1

    def _now(self) -> int:
        return round((EPOCH + self.loop.time()) * 1000)

    def _new_ids(self, count: int) -> list[str]:
        return [str(ulid.from_bytes(self._now().to_bytes(6, "big") + self._ids.randbytes(10))) for _ in range(count)]

    def _no_daemon(self) -> Life:
        life = Life(self.loop, "daemon")
        life.crash()
        return life


def simulate(seed: int, directory: Path) -> Seen:
    """Let one course happen."""
    with virtual_loop(random.Random(seed)) as loop:
        Inline.loop = loop
        world = World(loop, directory)
        loop.set_exception_handler(world.fail)
        seen = Seen(seed, "")
        try:
            loop.run_until_complete(world.run())
        except Missed as missed:
            seen.problem = str(missed)
        seen.problem = seen.problem or world.failure
        seen.course, seen.messages, seen.seconds = world.course, len(world.acknowledged), loop.time()
        seen.struck = dict(sorted(world.struck.items()))
        return seen


def _watched(_logger: object, _level: str, event: structlog.typing.EventDict) -> str:
    """Write no line, which takes longer than a course; what no program has foreseen is a failure of the course."""
    if event.get("exc_info"):
        said = {"message": event["event"], "exception": sys.exc_info()[1], "handle": None}
        asyncio.get_running_loop().call_exception_handler(said)
    return str(event["event"])


def main(first: int, count: int, safeguard: str = "") -> None:
    collect_rarely()
    logging.disable()
    structlog.configure(processors=[_watched], logger_factory=structlog.ReturnLoggerFactory())
    store.Connection = Inline  # type: ignore[assignment,misc]
    sqlite.QUERIES["write_pragmas"] = sqlite.QUERIES["write_pragmas"].replace("synchronous = FULL", "synchronous = OFF")
    if safeguard:
        from faults.without import SAFEGUARDS  # noqa: PLC0415 - only the control needs it

        SAFEGUARDS[safeguard]()
    for seed in range(first, first + count):
        with tempfile.TemporaryDirectory(prefix="postroom-simulation-") as directory:
            seen = simulate(seed, Path(directory))
        web_app._cached_build_middleware.cache_clear()  # it would keep whole courses, with their files
        sys.stdout.buffer.write(msgspec.json.encode(seen) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
