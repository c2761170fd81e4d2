"""A hostile caller of a daemon's socket: a process (`python -m faults.attacker KIND`) under a uid of its own.

It attacks until it is stopped, and tells on standard output when the attack is under way.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final

import uvloop

from bench.load import become

_MANY: Final = 2000  # connections
_BEYOND: Final = 5000  # connections: more than a daemon has room for
_FEW: Final = 16  # connections that each send as much as they can
_BATCH_BYTES: Final = 8 * 1024 * 1024
_DRIP_SECONDS: Final = 0.5
_AGAIN_SECONDS: Final = 0.05  # after a refusal or a dropped connection

_SMALL: Final = b'{"to":"topic:orders"}\n'
_VALUES: Final = b'{"to":"topic:orders","meta":{"a":[%b1]}}' % (b"1," * 9990)
_FLOATS: Final = json.dumps({"to": "topic:orders", "meta": {f"k{n}": n / 7 for n in range(9990)}}).encode()
_LARGE: Final = json.dumps({"to": "topic:orders", "meta": {"a": ["x" * 200] * 5000}}).encode()
_TOO_MANY: Final = b'{"to":"topic:orders","meta":{"a":[%b1]}}' % (b"1," * 2_000_000)


def request(path: str, body: bytes, media: str = "application/json", length: int | None = None) -> bytes:
    """Return a POST of `body`, which may promise another `length`."""
    fields = f"Host: localhost\r\nContent-Type: {media}\r\nContent-Length: {len(body) if length is None else length}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + body


class Attacker:
    """Attacks `socket`."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    async def waits(self) -> None:
        """Wait for a send that does not settle, a thousand times at once."""
        await self._exchange(request("/v1/send", b'{"to":"topic:orders","client_message_id":"waited"}'))
        ask = b"GET /v1/sends/waited?wait=60 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        await self._at_once(_MANY, lambda: self._exchange(ask))

    async def connections(self) -> None:
        """Open more connections than there is room for, and each that is closed again."""
        await self._at_once(_BEYOND, lambda: self._exchange(b""))

    async def batches(self) -> None:
        """Send batches of 8 MB, of the smallest messages that there are."""
        await self._flood(request("/v1/send/batch", _SMALL * (_BATCH_BYTES // len(_SMALL)), "application/x-ndjson"))

    async def values(self) -> None:
        """Send batches of 8 MB, of messages with ten thousand values each."""
        lines = (_VALUES + b"\n") * (_BATCH_BYTES // len(_VALUES))
        await self._flood(request("/v1/send/batch", lines, "application/x-ndjson"))

    async def metas(self) -> None:
        """Send large metas that take long to check, one after the other."""
        await self._flood(request("/v1/send", _FLOATS) + request("/v1/send", _LARGE))

    async def refused(self) -> None:
        """Send 4 MB that are refused, one after the other."""
        await self._flood(request("/v1/send", _TOO_MANY))

    async def bodies(self) -> None:
        """Drip the bodies of a thousand sends, a byte at a time."""
        await self._at_once(_MANY, self._drip)

    async def pipelines(self) -> None:
        """Ask for more and more without waiting for an answer."""
        await self._flood(b"GET /v1/ready HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)

    async def sends(self) -> None:
        """Send from a thousand connections at once."""
        await self._at_once(_MANY, lambda: self._repeat(request("/v1/send", _SMALL.strip())))

    async def _at_once(self, count: int, attack: Callable[[], Awaitable[None]]) -> None:
        tasks = [asyncio.create_task(self._again(attack)) for _ in range(count)]
        await asyncio.sleep(1)
        sys.stdout.write("under way\n")
        sys.stdout.flush()
        await asyncio.gather(*tasks)

    async def _again(self, attack: Callable[[], Awaitable[None]]) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError):
                await attack()
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _flood(self, data: bytes) -> None:
        await self._at_once(_FEW, lambda: self._stream(data))

    async def _stream(self, data: bytes) -> None:
        """Write `data` again and again, and read what comes back."""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            reading = asyncio.create_task(reader.read(-1))
            while not reading.done():
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def _repeat(self, data: bytes) -> None:
        """Write `data`, and again as soon as something comes back."""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(data)
            while await reader.read(65536):
                writer.write(data)
        finally:
            writer.close()

    async def _exchange(self, data: bytes) -> None:
        """Write `data`, and read until there is an answer or an end."""
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(data)
            await reader.read(65536)
        finally:
            writer.close()

    async def _drip(self) -> None:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            writer.write(request("/v1/send", b"{", length=4000))
            while not reader.at_eof():
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(_DRIP_SECONDS)
        finally:
            writer.close()


KINDS: Final[Mapping[str, Callable[[Attacker], Awaitable[None]]]] = {
    name: getattr(Attacker, name)
    for name in ("waits", "connections", "batches", "values", "metas", "refused", "bodies", "pipelines", "sends")
}


def main() -> None:
    """Attack until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--uid", type=int)
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    become(options.uid)
    uvloop.run(_attack(options.kind, options.socket))


async def _attack(kind: str, socket: str) -> None:
    await KINDS[kind](Attacker(socket))


if __name__ == "__main__":
    main()
