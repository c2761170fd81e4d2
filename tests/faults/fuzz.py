"""Input that nobody should write: to the socket, to the broker, into the streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from support.chain import QUEUE, Chain
from support.effects import PATIENCE, Remembering
from support.handlers import CountingHandler, serving
from support.hostile import byte_writer, odd_messages, random_messages
from support.mailroom import MESH, TOPIC, Mailroom
from support.receiving import ids_in
from support.waiting import until_so

from faults.campaign import Missed, Run, goal
from postroom import AsyncClient, new_id

_AT_ONCE: Final = 8  # connections to each target
_PART: Final = 200  # requests between two looks at what went wrong
_ANSWER_SECONDS: Final = 2.0
_STREAM_SHARE: Final = 10  # of so many requests one message goes into each stream
_MOST_GROWTH: Final = 64 * 1024 * 1024  # bytes, after the first tenth

_SEEDS: Final = (
    (
        b"POST /v1/send HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 38\r\n\r\n"
        b'{"to":"topic:orders","body":"a body."}'
    ),
    (
        b"POST /v1/send/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        b'Transfer-Encoding: chunked\r\n\r\n21\r\n{"to":"topic:orders","body":"b"}\n\r\n0\r\n\r\n'
    ),
    b"GET /v1/outbox?status=dead&limit=10 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/sends/some-id?wait=0.1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/events?since=2026-01-31T12:00:00Z HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: 7\r\n\r\n",
    b"GET /v1/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    (
        b"POST /v1/relay/pause HTTP/1.1\r\nHost: localhost\r\nContent-Length: 45\r\n\r\n"
        b'{"reason":"why not","destination":"topic:no"}'
    ),
)
_BROKER_SEEDS: Final = (
    (
        b"POST /v1/accept HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %(token)s\r\n"
        b"Content-Type: application/json\r\nContent-Length: %(length)d\r\n\r\n%(body)s"
    ),
    b"GET /v1/history?after=0&limit=3 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %(token)s\r\n\r\n",
    b"GET /v1/features HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %(token)s\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
)
_PIECES: Final = (
    b"\x00", b"\xff\xfe", b"\r\n", b"\r\n\r\n", b"%00", b"../", b"\\ud800", b'"', b"{", b"}", b"[" * 2000, b"9" * 400,
    b"-1", b"1e999", b"null", b"true", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"\xf0\x9f\x98\x80",
    b"topic:", b"dm:alice", b"queue:a.b.c.d.e", b"HTTP/9.9", b"Expect: 100-continue\r\n", b"A" * 9000,
)  # fmt: skip


def mutated(request: bytes, chance: random.Random) -> bytes:
    """Return a request that is wrong somewhere: anywhere, or in its body alone, or in its target alone."""
    head, separator, body = request.partition(b"\r\n\r\n")
    match chance.randrange(4):
        case 0:
            return _changed(request, chance)
        case 1:
            method, _, rest = head.partition(b" ")
            target, _, rest = rest.partition(b" ")
            return b" ".join((method, _changed(target, chance), rest)) + separator + body
        case _:
            data = _changed(body, chance)
            length = b"Content-Length: %d" % len(data)
            return re.sub(rb"Content-Length: \d+", length, head) + separator + data


def _changed(text: bytes, chance: random.Random) -> bytes:
    """Return a text with some bytes changed, and pieces put in, cut out or doubled."""
    data = bytearray(text)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.randrange(1, 40))
        match chance.randrange(4):
            case 0:
                data[at:end] = chance.randbytes(end - at)
            case 1:
                data[at:at] = chance.choice(_PIECES)
            case 2:
                del data[at:end]
            case _:
                data[at:at] = data[at:end]
    return bytes(data)


class Target(NamedTuple):
    """Who is written to: a Unix socket or a port of loopback, and the requests that are changed."""

    name: str
    address: Path | int
    seeds: tuple[bytes, ...]
    pid: Callable[[], int]


@goal("F16", "bad input")
async def bad_input(run: Run) -> None:
    """Fuzz daemon and broker, and put anything into the streams: no 5xx, no exit, no stuck reader, no more memory."""
    async with serving(Remembering()) as handler:
        chain = Chain(run.place(), await run.servers.database(), run.servers.redis_url, handler.url)
        try:
            await chain.open()
            await chain.reader_ready()
            targets = _targets(chain.room)
            memory: dict[str, int] = {}
            requests = run.size.trials // len(targets)
            for first in range(0, requests, _PART):
                parts = [_fuzz(run, target, min(_PART, requests - first)) for target in targets]
                await asyncio.gather(*parts)
                await _hostile(run, chain, first // _STREAM_SHARE)
                for target in targets:
                    used = _resident(target.pid())
                    if first >= requests // 10:
                        memory.setdefault(target.name, used)
                    growth = used - memory.get(target.name, used)
                    run.check(growth <= _MOST_GROWTH, f"the {target.name} grew by {growth // 2**20} MB")
            for program in (chain.room.daemon, *chain.room.brokers, *chain.programs.values()):
                run.check(program.running, f"a program ended with {program.exit_code}: {program.log()[-500:]}")
            await _still_reading(chain, handler)
        finally:
            chain.close()


def _targets(room: Mailroom) -> list[Target]:
    body = b'{"messages":[{"client_message_id":"a","request_fingerprint":"00","message":{"to":"topic:orders"}}]}'
    values = {b"token": room.token.encode(), b"length": len(body), b"body": body}
    port = urlsplit(room.broker_urls[0]).port
    assert port is not None
    return [
        Target("daemon", room.socket, _SEEDS, lambda: room.daemon.pid),
        Target("broker", port, tuple(seed % values for seed in _BROKER_SEEDS), lambda: room.brokers[0].pid),
    ]


async def _fuzz(run: Run, target: Target, requests: int) -> None:
    """Write changed requests, each on a connection of its own, several at once."""
    waiting = iter([mutated(run.chance.choice(target.seeds), run.chance) for _ in range(requests)])

    async def work() -> None:
        for request in waiting:
            status = await _exchange(target.address, request)
            run.struck[f"request to the {target.name}"] += 1
            run.trials += 1
            run.check(status < 500, f"the {target.name} answered {status} to {request[:300]!r}")

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))


async def _exchange(address: Path | int, request: bytes) -> int:
    """Return the status of the first answer, 0 where there is none."""
    if isinstance(address, Path):
        reader, writer = await asyncio.open_unix_connection(address)
    else:
        reader, writer = await asyncio.open_connection("127.0.0.1", address)
    line = b""
    try:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            writer.write(request)
            if writer.can_write_eof():
                writer.write_eof()
            async with asyncio.timeout(_ANSWER_SECONDS):
                line = await reader.readline()
    finally:
        writer.transport.abort()
    words = line.split(b" ")
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0


async def _hostile(run: Run, chain: Chain, number: int) -> None:
    """Put odd messages into each stream of the mesh."""
    messages = list(odd_messages()) if number == 0 else []
    messages += random_messages(_PART // _STREAM_SHARE, seed=run.chance.randrange(2**32))
    async with byte_writer(chain.nats.url) as writer:
        for subject in (f"{MESH}.event.orders.v1", f"{MESH}.inbox.bob", f"cmd.{MESH}.default.counter.run"):
            await writer.publish(subject, messages)
            run.struck["message into a stream"] += len(messages)


async def _still_reading(chain: Chain, handler: CountingHandler) -> None:
    """Fail unless an event and a command that come after all that still arrive."""
    async with AsyncClient(chain.room.socket, patience=PATIENCE) as client:
        sent = {to: new_id() for to in (TOPIC, QUEUE)}
        ids = {}
        for to, name in sent.items():
            await client.send(to, json.dumps({"after": "all that"}), client_message_id=name)
            ids[to] = (await client.wait(name, PATIENCE)).broker_message_id
    answer = handler.answer
    assert isinstance(answer, Remembering)

    async def arrived() -> bool:
        return (
            ids[TOPIC] in answer.names
            and "command_counted" in answer.names.values()
            and sent[TOPIC] in ids_in(chain.reader_state)
        )

    try:
        await until_so(arrived, seconds=PATIENCE)
    except TimeoutError:
        raise Missed("a reader is stuck: an event or a command does not arrive any more") from None


def _resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))) * 1024
