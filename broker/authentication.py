"""Who calls: bearer tokens, of which the database keeps only the sha-256, and what each caller may do.

The broker-wide administrator's token comes from a file; everybody else is a member of one mesh, with a role. For the
accept route alone, a token is remembered for a second: the accept statement itself checks, under a lock, that the
token is still the member's, so a revoked member never writes. Every other route looks the token up each time.

Whoever guesses at tokens holds nobody up: look-ups that wait share one query on a connection that is for nothing else,
and of the refusals only so many leave a second.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Literal

from aiohttp import web

from broker.database import QUERIES, Database, unavailable_as_503
from postroom._wire.administration import CallerRole
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import CONNECT_SECONDS
from postroom.errors import InvalidMessage, NotPermitted

Access = Literal["anyone", "member", "reader", "mesh_admin", "broker_admin"]
"""Who may call a route.

`anyone` needs no token; `member` is a member of a mesh; `reader` is a member or the administrator; `mesh_admin` is an
`admin` of the mesh or the administrator (the handler checks which mesh); `broker_admin` is the administrator alone.
"""

MIN_ADMIN_TOKEN: Final = 20  # characters
_MAX_TOKEN: Final = 512  # characters; longer ones are not worth hashing
_CACHE_SECONDS: Final = 1.0
_CACHE_ENTRIES: Final = 10_000
_LOOK_UP_TOKENS: Final = 1000  # in one query: a few ms
_REFUSALS_AT_ONCE: Final = 100  # that need not wait
_REFUSALS_PER_SECOND: Final = 50
_MOST_REFUSALS: Final = 500  # that wait; what is beyond is hung up on


class Principal:
    """Whom a token speaks for: a `Member`, or the broker-wide `Administrator`, who belongs to no mesh."""

    mesh: str | None
    role: CallerRole

    @property
    def whose(self) -> tuple[str, str]:
        """Return in whose name shares are held: mesh and member."""
        return "", ""

    @property
    def actor(self) -> str:
        """Return who it is in a log of what operators did (docs/contract/operate.md#operate-37)."""
        return "administrator"


@dataclass(frozen=True, slots=True)
class Member(Principal):
    """The member that a token speaks for."""

    mesh_id: int
    mesh: str
    member_id: int
    name: str
    role: CallerRole
    token_sha256: bytes

    @property
    def whose(self) -> tuple[str, str]:
        """Return in whose name shares are held: mesh and member."""
        return self.mesh, self.name

    @property
    def actor(self) -> str:
        """Return who it is in a log of what operators did."""
        return f"{self.name} of {self.mesh}"


@dataclass(frozen=True, slots=True)
class Administrator(Principal):
    """The broker-wide administrator."""

    mesh: None = None
    role: CallerRole = "administer"


PRINCIPAL: Final = web.RequestKey("principal", Principal)


def digest(token: str) -> bytes:
    """Return what the database keeps of a token: tokens are 256 random bits, so that a plain sha-256 is enough."""
    return hashlib.sha256(token.encode()).digest()


def new_token() -> str:
    """Mint a member's token."""
    return f"postroom_{secrets.token_urlsafe(32)}"


def read_admin_token(file: Path | None) -> bytes | None:
    """Return the digest of the administrator's token, or None where none is configured.

    Raises `Fatal` (78) for a file that is missing, empty, too short or readable for everybody.
    """
    if file is None:
        return None
    try:
        if file.stat().st_mode & stat.S_IROTH:
            raise Fatal(Exit.CONFIG, f"admin_token_file {file} is readable by everybody: chmod o= it, and change it")
        token = file.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Fatal(Exit.CONFIG, f"cannot read admin_token_file {file}: {error}") from error
    if len(token) < MIN_ADMIN_TOKEN:
        raise Fatal(Exit.CONFIG, f"admin_token_file {file} has fewer than {MIN_ADMIN_TOKEN} characters")
    return digest(token)


class Authentication:
    """Turns a request's bearer token into a `Principal`, and holds it against a route's access."""

    def __init__(
        self, database: Database, admin_token: bytes | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._members = _Members(database)
        self._refusals = _Refusals(monotonic)
        self._admin_token = admin_token
        self._monotonic = monotonic
        self._remembered: dict[bytes, tuple[float, Member | None]] = {}  # None: nobody's, on any route

    async def authorize(self, request: web.Request, access: str) -> None:
        """Put the principal on the request; 401 for a token that is nobody's, 403 for one that may not do this."""
        if access == "anyone":
            return
        try:
            token = _bearer(request)
            principal = await (self._remember(token) if access == "member" else self._look_up(token))
        except NotPermitted:
            await self._refusals.wait(request)
            raise
        if not isinstance(principal, Member):
            if access == "member":
                raise NotPermitted.of("not_a_member", "the administrator belongs to no mesh: use a member's token")
        elif access == "broker_admin":
            raise NotPermitted.of("not_permitted", "only the broker's administrator may do this")
        elif access == "mesh_admin" and principal.role == "member":
            raise NotPermitted.of("not_permitted", f"{principal.name} is not an admin of the mesh {principal.mesh}")
        request[PRINCIPAL] = principal

    def forget(self) -> None:
        """Forget every remembered token: somebody's was revoked or rotated here."""
        self._remembered.clear()

    async def _remember(self, token: bytes) -> Principal:
        until, member = self._remembered.get(token, (0.0, None))
        return member if member is not None and until > self._monotonic() else await self._look_up(token)

    async def _look_up(self, token: bytes) -> Principal:
        if self._admin_token is not None and hmac.compare_digest(token, self._admin_token):
            return Administrator()
        until, member = self._remembered.get(token, (0.0, None))
        if member is not None or until <= self._monotonic():
            member = await self._members.find(token)
            if len(self._remembered) >= _CACHE_ENTRIES:
                self._remembered.clear()
            self._remembered[token] = (self._monotonic() + _CACHE_SECONDS, member)
        if member is None:
            raise _nobodys()
        return member


class _Members:
    """The members by their tokens. While one query is under way, look-ups gather for the next one."""

    def __init__(self, database: Database) -> None:
        self._pool = database.tokens
        self._asked: dict[bytes, asyncio.Future[Member | None]] = {}
        self._asking: asyncio.Task[None] | None = None

    async def find(self, token: bytes) -> Member | None:
        """Return the member whose token it is now; raises `TryAgain` while Postgres does not answer."""
        answer = self._asked.setdefault(token, asyncio.get_running_loop().create_future())
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="token-look-ups")
        return await asyncio.shield(answer)

    async def _ask(self) -> None:
        while asked := dict(islice(self._asked.items(), _LOOK_UP_TOKENS)):
            for token in asked:
                del self._asked[token]
            try:
                async with unavailable_as_503(), self._pool.acquire(timeout=CONNECT_SECONDS) as connection:
                    rows = await connection.fetch(QUERIES["find_members_by_token"], list(asked))
            except Exception as error:  # noqa: BLE001 - each of those who asked gets it
                for answer in asked.values():
                    answer.set_exception(error)
                    answer.exception()  # whoever asked may have gone
            else:
                found = {row["token_sha256"]: Member(*row) for row in rows}
                for token, answer in asked.items():
                    answer.set_result(found.get(token))
        self._asking = None


class _Refusals:
    """Holds back who shows tokens that are nobody's: after the first hundred, fifty a second are told."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._next = 0.0  # when the next refusal would leave, had each waited for the one before it

    async def wait(self, request: web.Request) -> None:
        """Return when a refusal may leave; where too many wait already, hang up instead."""
        now = self._monotonic()
        interval = 1 / _REFUSALS_PER_SECOND
        wait = max(self._next, now - _REFUSALS_AT_ONCE * interval) + interval - now
        if wait > _MOST_REFUSALS * interval:
            if request.transport is not None:
                request.transport.abort()
            return
        self._next = now + wait
        if wait > 0:
            await asyncio.sleep(wait)


def _bearer(request: web.Request) -> bytes:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    token = token.strip()
    if scheme.lower() != "bearer" or not token:
        raise NotPermitted.of("missing_token", "the request needs `Authorization: Bearer <token>`")
    if len(token) > _MAX_TOKEN or not token.isascii():
        raise _nobodys()
    return digest(token)


def _nobodys() -> NotPermitted:
    return NotPermitted.of("invalid_token", "the bearer token is not valid: it may have been revoked")


def member_of(request: web.Request) -> Member:
    """Return the member that calls a route whose access is `member`."""
    principal = request[PRINCIPAL]
    assert isinstance(principal, Member)  # noqa: S101 - `_check` refused everybody else
    return principal


def own_mesh(principal: Principal, asked: str | None) -> str:
    """Return the mesh that a request is about; a member's own unless it asks for another one, which is a 403."""
    if isinstance(principal, Member):
        if asked is not None and asked != principal.mesh:
            raise NotPermitted.of("other_mesh", f"the token is for the mesh {principal.mesh} only")
        return principal.mesh
    if asked is None:
        raise InvalidMessage.of("mesh_required", "the administrator belongs to no mesh: name one (`mesh`)")
    return asked


def any_mesh(principal: Principal, asked: str | None) -> str | None:
    """Return the mesh that a request is about, as `own_mesh` does; None where the administrator means every mesh."""
    return None if asked is None and not isinstance(principal, Member) else own_mesh(principal, asked)
