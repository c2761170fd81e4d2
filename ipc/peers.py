"""The peers of connections, what they may do, and where they may send (docs/contract/send.md#send-5).

The uid and gid of a Unix peer are read once, when the connection is accepted, from the kernel (`SO_PEERCRED`): they are
those of the process that called connect(2). A caller with the local token over TCP can read a file that only the
daemon's user can read, and counts as that user.

The loopback TCP port is protected from other users and from web pages (docs/contract/send.md#send-6). The daemon
notices a new token by itself, and accepts the one before for 60 s more, so that a rotation refuses no caller.
"""

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec
import structlog
from aiohttp import hdrs, web

from outbox import AcceptedRow, Caller, Outbox
from postroom._wire.message import PreparedSend
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import private_directory, read_regular, replace_private
from postroom.chassis.routes import bearer_token
from postroom.errors import InvalidMessage, NotPermitted, PostroomError

_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ROOT: Final = 0
GRACE_SECONDS: Final = 60.0
_TOKEN_BYTES: Final = 32  # of randomness
_MIN_LENGTH: Final = 16  # characters; an empty or forgotten file must not admit every caller
_OTHERS: Final = 0o077  # the part of a mode that is not the owner's
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_LOCAL_HOST: Final = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]*)?", re.IGNORECASE).fullmatch  # with a port
_TOKEN_PARAMETERS: Final = frozenset({"token", "access_token", "auth", "authorization", "api_key", "bearer"})
_OWN_SITES: Final = frozenset({"same-origin", "none"})

Accept = Callable[[Sequence[PreparedSend], Caller], Coroutine[Any, Any, list[AcceptedRow | PostroomError]]]

_log = structlog.get_logger(__name__)


def peer_of(sock: socket.socket) -> Caller:
    """Return the peer of a connected socket."""
    if sock.family != socket.AF_UNIX:
        return Caller(os.getuid(), os.getgid(), "local token")
    _, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Caller(uid, gid)


class Policy:
    """The users that may call, and those that may operate.

    Without a list every user that the socket's mode allows may call, and root and the daemon's own user may operate.
    """

    def __init__(self, allow_uids: Collection[int] = (), operators: Collection[int] = ()) -> None:
        self._allowed = frozenset(allow_uids)
        self._operators = frozenset(operators) or frozenset({_ROOT, os.getuid()})

    def may_call(self, caller: Caller) -> bool:
        """Return whether this peer may use the socket at all; an operator always may."""
        return not self._allowed or caller.uid in self._allowed or caller.uid in self._operators

    def may_operate(self, caller: Caller) -> bool:
        """Return whether this peer may see and repair the rows of all users."""
        return caller.uid in self._operators


class LocalToken:
    """The token in `file`, and previous ones during their grace period."""

    def __init__(self, file: Path, *, clock: Callable[[], float] = time.time) -> None:
        """Read the token; raises `Fatal` (78) where the file cannot be read or others could read it."""
        self._file = file
        self._clock = clock
        self._identity, self._token = _read(file)
        self._before = _replaced(file)

    def matches(self, token: str) -> bool:
        """Return, in constant time, whether `token` is the current one or one in its grace period."""
        self._notice_rotation()
        given = _digest(token)
        now = self._clock()
        valid = [_digest(self._token), *(before for before, until in self._before.items() if now < until)]
        return True in [hmac.compare_digest(given, each) for each in valid]  # always all of them

    def _notice_rotation(self) -> None:
        try:
            if _identity(os.stat(self._file)) == self._identity:  # noqa: PTH116 - a microsecond, on every request
                return
            identity, token = _read(self._file)
        except (OSError, Fatal):
            return  # half-way through a rotation, or a file others can read: the token read before stays valid
        now, by_hand = self._clock(), identity[2] / 1e9 + GRACE_SECONDS  # where no `rotate` noted the token
        before = {**self._before, _digest(self._token): by_hand, **_replaced(self._file)}
        self._before = {each: until for each, until in before.items() if now < until}
        self._identity, self._token = identity, token


def rotate(file: Path) -> None:
    """Write a fresh token into `file`, 0600, in one step; raises `Fatal` where the directory is not writable.

    The digest of the previous one is kept in a second file for its grace period, so that neither another rotation nor a
    restart of the daemon ends it. The files belong to the owner of their directory, so that root may rotate a daemon's
    token.
    """

    def next_token() -> str:
        with suppress(Fatal):  # there is no token yet, or others could read it: then it gets no grace period
            _, replaced = _read(file)
            now = time.time()
            before = {each: until for each, until in _replaced(file).items() if now < until}
            before[_digest(replaced)] = now + GRACE_SECONDS
            replace_private(_grace_file(file), msgspec.json.encode(before).decode(), for_owner=True)
        return f"{secrets.token_urlsafe(_TOKEN_BYTES)}\n"

    try:
        private_directory(file.parent, may_be_anothers=True)
        replace_private(file, next_token, for_owner=True)
    except OSError as error:
        raise Fatal(
            Exit.IO_ERROR, f"cannot write the token file {file}: {error.strerror}; check its directory"
        ) from error


