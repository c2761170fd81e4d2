"""HTTP/1.1 as a client of ours needs it: requests as bytes, and answers from bytes, without any I/O.

Strict where a lenient reading could make one answer out of two: whatever is not plainly an answer is `Garbled`. The
connections (`connections.py`) feed in what arrives; both kinds, asyncio's and the blocking one, read through here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, Final, NamedTuple, cast
from urllib.parse import SplitResult, quote, urlsplit

MAX_HEAD: Final = 32 * 1024  # bytes of all heads of one answer, the interim ones (1xx) and the trailers among them
_MAX_SIZE_LINE: Final = 256  # bytes of the line before a chunk

_TEXT: Final = rb"[\t\x20-\x7e\x80-\xff]*"
_FIELD: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+:" + _TEXT
_STATUS: Final = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: " + _TEXT + rb")?(?=\r\n|$)")
_HEAD: Final = re.compile(_STATUS.pattern + rb"((?:\r\n" + _FIELD + rb")*)")
_ABOUT_BODY: Final = re.compile(
    rb"\r\n(content-length|transfer-encoding|content-encoding|content-type|connection):[\t ]*([^\r]*?)[\t ]*(?=\r|$)",
    re.IGNORECASE,
)
_ABOUT_LENGTH: Final = frozenset({b"content-length", b"transfer-encoding"})
_TRAILER: Final = re.compile(_FIELD)
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[\t ]*(?:;" + _TEXT + rb")?")
_UNSAFE: Final = re.compile("[\0\r\n]")
_BODILESS: Final = frozenset({204, 304})
_HTTP: Final = b"HTTP/1."
_ABOUT_CERTIFICATE: Final = {  # by OpenSSL's number of what is wrong
    9: "check the clocks of both hosts",  # it is not valid yet
    10: "renew it",
    62: "use a name that it is for",
    64: "use an address or a name that it is for",
}
NOT_TLS: Final = frozenset({"HTTP_REQUEST", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "WRONG_VERSION_NUMBER"})


class Garbled(Exception):
    """What arrived is not an answer in HTTP/1.1; the message says why."""


class Unreachable(Exception):
    """No connection could be opened; its cause says why, `why_unreachable` in words."""


class Head(NamedTuple):
    """What the head of an answer says: without `length` and not `chunked`, the body ends with the connection."""

    status: int
    media: str
    length: int | None
    chunked: bool
    closes: bool
    compressed: bool = False
    lines: bytes = b""

    def field(self, name: bytes) -> str | None:
        """Return the value of the first header of that name, None if there is none."""
        found = re.search(rb"(?i)\r\n" + re.escape(name) + rb":[\t ]*([^\r]*?)[\t ]*(?=\r|$)", self.lines)
        return None if found is None else found[1].decode("latin-1")


class Site(NamedTuple):
    """Where requests go to: the base of a URL, in parts."""

    host: str
    port: int
    tls: bool
    authority: str  # the Host header
    prefix: str  # of every path

    @classmethod
    def of(cls, url: str) -> Site:
        """Take a URL apart; raises `ValueError` where it is not one of HTTP."""
        parts: SplitResult = urlsplit(url)
        host = parts.hostname
        if parts.scheme not in {"http", "https"} or not host or "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"{url!r} is not an http:// or https:// address")
        if parts.port == 0 or not url.isprintable() or " " in url:
            raise ValueError(f"{url!r} has a port or characters that no address may have")
        tls = parts.scheme == "https"
        ascii_host = host if ":" in host else host.encode("idna").decode()
        authority = f"[{ascii_host}]" if ":" in ascii_host else ascii_host
        if parts.port is not None:
            authority = f"{authority}:{parts.port}"
        prefix = quote(parts.path, safe="/%!$&'()*+,;=:@~").rstrip("/")
        return cls(ascii_host, parts.port or (443 if tls else 80), tls, authority, prefix)

    @property
    def is_exposed(self) -> bool:
        """Whether others on the network can read what is sent there, a token too."""
        return not (self.tls or is_loopback(self.host))

    def lines(self, agent: str) -> str:
        """Format the header lines of every request of a program called `agent`, whose answers are JSON as it is."""
        accepts = "Accept: application/json\r\nAccept-Encoding: identity\r\n"
        return f"Host: {self.authority}\r\nUser-Agent: {agent}\r\n{accepts}"


def is_loopback(host: str) -> bool:
    """Return whether a name or an address is that of this machine alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def why_unreachable(cause: BaseException | None, authorities: str) -> str:
    """Return in words why no connection could be opened; nothing where it only took too long.

    `authorities` is where the authority of the peer's certificate can be named.
    """
    if (untrusted := getattr(cause, "verify_message", None)) is not None:  # of an `ssl.SSLCertVerificationError`
        advice = _ABOUT_CERTIFICATE.get(cast("Any", cause).verify_code, f"name its authority in {authorities}")
        return f"its certificate is not trusted ({untrusted.rstrip('.')}): {advice}"
    if (reason := getattr(cause, "reason", None)) is not None:  # of an `ssl.SSLError`
        return "it does not speak TLS" if reason in NOT_TLS else f"TLS failed ({reason.replace('_', ' ').lower()})"
    if isinstance(cause, ConnectionResetError):
        return "it closed the connection at once"
    text, number = str(cause), getattr(cause, "errno", None)
    if number is not None and "Connect call failed" in text:  # asyncio says so, whatever it was
        return os.strerror(number)
    return getattr(cause, "strerror", None) or text


