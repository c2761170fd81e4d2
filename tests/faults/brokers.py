"""The servers behind the broker fail, and its clients race."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Final, NamedTuple, Self, TypeVar

import aiohttp
import asyncpg
import msgspec
from redis import Redis
from support.mailroom import TOPIC, Mailroom
from support.waiting import until_so

from embedded import EmbeddedPostgres, EmbeddedRedis
from faults.campaign import Run, create_database, goal
from faults.load import mailroom, reckon, relayed, writing
from faults.nemesis import Line, killed
from postroom._wire.accept import AcceptAnswer, AcceptResponse, RawAcceptItem
from postroom._wire.message import SendRequest, prepare

T = TypeVar("T")

_LATENCY: Final = 0.05  # seconds from Postgres to the broker: of a network, and time for a kill to fall into
_BACK_SECONDS: Final = 60.0  # until messages are accepted again after a restart
_REST: Final = 0.3  # seconds between two messages or batches of one writer
_POSTS: Final = 32  # of one id at once
_IDS: Final = 20  # in one post
_RETRIED: Final = 10  # messages in one post of retries, and as many new ones beside them
_QUIET_PLUS: Final = 0.25  # seconds by which the slowest hundredth may be slower than on a quiet Redis

_FORGET: Final = """
CREATE FUNCTION forget_the_row() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM mesh.client_message_dedupe WHERE broker_message_id = NEW.broker_message_id;
  RETURN NULL;
