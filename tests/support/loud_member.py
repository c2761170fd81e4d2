"""A member that asks too much of a broker: run as `loud_member.py ATTACK URL TOKEN`, until it is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import secrets
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

import aiohttp
import msgspec

from postroom._wire.message import prepare

_numbers = itertools.count()


def item(meta: dict[str, object] | None = None, *, body: str = "hello", valid: bool = True) -> dict[str, object]:
    message = {"to": "topic:orders", "body": body, "meta": meta}
    prepared = prepare(msgspec.json.encode(message), idempotency_key=f"{os.getpid()}-{next(_numbers)}")
    return {
        "client_message_id": prepared.client_message_id,
        "request_fingerprint": prepared.fingerprint.hex() if valid else "0" * 64,
        "message": msgspec.Raw(prepared.payload),
    }


def batch(*items: dict[str, object]) -> bytes:
    return msgspec.json.encode({"messages": items})


class Loud:
    """One attacker; each attack is a coroutine for one connection, and how many of them there are."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        self.token = token
        self.session: aiohttp.ClientSession | None = None
        self.small_values = [
            batch(*(item({"a": [1] * 9900}) for _ in range(350))),
            batch(*(item({f"k{n:04}": n for n in range(9900)}) for _ in range(70))),
            batch(*(item({"a": [n + 0.5 for n in range(9900)]}) for _ in range(80))),
            batch(*(item({"a": [[]] * 9900}) for _ in range(200))),
            b'{"messages":[' + b"{}," * 2_000_000 + b"{}]}",
        ]
        self.refused = [batch(*(item(valid=False) for _ in range(1000))) for _ in range(4)]

    async def post(self, path: str, body: bytes, token: str | None = None) -> None:
        assert self.session is not None
        headers = {"Authorization": f"Bearer {token or self.token}", "Content-Type": "application/json"}
        async with self.session.post(self.url + path, data=body, headers=headers) as response:
            await response.read()

    async def connect(self) -> asyncio.StreamWriter:
        parts = urlsplit(self.url)
        _, writer = await asyncio.open_connection(parts.hostname, parts.port)
        return writer

    async def slow_bodies(self) -> None:
        writer = await self.connect()
        head = f"POST /v1/accept HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self.token}\r\n"
        writer.write(head.encode() + b"Content-Length: 1000000\r\n\r\n")
        for _ in range(20):
            writer.write(b"x" * 1000)
            await asyncio.sleep(0.1)
        writer.close()

    async def many_connections(self) -> None:
        writer = await self.connect()
        await asyncio.sleep(random.uniform(5, 10))
        writer.close()

    async def small_values_batches(self) -> None:
        await self.post("/v1/accept", random.choice(self.small_values))

    async def large_batches(self) -> None:
        await self.post("/v1/accept", batch(*(item(body="x" * 2000) for _ in range(1000))))

    async def invalid_tokens(self) -> None:
        await self.post("/v1/accept", b'{"messages":[]}', secrets.token_hex(16))

    async def refused_batches(self) -> None:
        await self.post("/v1/accept", random.choice(self.refused))

    async def waits(self) -> None:
        messages = [{"client_message_id": secrets.token_hex(8), "request_fingerprint": "0" * 64} for _ in range(100)]
        await self.post("/v1/accepted", msgspec.json.encode({"messages": messages}))

    async def history(self) -> None:
        assert self.session is not None
        async with self.session.get(
            f"{self.url}/v1/history?limit=1000", headers={"Authorization": f"Bearer {self.token}"}
        ) as response:
            await response.read()


ATTACKS: dict[str, tuple[Callable[[Loud], Awaitable[None]], int]] = {
    "slow bodies": (Loud.slow_bodies, 300),
    "many connections": (Loud.many_connections, 1500),
    "large batches of small values": (Loud.small_values_batches, 16),
    "large batches": (Loud.large_batches, 16),
    "invalid tokens": (Loud.invalid_tokens, 100),
    "refused batches": (Loud.refused_batches, 16),
    "waits": (Loud.waits, 64),
    "history": (Loud.history, 16),
}


async def main(attack: str, url: str, token: str) -> None:
    work, connections = ATTACKS[attack]
    loud = Loud(url, token)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as loud.session:

        async def on_and_on() -> None:
            while True:
                try:
                    await work(loud)
                except (aiohttp.ClientError, OSError):
                    await asyncio.sleep(0.01)

        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.gather(*(on_and_on() for _ in range(connections)))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
