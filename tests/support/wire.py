"""HTTP by hand: requests that may be broken on purpose, answers taken apart, and fixtures that are the daemon."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web


@dataclass
class Reply:
    """An answer, taken apart; `json` is its body decoded."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.body.splitlines()]


def encode(method: str, target: str, body: Any = None, headers: dict[str, str] | None = None) -> bytes:
    """Write a request down; a body that is not bytes goes as JSON."""
    data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "localhost", "Content-Length": str(len(data)), "Connection": "close"}
    if body is not None:
        fields["Content-Type"] = "application/json"
    fields.update(headers or {})
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data


def parse(answer: bytes) -> Reply:
    """Take the first answer apart, chunked or not."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *fields = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in fields)}
    if headers.get("transfer-encoding") == "chunked":
        body = _unchunk(body)
    elif "content-length" in headers:
        body = body[: int(headers["content-length"])]
    return Reply(int(status.split(" ")[1]), headers, body)


def _unchunk(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        body, data = body + data[: int(size, 16)], data[int(size, 16) + 2 :]
    return body


SECRET = "s3cr3tT0k3n"
MALFORMED = {
    name: text.replace("SECRET", SECRET).encode("latin-1")
    for name, text in {
        "a NUL in the token": "GET /v1/ready HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SECRET\0\r\n\r\n",
        "a CR in the token": "GET /v1/ready HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer SEC\rSECRET\r\n\r\n",
        "a token where a name should be": "GET /v1/ready HTTP/1.1\r\nHost: x\r\nBearer SECRET: x\r\n\r\n",
        "a token without a name": "GET /v1/ready HTTP/1.1\r\nHost: x\r\nSECRET\r\n\r\n",
        "a token folded": "GET /v1/ready HTTP/1.1\r\nHost: x\r\nX: y\r\n SECRET\0\r\n\r\n",
        "a token in a broken target": "GET /v1/ready?token=SECRET\0 HTTP/1.1\r\nHost: x\r\n\r\n",
        "a token in a broken request line": "GET /v1/ready SECRET HTTP/1.1\r\nHost: x\r\n\r\n",
        "a token as the method": "SECRET\0 /v1/ready HTTP/1.1\r\nHost: x\r\n\r\n",
        "a token as the version": "GET /v1/ready HTTP/SECRET\r\nHost: x\r\n\r\n",
        "a token as the length": "POST /v1/send HTTP/1.1\r\nHost: x\r\nContent-Length: SECRET\r\n\r\n",
        "a token as the size of a chunk": "POST /v1/send HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked\r\n\r\nSECRET\r\n",
        "a token in a line too long": f"GET /v1/ready HTTP/1.1\r\nAuthorization: SECRET{'x' * 70_000}\r\n\r\n",
        "a token in a target that is no path": "GET http://[SECRET HTTP/1.1\r\nHost: x\r\n\r\n",
        "a token in a path": "GET /v1/Bearer%20x/SECRET\x7f HTTP/1.1\r\nHost: x\r\n\r\n",
    }.items()
}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[Path]]
Speak = Callable[[bytes], Awaitable[Path]]
Conversation = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Talk = Callable[[Conversation], Awaitable[Path]]