def lines_of(headers: Iterable[tuple[str, str]]) -> str:
    """Format header lines; raises `ValueError` for a value that would make two of one."""
    lines = ""
    for name, value in headers:
        if _UNSAFE.search(value):
            raise ValueError(f"a {name} header cannot hold a line break or NUL")
        lines += f"{name}: {value}\r\n"
    return lines


def chunk(data: bytes) -> bytes:
    """Frame a piece of a body whose length is not known beforehand; the empty piece is the body's end."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class AnswerReader:
    """Reads one answer: `feed` takes what arrives and returns what of it is body, until `ended`.

    `excess` says that more came than the answer, so that whatever follows on the connection means nothing. An `opaque`
    body is not to be understood, so it may be compressed.
    """

    __slots__ = ("_head_bytes", "_left", "_next", "_opaque", "_rest", "began", "ended", "excess", "head")

    def __init__(self, *, opaque: bool = False) -> None:
        self.head: Head | None = None
        self._opaque = opaque
        self.began = False
        self.ended = False
        self.excess = False
        self._rest = b""  # what cannot be understood without more
        self._head_bytes = 0
        self._left = 0  # bytes of the body, or of the chunk, that have not come
        self._next = "size"  # what follows in a chunked body: a chunk's size, its data, its end, or the trailers

    def feed(self, data: bytes) -> bytes:
        """Take what arrived; returns the bytes of the body among it. Raises `Garbled`."""
        self.began = True
        if self.head is None:
            data = self._take_heads(data)
            if self.head is None:
                return b""
        if self.ended:
            self.excess = self.excess or bool(data)
            return b""
        if self.head.chunked:
            return self._take_chunks(data)
        if self.head.length is None:
            return data
        if len(data) > self._left:
            self.excess = True
            data = data[: self._left]
        self._left -= len(data)
        self.ended = not self._left
        return data

    def end(self) -> bool:
        """Note that nothing more will arrive; return whether the answer is whole."""
        if self.head is not None and self.head.length is None and not self.head.chunked:
            self.ended = True
        return self.ended

    @property
    def keeps_alive(self) -> bool:
        """Whether another request may follow on the connection."""
        return self.ended and not self.excess and self.head is not None and not self.head.closes

    def _take_heads(self, data: bytes) -> bytes:
        """Read the head, after any interim ones; returns what follows it."""
        searched = max(0, len(self._rest) - 3)
        data = self._rest + data
        while self.head is None:
            size = data.find(b"\r\n\r\n", searched)
            searched = 0
            if self._head_bytes + (len(data) if size < 0 else size) > MAX_HEAD:
                raise Garbled(f"the head of its answer is longer than {MAX_HEAD} bytes")
            if size < 0:
                if data[: len(_HTTP)] != _HTTP[: len(data)]:
                    raise Garbled("it does not speak HTTP/1.1")
                self._rest = data
                return b""
            self._head_bytes += size
            found = _HEAD.fullmatch(data[:size])
            if found is None:
                if not data.startswith(_HTTP):
                    raise Garbled("it does not speak HTTP/1.1")
                if _STATUS.match(data, 0, size) is None:
                    raise Garbled("it does not begin with HTTP/1.1 and a status from 100 to 599")
                raise Garbled("a header of its answer cannot be read")
            old, status, lines = found.groups()
            head = _head_of(int(status), old == b"0", *_ABOUT_BODY.findall(lines))._replace(lines=lines)
            if head.compressed and not self._opaque:
                raise Garbled("its answer is compressed, which was not asked for")
            data = data[size + 4 :]
            if head.status >= 200:  # noqa: PLR2004 - the first status that ends an exchange
                self.head = head
                self._left = head.length or 0
                self.ended = head.length == 0
        self._rest = b""
        return data

    def _take_chunks(self, data: bytes) -> bytes:
        data = self._rest + data
        body, at = [], 0
        while not self.ended:
            if self._next == "data":
                piece = data[at : at + self._left]
                if not piece:
                    break
                body.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if self._left:
                    break
                self._next = "end"
            end = data.find(b"\r\n", at)
            if (end if end >= 0 else len(data)) - at > _MAX_SIZE_LINE and self._next != "trailers":
                raise Garbled("a chunk of its answer has no size")
            if end < 0:
                if len(data) - at > MAX_HEAD:
                    raise Garbled("a trailer of its answer is too long")
                break
            self._take_line(data[at:end])
            at = end + 2
        self._rest = data[at:]
        if self.ended:
            self.excess = bool(self._rest)
        return b"".join(body)

    def _take_line(self, line: bytes) -> None:
        """Take a line between the pieces of a chunked body."""
        if self._next == "end":
            if line:
                raise Garbled("a chunk of its answer is longer than its size")
            self._next = "size"
        elif self._next == "size":
            size = _SIZE.fullmatch(line)
            if size is None:
                raise Garbled("a chunk of its answer has no size")
            self._left = int(size[1], 16)
            self._next = "data" if self._left else "trailers"
        elif line:
            self._head_bytes += len(line)
            if self._head_bytes > MAX_HEAD or not _TRAILER.fullmatch(line):
                raise Garbled("the trailers of its answer cannot be read")
        else:
            self.ended = True


@lru_cache(maxsize=32)  # the answers to one kind of request say the same of their bodies
def _head_of(status: int, old: bool, *lines: tuple[bytes, bytes]) -> Head:  # noqa: FBT001 - part of the key
    fields: dict[bytes, bytes] = {}
    for written, value in lines:
        name = written.lower()
        if name in fields and name in _ABOUT_LENGTH:
            raise Garbled(f"its answer has more than one {name.decode()}")
        fields[name] = fields[name] + b"," + value if name in fields else value
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if status == 101:  # noqa: PLR2004
        raise Garbled("it changes to another protocol, which was not asked for")
    if length is not None and not _LENGTH.fullmatch(length):
        raise Garbled("the length of its answer is not a number")
    if coding is not None and (coding.lower() != b"chunked" or length is not None or old):
        raise Garbled("it is not clear where its answer ends")
    compressed = fields.get(b"content-encoding", b"identity").lower() != b"identity"
    media = fields.get(b"content-type", b"application/octet-stream").partition(b";")[0].strip().lower()
    chunked = coding is not None and status not in _BODILESS
    size = 0 if status in _BODILESS else None if length is None else int(length)
    options = {option.strip() for option in fields.get(b"connection", b"").lower().split(b",")}
    closes = old or b"close" in options or (size is None and not chunked)
    return Head(status, media.decode("latin-1"), size, chunked, closes, compressed)
