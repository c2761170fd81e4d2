"""HTTP by hand: requests that may be broken on purpose, and answers taken apart."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


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
