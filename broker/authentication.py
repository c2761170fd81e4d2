"""Callers: their bearer tokens, of which the database keeps only the sha-256, and what each may do.

The administrator's token comes from a file; every other caller is a member, or an operator with a role
(docs/contract/operate.md#operate-70). For the accept route alone, a token is remembered for a second: the accept
statement itself checks, under a lock, that it is still the member's, so a revoked member never writes.

Guessing at tokens delays no other caller (docs/contract/accept.md#accept-45): look-ups that wait share one query.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from aiohttp import web

from broker.database import QUERIES, Database, unavailable_as_503
from postroom._wire.administration import CallerRole
from postroom.chassis.config import read_secret
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.grouped import Grouped
from postroom.chassis.postgres import CONNECT_SECONDS
from postroom.chassis.routes import bearer_token
from postroom.errors import InvalidMessage, NotPermitted

MAY: Final[Mapping[str, frozenset[CallerRole]]] = MappingProxyType(
    {
        "member": frozenset({"member", "administer"}),
        "reader": frozenset({"member", "look", "repair", "administer"}),
        "itself": frozenset({"member", "administer"}),
        "look": frozenset({"look", "repair", "administer"}),
        "repair": frozenset({"repair", "administer"}),
        "administer": frozenset({"administer"}),
    }
)
"""The roles that each access admits; `anyone` needs no token.

`itself` admits a member about itself, and callers that may `administer` its mesh. `look`, `repair` and `administer`
admit callers that may do at least that in the mesh of the request (the handler checks which); with `broker_`, in every
mesh.
"""

MIN_ADMIN_TOKEN: Final = 20  # characters
NEW_TOKEN: Final = "`postroom member rotate-token`, or `operator rotate-token`, makes another"  # noqa: S105 - a sentence
_MAX_TOKEN: Final = 512  # characters; longer ones are not worth hashing
_CACHE_SECONDS: Final = 1.0
_CACHE_ENTRIES: Final = 10_000
_LOOK_UP_TOKENS: Final = 1000  # in one query: a few ms
_REFUSALS_AT_ONCE: Final = 100  # that need not wait
_REFUSALS_PER_SECOND: Final = 50
_MOST_REFUSALS: Final = 500  # that wait; further connections are dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The owner of a token: a `Member`, or else an operator, of one mesh or, without one, of all."""

    name: str
    role: CallerRole
    mesh_id: int | None = None
    mesh: str | None = None

    @property
    def whose(self) -> tuple[str, str]:
        """Return the holder of its shares: mesh and member; operators share as if they were a mesh."""
        return "", self.name

    @property
    def actor(self) -> str:
        """Return its name in the operator log (docs/contract/operate.md#operate-37)."""
        return self.name

    @property
    def reads_bodies(self) -> bool:
        """Whether it may see the bodies of messages."""
        return self.role != "look"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(Principal):
    """The member that owns a token; one that is an admin may `administer` its mesh."""

    mesh_id: int
    mesh: str
    member_id: int
    token_sha256: bytes

    @property
    def whose(self) -> tuple[str, str]:
        """Return the holder of its shares: mesh and member."""
        return self.mesh, self.name

    @property
    def actor(self) -> str:
        """Return its name in the operator log."""
        return f"{self.name} of {self.mesh}"


ADMINISTRATOR: Final = Principal(name="administrator", role="administer")

PRINCIPAL: Final = web.RequestKey("principal", Principal)


def digest(token: str) -> bytes:
    """Return what the database keeps of a token: tokens are 256 random bits, so that a plain sha-256 is enough."""
    return hashlib.sha256(token.encode()).digest()


def new_token() -> str:
    """Mint a token, of a member or an operator."""
    return f"postroom_{secrets.token_urlsafe(32)}"


def read_admin_token(file: Path | None) -> bytes | None:
    """Return the digest of the administrator's token, or None where none is configured.

    Raises `Fatal` (78) as `read_secret` does, and for a token that is too short, or that no request can carry.
    """
    if file is None:
        return None
    token = read_secret(file, "admin_token_file").decode("utf-8", "replace")
    if len(token) < MIN_ADMIN_TOKEN:
        detail = f"admin_token_file {file} has fewer than {MIN_ADMIN_TOKEN} characters: write a longer one"
        raise Fatal(Exit.CONFIG, detail)
    if len(token) > _MAX_TOKEN or not (token.isascii() and token.isprintable()):
        rule = f"one line of at most {_MAX_TOKEN} ASCII characters, without a byte order mark"
        raise Fatal(Exit.CONFIG, f"admin_token_file {file} has no token that a request can carry: write {rule}")
    return digest(token)


