"""What may take the short way: one whole request that aiohttp would read as the same one, and nothing else."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpRequestParser
from hypothesis import given
from hypothesis import strategies as st

from ipc.connection import Arrived, read

LINE = b"POST /v1/send HTTP/1.1\r\n"
FIELDS = b"Host: localhost\r\nContent-Type: application/json\r\n"
SEND = LINE + FIELDS + b"Content-Length: 2\r\n\r\n{}"


def test_one_whole_request_is_read() -> None:
    fields = {"host": "localhost", "content-type": "application/json", "content-length": "2"}
    assert read(SEND) == Arrived("POST /v1/send HTTP/1.1", fields, b"{}")
    asked = read(b"GET /v1/sends/a?wait=1 HTTP/1.1\r\nhost:\tx \r\n\r\n")
    assert asked == Arrived("GET /v1/sends/a?wait=1 HTTP/1.1", {"host": "x"}, b"")
    assert read(LINE + b"Host: x\r\nconnection:Keep-Alive\r\n\r\n") is not None


UNCLEAR = {
    "nothing": b"",
    "half a head": SEND[:30],
    "half a body": SEND[:-1],
    "more than a body": SEND + b" ",
    "two requests": SEND + SEND,
    "lines that end in LF": SEND.replace(b"\r\n", b"\n"),
    "one line that ends in LF": SEND.replace(b"\r\nHost", b"\nHost"),
    "one field that ends in LF": SEND.replace(b"localhost\r\n", b"localhost\n"),
    "a CR in a value": SEND.replace(b"localhost", b"local\rhost"),
    "a NUL in a value": SEND.replace(b"localhost", b"local\0host"),
    "a NUL in a name": SEND.replace(b"Host", b"Ho\0st"),
    "a name of 8 bits": SEND.replace(b"Host", b"H\xf6st"),
    "a value of 8 bits": SEND.replace(b"localhost", b"l\xf6calhost"),
    "a space before the colon": SEND.replace(b"Host:", b"Host :"),
    "a space before the name": SEND.replace(b"Host:", b" Host:"),
    "a folded field": SEND.replace(b"localhost\r\n", b"localhost\r\n folded\r\n"),
    "a field without a name": SEND.replace(b"Host:", b":"),
    "a line without a colon": SEND.replace(b"Host: ", b""),
    "a field twice": SEND.replace(FIELDS, FIELDS + b"host: other\r\n"),
    "two lengths": SEND.replace(FIELDS, FIELDS + b"Content-Length: 2\r\n"),
    "no host": SEND.replace(b"Host: localhost\r\n", b""),
    "a length and chunks": SEND.replace(FIELDS, FIELDS + b"Transfer-Encoding: chunked\r\n"),
    "chunks": LINE + FIELDS + b"transfer-encoding: chunked\r\n\r\n",
    "a length with a sign": SEND.replace(b": 2", b": +2"),
    "a length with an underscore": SEND.replace(b": 2", b": 0_2"),
    "a length in hex": SEND.replace(b": 2", b": 0x2"),
    "a length with a zero before it": SEND.replace(b": 2", b": 02"),
    "a length of many digits": SEND.replace(b": 2", b": " + b"0" * 5000 + b"2"),
    "an empty length": SEND.replace(b": 2", b": "),
    "an expectation": SEND.replace(FIELDS, FIELDS + b"Expect: 100-continue\r\n"),
    "an upgrade": SEND.replace(FIELDS, FIELDS + b"Upgrade: h2c\r\n"),
    "an end": SEND.replace(FIELDS, FIELDS + b"Connection: close\r\n"),
    "a head of 64 KiB": SEND.replace(b"localhost", b"x" * 65536),
    "HTTP/1.0": SEND.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "two spaces": SEND.replace(b"POST ", b"POST  "),
    "a tab": SEND.replace(b"POST ", b"POST\t"),
    "a line end before it": b"\r\n" + SEND,
    "a method in lower case": SEND.replace(b"POST", b"post"),
    "another method": SEND.replace(b"POST", b"CONNECT"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_could_be_read_another_way_is_left_to_aiohttp(name: str) -> None:
    assert read(UNCLEAR[name]) is None


_PIECES = st.sampled_from(
    [
        *(
            b"POST ",
            b"GET ",
            b"/v1/send",
            b"/",
            b" HTTP/1.1\r\n",
            b"\r\n",
            b"\n",
            b"\r",
            b" ",
            b"\t",
            b":",
            b"\0",
            b"{}",
        ),
        *(
            b"Host: x\r\n",
            b"Content-Length: 2\r\n",
            b"content-length: 0\r\n",
            b"Content-Length:\t2 \r\n",
            b"X: 1, 2\r\n",
        ),
        *(b"Transfer-Encoding: chunked\r\n", b"Connection: keep-alive\r\n", b"Upgrade: x\r\n", b"2\r\n{}\r\n0\r\n\r\n"),
        *(b"Content-Length: ", b"2", b"X", b"Host", b"\xff", SEND, LINE, FIELDS),
    ]
)


@given(st.lists(_PIECES, max_size=12).map(b"".join) | st.binary(max_size=60))
def test_aiohttp_reads_the_same_request(data: bytes) -> None:
    arrived = read(LINE + data) or read(data)
    if arrived is None:
        return
    loop = asyncio.new_event_loop()
    try:
        whole = data if read(LINE + data) is None else LINE + data
        messages, upgraded, tail = HttpRequestParser(BaseProtocol(loop), loop, 2**16).feed_data(whole)
    finally:
        loop.close()
    ((message, body),) = messages
    assert (upgraded, tail, body.is_eof()) == (False, b"", True)
    assert arrived.line == f"{message.method} {message.path} HTTP/1.1"
    assert arrived.fields == {name.lower(): value for name, value in message.headers.items()}
    assert not message.should_close
    assert not message.chunked
    assert arrived.body == body.read_nowait()
