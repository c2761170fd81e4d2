"""The load on the batch route: N connections, each streaming NDJSON lines and reading a result line for each.

Runs as a process of its own (`python -m bench.stream`); prints one JSON object with the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Final

from bench.load import message

_HEAD: Final = (
    b"POST /v1/send/batch HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_LINES_A_CHUNK: Final = 32


async def stream(socket: str, lines: int, first: int) -> int:
    """Stream `lines` sends over one connection; return how many were kept."""
    reader, writer = await asyncio.open_unix_connection(socket, limit=2**20)
    sending = asyncio.create_task(_send(writer, lines, first))
    await reader.readuntil(b"\r\n\r\n")
    kept = answered = 0
    rest = b""
    while answered < lines and (data := await reader.read(2**18)):
        whole, newline, rest = (rest + data).rpartition(b"\n")
        answered += (whole + newline).count(b'{"line":')
        kept += whole.count(b'"result":')
    await sending
    writer.close()
    return kept


async def _send(writer: asyncio.StreamWriter, lines: int, first: int) -> None:
    head, tail = message()[:-1] + b',"client_message_id":"', b'"}\n'
    writer.write(_HEAD)
    for start in range(first, first + lines, _LINES_A_CHUNK):
        end = min(start + _LINES_A_CHUNK, first + lines)
        chunk = b"".join(head + b"01J%023d" % number + tail for number in range(start, end))
        writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        await writer.drain()
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def run(socket: str, connections: int, lines: int, first: int) -> dict[str, float]:
    """Stream `lines` over each of the connections at once; messages a second, and how many were kept."""
    began = time.perf_counter()
    kept = await asyncio.gather(*(stream(socket, lines, first + n * lines) for n in range(connections)))
    return {"per_second": sum(kept) / (time.perf_counter() - began), "kept": sum(kept), "sent": connections * lines}


def main() -> None:
    """Parse the options, run the load, print its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--connections", type=int, required=True)
    parser.add_argument("--lines", type=int, required=True, help="lines on each connection")
    parser.add_argument("--first", type=int, default=0, help="the number of the first id")
    options = parser.parse_args()
    print(json.dumps(asyncio.run(run(options.socket, options.connections, options.lines, options.first))))


if __name__ == "__main__":
    main()