END $$;
CREATE TRIGGER forget AFTER INSERT ON mesh.client_message_dedupe FOR EACH ROW EXECUTE FUNCTION forget_the_row();
"""
_UNLOCK: Final = "ALTER TABLE mesh.client_message_dedupe DROP CONSTRAINT client_message_dedupe_pkey"


@goal("F6", "Postgres restarted, half of it kill -9", without="the dedupe row")
async def restarted_postgres(run: Run) -> None:
    """Restart it every few seconds under load; what was acknowledged is accepted once."""
    server = EmbeddedPostgres(run.place() / "postgres")
    server.start()
    async with AsyncExitStack() as undo:
        undo.callback(server.stop)
        await create_database(server.url, "own")
        line = Line(server.socket_directory / ".s.PGSQL.5432", run.place() / ".s.PGSQL.5432", delay=_LATENCY)
        await undo.enter_async_context(line)
        url = f"postgresql://postroom@/own?host={line.here.parent}"
        room = await undo.enter_async_context(mailroom(run, database_url=url))
        if run.without:
            await _execute(server.url_of("own"), _FORGET)
        async with writing(run, room, rest=_REST) as writers:
            for restart in range(1, run.size.trials + 1):
                await writers.reached(run.size.load * restart // run.size.trials)
                held = await _count(server.url_of("own"))
                await until_so(partial(_more_than, server.url_of("own"), held), _BACK_SECONDS)
                await asyncio.sleep(run.chance.uniform(3, 10))
                if run.chance.random() < 1 / 2:
                    killed(server)
                    run.struck["kill -9"] += 1
                else:
                    run.struck["restart"] += 1
                await line.cut()  # what it had answered, and nobody heard yet, is never heard
                server.stop()
                server.start()
                await line.mend()
                run.trials += 1
        await relayed(room.state)
        await reckon(writers.acknowledged, server.url_of("own"))
    run.figures.append(f"{len(writers.acknowledged):,} acknowledged")


@goal("F7", "one id, 32 at once, half with other content", without="the key of the dedupe rows")
async def raced_ids(run: Run) -> None:
    """Post each id many times at once to two brokers: one 201, the same content 200, other content 409."""
    async with mailroom(run, brokers=2) as room:
        if run.without:
            await _execute(room.database_url, _UNLOCK)
        async with Poster(room) as poster:
            for ids in _parts(range(run.size.trials), _IDS):
                await _race(run, poster, [f"race-{run.seed}-{number}" for number in ids])
                run.trials += len(ids)


async def _race(run: Run, poster: Poster, ids: Sequence[str]) -> None:
    posts = []
    for number in range(_POSTS):
        contents = [(name, ("this", "that")[(number + place) % 2]) for place, name in enumerate(ids)]
        run.chance.shuffle(contents)
        posts.append(contents)
    answers = await asyncio.gather(*(poster.post(contents) for contents in posts))
    told: defaultdict[str, Counter[tuple[int, str]]] = defaultdict(Counter)
    for contents, answered in zip(posts, answers, strict=True):
        for (name, content), answer in zip(contents, answered, strict=True):
            told[name][answer.status, content] += 1
    for name, counted in told.items():
        (first, other) = ("this", "that") if counted[201, "this"] else ("that", "this")
        expected = {(201, first): 1, (200, first): _POSTS // 2 - 1, (409, other): _POSTS // 2}
        run.check(counted == expected, f"{name} was answered {dict(counted)}")
        run.struck["collision"] += _POSTS - 1


@goal("F8", "Redis killed, stopped, flushed, evicting", alone=True)
async def failing_redis(run: Run) -> None:
    """Retry committed ids beside new ones while Redis fails: none is refused, and none waits for it."""
    server = EmbeddedRedis(run.place() / "redis")
    server.start()
    try:
        async with mailroom(run, redis_url=server.url) as room, Poster(room) as poster:
            committed = [f"committed-{run.seed}-{number}" for number in range(run.size.load)]
            for names in _parts(committed, 500):
                await poster.post([(name, "body") for name in names])
            quiet = await _retry(run, poster, committed, "quiet")
            for name, fail, mend in _redis_faults(server):
                fail()
                try:
                    seconds = await _retry(run, poster, committed, name)
                finally:
                    mend()
                run.struck[name] += 1
                slower = seconds - quiet
                run.figures.append(f"{name}: p99 {1000 * slower:+.0f} ms")
                run.check(slower <= _QUIET_PLUS, f"{name}: the slowest hundredth waits {slower:.2f} s longer")
    finally:
        server.stop()


class _RedisFault(NamedTuple):
    name: str
    fail: Callable[[], object]
    mend: Callable[[], object]


def _redis_faults(server: EmbeddedRedis) -> list[_RedisFault]:
    def command(*words: str) -> None:
        with Redis.from_url(server.url) as client:
            client.execute_command(*words)

    def fill() -> None:
        command("CONFIG", "SET", "maxmemory", "1500kb", "maxmemory-policy", "allkeys-random")
        with Redis.from_url(server.url) as client:
            for number in range(100):
                client.set(f"ballast-{number}", bytes(20_000))

    def send(number: signal.Signals) -> None:
        process = server.process
        assert process is not None
        process.send(number)

    return [
        _RedisFault("flushed", lambda: command("FLUSHALL"), lambda: None),
        _RedisFault("evicting", fill, lambda: command("CONFIG", "SET", "maxmemory", "64mb")),
        _RedisFault("stopped", lambda: send(signal.SIGSTOP), lambda: send(signal.SIGCONT)),
        _RedisFault("killed", lambda: killed(server), server.start),
    ]


async def _retry(run: Run, poster: Poster, committed: Sequence[str], while_: str) -> float:
    """Retry every committed id, each post with as many new ones; return the time of the slowest hundredth, in s."""
    seconds: list[float] = []
    waiting = iter(_parts(run.chance.sample(committed, len(committed)), _RETRIED))

    async def work() -> None:
        for number, names in enumerate(waiting):
            new = [(f"{while_}-{id(names)}-{number}-{place}", "new") for place in range(len(names))]
            began = time.perf_counter()
            answers = await poster.post([*((name, "body") for name in names), *new])
            seconds.append(time.perf_counter() - began)
            refused = [answer.status for answer in answers[: len(names)] if answer.status != 200]
            run.check(not refused, f"{while_}: {len(refused)} retries of committed ids were answered {set(refused)}")
            run.trials += len(names)

    await asyncio.gather(*(work() for _ in range(4)))
    return sorted(seconds)[len(seconds) * 99 // 100]


class Poster:
    """Posts batches to the brokers of a room as a relay does, in turns."""

    def __init__(self, room: Mailroom, token: str | None = None) -> None:
        self._urls = [f"{url}/v1/accept" for url in room.broker_urls]
        self._headers = {"Authorization": f"Bearer {token or room.token}", "Content-Type": "application/json"}
        self._posts = 0

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def post(self, messages: Sequence[tuple[str, str]]) -> list[AcceptAnswer]:
        """Post messages, each an id and a body, and return an answer for each."""
        prepared = [
            prepare(msgspec.json.encode(SendRequest(to=TOPIC, body=body)), idempotency_key=name)
            for name, body in messages
        ]
        items = [
            RawAcceptItem(
                client_message_id=send.client_message_id,
                request_fingerprint=send.fingerprint.hex(),
                message=msgspec.Raw(send.payload),
            )
            for send in prepared
        ]
        self._posts += 1
        url = self._urls[self._posts % len(self._urls)]
        body = msgspec.json.encode({"messages": items})
        async with self._session.post(url, data=body, headers=self._headers) as answer:
            content = await answer.read()
            if answer.status != 200:
                return [AcceptAnswer(status=answer.status, client_message_id=name) for name, _ in messages]
        return msgspec.json.decode(content, type=AcceptResponse).answers


async def _count(url: str) -> int:
    connection = await asyncpg.connect(url)
    messages = await connection.fetchval("SELECT count(*) FROM mesh.topic_message")
    await connection.close()
    return int(messages)


async def _more_than(url: str, messages: int) -> bool:
    return await _count(url) > messages


def _parts(whole: Sequence[T], size: int) -> list[Sequence[T]]:
    return [whole[start : start + size] for start in range(0, len(whole), size)]


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(statement)
    await connection.close()
