"""Programs are replaced one by one by those of the next minor release and back, and the schemas grow meanwhile."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, NamedTuple

import asyncpg
from support import zombie_flow
from support.chain import Chain
from support.effects import PATIENCE, Remembering, Senders, accepted_by, everything_has_its_effect_once
from support.handlers import CountingHandler, serving
from support.mailroom import Process
from support.releases import Release, next_minor, this_release

from faults.campaign import Missed, Run, goal
from faults.jobs import begin_job, each_step_took_effect_once
from faults.load import kept
from faults.nemesis import Line

_SENDERS: Final = 6
_ENDLESS: Final = 10**9  # messages
_STEPS: Final = 10  # of a job, of which one begins with each replacement
_READY: Final = {"ready", "listening", "publishing", "consuming"}  # what programs log once they work
_LOOK_SECONDS: Final = 0.05
_WORKER: Final[dict[str, object]] = {"FLOWS": "support.zombie_flow:flow", "JOBS_CHECK_SECONDS": 0.1}
_VERSIONS: Final = "SELECT DISTINCT kind || ' ' || (report ->> 'version') AS found FROM postroom.programs ORDER BY 1"
_LETTERS: Final = "SELECT count(*) FROM postroom.dead_letters"


class Balancer(Line):
    """What is in front of two brokers: a connection goes to the next one that answers."""

    def __init__(self, *brokers: int) -> None:
        super().__init__(brokers[0], 0)
        self._turns = itertools.cycle(brokers)

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for port in itertools.islice(self._turns, 2):
            try:
                _, answering = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                continue
            answering.close()
            self._there = port
            break
        await super()._serve(reader, writer)


class Part(NamedTuple):
    """A program that is replaced, and what it is started as."""

    kind: str
    program: Process
    command: tuple[str, ...]


@goal("F21", "programs replaced one by one, old and new side by side", without="the schemas before and after its own")
async def replaced(run: Run) -> None:
    """Replace every program by the next minor release's and back, under load: nothing lost, nothing refused."""
    old, new = this_release(), next_minor(run.place())
    async with serving(Remembering()) as handler, _working(run, handler) as chain:
        first, second = _parts(chain)
        database = await asyncpg.connect(chain.room.database_url)
        await database.execute(zombie_flow.EFFECTS)
        senders = Senders(chain.room.socket, _ENDLESS)
        jobs = 0
        async with _sending(senders):
            while run.trials < run.size.trials:
                for release, half in itertools.product((new, old), (first, second)):
                    for part in half:
                        await begin_job(database, _STEPS)
                        jobs += 1
                        await _replace(run, part, release)
                        await _go_on(run, (*first, *second), senders)
                    if not run.struck["schema migrated"]:
                        await _migrate(run, chain)
                        await _go_on(run, (*first, *second), senders)
                        await _look(run, database, old, new)
        await _reckon(run, chain, handler, senders)
        await each_step_took_effect_once(run, database, jobs, _STEPS)
        run.check(not await database.fetchval(_LETTERS), "there are dead letters")
        await database.close()


@asynccontextmanager
async def _working(run: Run, handler: CountingHandler) -> AsyncIterator[Chain]:
    """Run a chain of this release with two of each program that may have another beside it."""
    chain = Chain(run.place(), await run.servers.database(), run.servers.redis_url, handler.url, brokers=2)
    room = chain.room
    async with AsyncExitStack() as undo:
        balancer = Balancer(*(int(url.rpartition(":")[2]) for url in room.broker_urls))
        await undo.enter_async_context(balancer)
        undo.callback(chain.close)
        room.broker_urls = [balancer.url for _ in room.brokers]
        room.daemon.settle({"POSTROOM_DAEMON_BROKER_URL": balancer.url})
        await chain.open(worker=_WORKER)
        await chain.reader_ready()
        more = {
            "worker 2": chain.worker(chain.nats.url, _WORKER),
            "consumer 2": chain.consumer(chain.nats.url, {}),
            "agent 2": chain.agent(chain.nats.url),
        }
        chain.programs |= more
        for program in more.values():
            await _start(program)
        yield chain