def _grace_file(file: Path) -> Path:
    return file.with_name(f"{file.name}.grace")


def _replaced(file: Path) -> dict[str, float]:
    """Return the digests of the tokens that `rotate` replaced, each with the end of its grace."""
    try:
        opened = os.open(_grace_file(file), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(opened, "rb") as stream:
            status = os.fstat(opened)
            if stat.S_IMODE(status.st_mode) & _OTHERS or status.st_uid != file.stat().st_uid:
                return {}  # another user may have written it
            return msgspec.json.decode(stream.read(), type=dict[str, float])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()  # also for a header that is not UTF-8


def _read(file: Path) -> tuple[tuple[int, int, int], str]:
    try:
        content, status = read_regular(file)
    except OSError as error:
        detail = f"cannot read the token file {file}: {error.strerror}; `postroom daemon rotate-token` writes one"
        raise Fatal(Exit.CONFIG, detail) from error
    if stat.S_IMODE(status.st_mode) & _OTHERS:
        raise Fatal(Exit.CONFIG, f"the token file {file} can be read by others: chmod 600 it, and rotate the token")
    token = content.decode("utf-8", "replace").strip()
    if len(token) < _MIN_LENGTH or "\ufffd" in token:
        raise Fatal(Exit.CONFIG, f"the token file {file} has no token: `postroom daemon rotate-token` writes one")
    return _identity(status), token


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, status.st_mtime_ns


class TcpGuard:
    """Checks every request that came over TCP, before its handler sees it."""

    def __init__(self, token: LocalToken) -> None:
        self._token = token

    def check(self, request: web.BaseRequest) -> None:
        """Raise `InvalidMessage` (400) or `NotPermitted` (401, 403) for a request that may not come in."""
        hosts = request.headers.getall(hdrs.HOST, [])
        if len(hosts) != 1 or not _LOCAL_HOST(hosts[0]):
            raise NotPermitted.of("foreign_host", "the Host must be localhost, 127.0.0.1 or [::1]")
        headers = request.headers
        sources = [value for name in (hdrs.ORIGIN, hdrs.REFERER) for value in headers.getall(name, [])]
        foreign_site = headers.get("Sec-Fetch-Site", "none").lower() not in _OWN_SITES
        if foreign_site or any(_host_name(source) not in _LOCAL_HOSTS for source in sources):
            raise NotPermitted.of(
                "foreign_origin",
                "a page of another origin may not use this socket: use a program, or a page of localhost",
            )
        self.check_token(request)

    def check_token(self, request: web.BaseRequest) -> None:
        """Raise `NotPermitted` (401) where the token is wrong, or is not valid any more while the request goes on."""
        if not self._token.matches(bearer_token(request)):
            _log.warning("local_token_refused", path=request.path[:200])
            raise NotPermitted.of("unauthorized", "a request over TCP needs Authorization: Bearer <local token>")


def refuse_tokens_in_query(request: web.BaseRequest, caller: Caller) -> None:
    """Raise `InvalidMessage` (400), and log, where the query string carries a token."""
    if _TOKEN_PARAMETERS.isdisjoint(name.lower() for name in request.query):
        return
    _log.warning("token_in_query", path=request.path[:200], caller=str(caller))
    detail = "a token in the query string ends up in logs: send Authorization: Bearer, and rotate this one"
    raise InvalidMessage.of("token_in_query", detail)


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


class DestinationRule:
    """The destinations that callers may send to: those that match a shell pattern of the config, as `topic:orders*`.

    Without patterns, all (docs/contract/send.md#send-19).
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._matches = lru_cache(maxsize=1024)(lambda to: any(fnmatchcase(to, each) for each in self._patterns))

    def check(self, destination: str) -> None:
        """Raise `NotPermitted` (403) for a destination that the config does not allow."""
        if not self.allows(destination):
            raise _not_allowed(destination)

    def accepting(self, outbox: Outbox) -> Accept:
        """Return a function that accepts the sends that the config allows, and refuses the others (403).

        A send that is on disk already is answered in any case.
        """

        async def accept(sends: Sequence[PreparedSend], caller: Caller) -> list[AcceptedRow | PostroomError]:
            runs = [(may_go, list(run)) for may_go, run in groupby(sends, lambda send: self.allows(send.destination))]
            asked: list[Coroutine[Any, Any, Sequence[AcceptedRow | PostroomError | None]]] = [
                outbox.accept(run, caller) if may_go else outbox.known(run, caller) for may_go, run in runs
            ]
            found = await asyncio.gather(*asked)  # in order, and all before what the caller sends later
            return [
                row or _not_allowed(send.destination)
                for (_, run), rows in zip(runs, found, strict=True)
                for send, row in zip(run, rows, strict=True)
            ]

        return accept if self._patterns else outbox.accept

    def allows(self, destination: str) -> bool:
        """Return whether callers may send there."""
        return not self._patterns or self._matches(destination)


def _not_allowed(destination: str) -> NotPermitted:
    detail = f"this daemon may not send to {destination}: add it to allow_destinations in its config"
    return NotPermitted.of("destination_not_allowed", detail, field="to")
