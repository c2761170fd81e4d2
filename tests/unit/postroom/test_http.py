"""Reading an answer: the same in whatever pieces it comes, and nothing that is not plainly one."""

from __future__ import annotations

import pytest

from postroom._wire.http import MAX_HEAD, AnswerReader, Garbled, Head, Site, chunk, lines_of

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = Head(200, "application/octet-stream", 2, chunked=False, closes=False)
CHUNKED = PLAIN._replace(length=None, chunked=True)
EXPOSED = {
    "http://broker:7420": True,
    "http://10.0.0.7": True,
    "http://0.0.0.0:7420": True,
    "http://[fd00::1]": True,
    "https://broker:7420": False,
    "http://localhost:7420": False,
    "http://127.9.9.9": False,
    "http://[::1]:7420": False,
}
WHOLE: dict[str, tuple[bytes, Head, bytes]] = {
    "a length": (OK + b"Content-Length: 2\r\n\r\n{}", PLAIN, b"{}"),
    "no reason": (b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\n{}", PLAIN, b"{}"),
    "names in any case": (OK + b"cOnTeNt-LeNgTh:2 \t\r\n\r\n{}", PLAIN, b"{}"),
    "a media type": (
        OK + b"Content-Type: Application/JSON; charset=utf-8\r\nContent-Length: 2\r\n\r\n{}",
        PLAIN._replace(media="application/json"),
        b"{}",
    ),
    "two media types": (
        OK + b"Content-Type: text/html\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
        PLAIN._replace(media="text/html,text/plain"),
        b"{}",
    ),
    "a connection that ends": (
        OK + b"Connection: x, Close\r\nContent-Length: 2\r\n\r\n{}",
        PLAIN._replace(closes=True),
        b"{}",
    ),
    "the old protocol": (b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\n{}", PLAIN._replace(closes=True), b"{}"),
    "nothing": (OK + b"Content-Length: 0\r\n\r\n", PLAIN._replace(length=0), b""),
    "no content": (b"HTTP/1.1 204 No Content\r\n\r\n", PLAIN._replace(status=204, length=0), b""),
    "interim answers": (
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
        + OK
        + b"Content-Length: 2\r\n\r\n{}",
        PLAIN,
        b"{}",
    ),
    "chunks": (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n001;a=b\r\n}\r\n0\r\n\r\n", CHUNKED, b"{}"),
    "trailers": (OK + b"Transfer-Encoding: chunked\r\n\r\n2 \r\n{}\r\n0\r\nA: b\r\nC:\r\n\r\n", CHUNKED, b"{}"),
    "line breaks within chunks": (
        OK + b"Transfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n",
        CHUNKED,
        b"\r\n\r\n",
    ),
}
GARBLED = {
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"HTTP/2 200 OK\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 99 Low\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 High\r\n\r\n",
    "a status that is too high": b"HTTP/1.1 600 High\r\n\r\n",
    "other digits": "HTTP/1.1 ٢٠٠ OK\r\n\r\n".encode(),
    "a NUL in a header": OK + b"A: \0\r\n\r\n",
    "a bare line feed": OK + b"A: b\nContent-Length: 2\r\n\r\n{}",
    "a bare carriage return": OK + b"A: b\rC: d\r\n\r\n",
    "a folded header": OK + b"A: b\r\n c\r\n\r\n",
    "a space before the colon": OK + b"Content-Length : 2\r\n\r\n{}",
    "a header without a name": OK + b": 2\r\n\r\n",
    "no colon": OK + b"Content-Length\r\n\r\n",
    "a negative length": OK + b"Content-Length: -2\r\n\r\n{}",
    "a signed length": OK + b"Content-Length: +2\r\n\r\n{}",
    "a length in hex": OK + b"Content-Length: 0x2\r\n\r\n{}",
    "an endless length": OK + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n{}",
    "two lengths": OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "two lengths in one": OK + b"Content-Length: 2, 2\r\n\r\n{}",
    "a length and chunks": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two codings": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding of its own": OK + b"Transfer-Encoding: rot13\r\n\r\n",
    "chunks in the old protocol": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a compressed body": OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "another protocol after this": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "a chunk without a size": OK + b"Transfer-Encoding: chunked\r\n\r\n\r\n",
    "a chunk with a negative size": OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
    "a chunk with an endless size": OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 300,
    "a chunk larger than its size": OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n",
    "a chunk with an endless extension": OK + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * 300,
    "a trailer that is none": OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nGET / HTTP/1.1\r\n\r\n",
    "endless trailers": OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"A: b\r\n" * MAX_HEAD,
    "an endless trailer": OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\nA: " + b"b" * 2 * MAX_HEAD,
    "endless headers": OK + b"A: b\r\n" * MAX_HEAD,
    "an endless header": OK + b"A: " + b"b" * MAX_HEAD,
    "endless interim answers": b"HTTP/1.1 100 Continue\r\n\r\n" * MAX_HEAD,
}


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(kind: str, size: int) -> None:
    data, head, body = WHOLE[kind]
    answer, read = AnswerReader(), b""
    for at in range(0, len(data), size):
        assert not answer.ended
        read += answer.feed(data[at : at + size])
    assert (answer.ended, answer.excess, answer.head, read) == (
        True,
        False,
        head._replace(lines=answer.head.lines),
        body,
    )
    assert answer.keeps_alive == (not head.closes)


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("size", [1, 10_000])
def test_what_comes_after_an_answer_is_not_part_of_it(kind: str, size: int) -> None:
    data, _, body = WHOLE[kind]
    data += b"HTTP/1.1 200 OK\r\n"
    answer = AnswerReader()
    read = b"".join(answer.feed(data[at : at + size]) for at in range(0, len(data), size))
    assert (answer.ended, answer.excess, answer.keeps_alive, read) == (True, True, False, body)


@pytest.mark.parametrize("kind", GARBLED)
@pytest.mark.parametrize("size", [1, 1000, 1_000_000])
def test_what_is_not_plainly_an_answer_is_none(kind: str, size: int) -> None:
    data = GARBLED[kind]
    with pytest.raises(Garbled):
        read(data, size)


@pytest.mark.parametrize(
    ("head", "fault"),
    [
        (b"HTTP/1.1 600 High\r\n\r\n", "it does not begin with HTTP/1.1 and a status from 100 to 599"),
        (b"HTTP/1.2 200 OK\r\n\r\n", "it does not begin with HTTP/1.1 and a status from 100 to 599"),
        (OK + b"A: \0\r\n\r\n", "a header of its answer cannot be read"),
    ],
)
def test_what_is_wrong_with_a_head_is_said(head: bytes, fault: str) -> None:
    with pytest.raises(Garbled, match=fault):
        read(head, len(head))


def read(data: bytes, size: int) -> None:
    answer = AnswerReader()
    for at in range(0, len(data), size):
        answer.feed(data[at : at + size])


@pytest.mark.parametrize("kind", sorted(set(WHOLE) - {"no content"}))
def test_an_answer_that_breaks_off_is_not_whole(kind: str) -> None:
    data = WHOLE[kind][0]
    for end in range(len(data)):
        answer = AnswerReader()
        answer.feed(data[:end])
        assert not answer.end()


def test_without_a_length_the_body_ends_with_the_connection() -> None:
    answer = AnswerReader()
    assert answer.feed(OK + b"\r\n{") + answer.feed(b"}") == b"{}"
    assert not answer.ended
    assert answer.end()
    assert not answer.keeps_alive


def test_a_body_that_is_not_to_be_understood_may_be_compressed() -> None:
    answer = AnswerReader(opaque=True)
    assert answer.feed(OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b") == b"\x1f\x8b"
    assert answer.keeps_alive


def test_a_body_is_sent_in_chunks_that_can_be_read_again() -> None:
    answer = AnswerReader()
    head = OK + b"Transfer-Encoding: chunked\r\n\r\n"
    assert answer.feed(head + chunk(b"{" * 300) + chunk(b"}") + chunk(b"")) == b"{" * 300 + b"}"
    assert answer.keeps_alive


@pytest.mark.parametrize("value", ["a\r\nb", "a\nb", "a\rb", "a\0b"])
def test_a_header_cannot_become_two(value: str) -> None:
    with pytest.raises(ValueError, match="X header"):
        lines_of({"X": value}.items())


@pytest.mark.parametrize(
    ("url", "site"),
    [
        ("http://localhost", Site("localhost", 80, False, "localhost", "")),
        ("https://b.example", Site("b.example", 443, True, "b.example", "")),
        ("http://127.0.0.1:8080/", Site("127.0.0.1", 8080, False, "127.0.0.1:8080", "")),
        ("http://[::1]:8080/a/b/", Site("::1", 8080, False, "[::1]:8080", "/a/b")),
        ("http://bücher.example/ü", Site("xn--bcher-kva.example", 80, False, "xn--bcher-kva.example", "/%C3%BC")),
    ],
)
def test_an_address_is_taken_apart(url: str, site: Site) -> None:
    assert Site.of(url) == site


@pytest.mark.parametrize(
    "url",
    ["", "localhost", "ftp://x", "http://", "http://:80", "http://a:b@c", "http://a:99999", "http://a b", "http://a\r\nb",
     "http://a/?b", "http://a/#b", "http://a..b", "http://[::1", "http://" + "a" * 70],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Site.of(url)


def test_a_field_of_the_head_is_found_by_its_name_whatever_its_case_and_place() -> None:
    answer = AnswerReader()
    answer.feed(
        b"HTTP/1.1 200 OK\r\nX-Date: no\r\ndATE:\t today \r\nDate: later\r\nRetry-After: \r\nContent-Length: 0\r\n\r\n"
    )
    assert answer.head is not None
    fields = [answer.head.field(name) for name in (b"Date", b"Retry-After", b"Content-Length", b"Age")]
    assert fields == ["today", "", "0", None]


def test_a_token_is_exposed_where_it_leaves_the_machine_unencrypted():
    assert {url: Site.of(url).is_exposed for url in EXPOSED} == EXPOSED