def _parts(chain: Chain) -> tuple[list[Part], list[Part]]:
    """Return one program of each kind, and the other of each; there are two daemons, each with a member of its own."""
    commands = {"worker": ("postroom.worker", "run"), "consumer": ("cli", "consumer", "run")}
    commands["agent"] = ("cli", "agent", "run", "counting_agent:Counter")
    halves = []
    for broker, daemon, number in zip(
        chain.room.brokers, (chain.room.daemon, chain.programs["reader"]), ("", " 2"), strict=True
    ):
        others = [Part(kind, chain.programs[kind + number], command) for kind, command in commands.items()]
        halves.append([Part("broker", broker, ("broker",)), *others, Part("daemon", daemon, ("daemon",))])
    first, second = halves
    return first, second


@asynccontextmanager
async def _sending(senders: Senders) -> AsyncIterator[None]:
    """Let programs send for the length of the block; a message that is refused is a miss."""
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(_SENDERS):
                group.create_task(senders.write())
            yield
            senders.stop()
    except BaseExceptionGroup as errors:
        for error in errors.exceptions:
            if isinstance(error, Missed):
                raise error from None
        raise Missed(f"a message was refused: {errors.exceptions[0]!r}") from errors


async def _replace(run: Run, part: Part, release: Release) -> None:
    """Stop a program, and start it as the release has it."""
    code = await asyncio.to_thread(part.program.stop)
    run.check(code == 0, f"a {part.kind} ended with {code}: {part.program.log()[-500:]}")
    part.program.settle(release.settings)
    if run.without:
        part.program.become("faults.without", run.without, *part.command)
    await _start(part.program)
    run.struck[f"{part.kind} replaced"] += 1
    run.trials += 1


async def _start(program: Process) -> None:
    """Start a program, and return when it says that it works."""
    before = len(program.log())
    program.start()
    try:
        async with asyncio.timeout(PATIENCE):
            while not _READY & {_event(line) for line in program.log()[before:].splitlines()}:
                if program.exit_code is not None:
                    raise Missed(f"a program ended with {program.exit_code}: {program.log()[before:][-500:]}")
                await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError:
        raise Missed(f"a program did not say that it works: {program.log()[before:][-500:]}") from None


def _event(line: str) -> str:
    """Return what a line of a log is about, and nothing for one that is not whole yet."""
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):
        return ""


async def _go_on(run: Run, parts: Sequence[Part], senders: Senders) -> None:
    """Return when more has been accepted; raises `Missed` where a program has ended by itself."""
    try:
        async with asyncio.timeout(PATIENCE):
            await senders.reached(len(senders.sent) + run.size.load)
    except TimeoutError:
        raise Missed(f"fewer than {run.size.load} messages were accepted within {PATIENCE:.0f} s") from None
    for part in parts:
        code = part.program.exit_code
        run.check(code is None, f"a {part.kind} ended with {code}: {part.program.log()[-500:]}")


async def _migrate(run: Run, chain: Chain) -> None:
    """Bring the schema to the next release, as its operator does: by the broker that is of it already."""
    try:
        await chain.room.brokers[0].run("migrate")
    except AssertionError as error:
        raise Missed(f"the database could not be migrated: {str(error)[-500:]}") from None
    run.struck["schema migrated"] += 1


async def _look(run: Run, database: asyncpg.Connection[asyncpg.Record], old: Release, new: Release) -> None:
    """Note which versions run beside each other, as the programs themselves report it."""
    found = {row["found"] for row in await database.fetch(_VERSIONS)}
    missing = {f"{kind} {release.version}" for kind in ("broker", "worker") for release in (old, new)} - found
    run.check(not missing, f"not side by side: {', '.join(sorted(missing))}; there are {', '.join(sorted(found))}")
    run.figures.append(f"side by side: {', '.join(sorted(found))}")


async def _reckon(run: Run, chain: Chain, handler: CountingHandler, senders: Senders) -> None:
    accepted = await accepted_by(chain.room.database_url)
    lost = set(senders.sent) - accepted.events.keys() - accepted.commands.keys()
    run.check(not lost, f"of {len(senders.sent):,} messages that were said to be accepted {len(lost):,} are not")
    run.check("dead" not in kept(chain.room.state).values(), "messages were refused permanently")
    try:
        await everything_has_its_effect_once(chain, handler, chain.room.database_url)
    except AssertionError as error:
        raise Missed(str(error).splitlines()[0]) from error
    run.figures.append(f"{len(senders.sent):,} messages accepted")