class Authentication:
    """Turns a request's bearer token into a `Principal`, and checks it against a route's access."""

    def __init__(
        self, database: Database, admin_token: bytes | None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._tokens = database.tokens
        self._callers = Grouped(self._find, _LOOK_UP_TOKENS, together=True)
        self._refusals = _Refusals(monotonic)
        self._admin_token = admin_token
        self._monotonic = monotonic
        self._remembered: dict[bytes, tuple[float, Principal | None]] = {}  # None: unknown, on any route

    async def authorize(self, request: web.Request, access: str) -> None:
        """Put the principal on the request; 401 for an unknown token, 403 for one that may not do this."""
        if access == "anyone":
            return
        try:
            principal = await self._look_up(_bearer(request), remembered=access == "member")
        except NotPermitted:
            await self._refusals.wait(request)
            raise
        if access == "member" and not isinstance(principal, Member):
            raise NotPermitted.of("not_a_member", f"{principal.actor} is not a member of a mesh: use a member's token")
        role = access.removeprefix("broker_")
        if principal.role not in MAY[role]:
            needed = "administer" if role == "itself" else role
            role_is = f"{principal.actor} has the role {principal.role}, and this takes the role {needed}"
            advice = f"`postroom operator create NAME --role {needed}` makes a token that has it"
            raise NotPermitted.of("not_permitted", f"{role_is}: {advice}")
        if role != access and principal.mesh is not None:
            mesh_is = f"the token of {principal.actor} is for the mesh {principal.mesh} only, and this is about all"
            raise NotPermitted.of("not_permitted", f"{mesh_is}: use one that was made without --mesh")
        request[PRINCIPAL] = principal

    def forget(self) -> None:
        """Forget every remembered token: one was revoked or rotated here."""
        self._remembered.clear()

    async def _look_up(self, token: bytes, *, remembered: bool) -> Principal:
        if self._admin_token is not None and hmac.compare_digest(token, self._admin_token):
            return ADMINISTRATOR
        until, caller = self._remembered.get(token, (0.0, None))
        if until <= self._monotonic() or not (remembered or caller is None):
            caller = await self._callers(token)
            if len(self._remembered) >= _CACHE_ENTRIES:
                self._remembered.clear()
            self._remembered[token] = (self._monotonic() + _CACHE_SECONDS, caller)
        if caller is None:
            raise _unknown_token()
        return caller

    async def _find(self, tokens: Sequence[bytes]) -> list[Principal | None]:
        """Return the owners of the tokens, members or operators; raises `TryAgain` while Postgres does not answer."""
        async with unavailable_as_503(), self._tokens.acquire(timeout=CONNECT_SECONDS) as connection:
            members = await connection.fetch(QUERIES["find_members_by_token"], tokens)
            found: dict[bytes, Principal] = {row["token_sha256"]: Member(**row) for row in members}
            if others := [token for token in tokens if token not in found]:
                for token, *row in await connection.fetch(QUERIES["find_operators_by_token"], others):
                    found[token] = Principal(name=row[0], role=row[1], mesh_id=row[2], mesh=row[3])
        return [found.get(token) for token in tokens]


class _Refusals:
    """Slows callers with unknown tokens down: after the first hundred refusals, fifty a second are answered."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._next = 0.0  # when the next refusal would leave, had each waited for the one before it

    async def wait(self, request: web.Request) -> None:
        """Return when a refusal may be sent; where too many wait already, drop the connection instead."""
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
    token = bearer_token(request)
    if not token:
        raise NotPermitted.of("missing_token", "the request needs `Authorization: Bearer <token>`")
    if len(token) > _MAX_TOKEN or not token.isascii():
        raise _unknown_token()
    return digest(token)


def _unknown_token() -> NotPermitted:
    return NotPermitted.of("invalid_token", f"the token is not valid: it may have been revoked; {NEW_TOKEN}")


def member_of(request: web.Request) -> Member:
    """Return the member that calls a route whose access is `member`."""
    principal = request[PRINCIPAL]
    assert isinstance(principal, Member)  # noqa: S101 - `authorize` refused all others
    return principal


def own_mesh(principal: Principal, asked: str | None) -> str:
    """Return the mesh of a request: the token's own, if it has one; naming another one is a 403."""
    if principal.mesh is not None:
        if asked is not None and asked != principal.mesh:
            raise NotPermitted.of("other_mesh", f"the token is for the mesh {principal.mesh} only: use one for {asked}")
        return principal.mesh
    if asked is None:
        raise InvalidMessage.of("mesh_required", "the token is for every mesh: name one (`mesh`)")
    return asked


def any_mesh(principal: Principal, asked: str | None) -> str | None:
    """Return the mesh of a request, as `own_mesh` does; None where that is every mesh."""
    return None if asked is None and principal.mesh is None else own_mesh(principal, asked)
