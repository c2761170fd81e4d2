"""Sessions of operators: a cookie names a session, which holds an operator's token in memory and nowhere else.

So the broker decides what an operator may see and do (docs/contract/operate.md#operate-72).
"""

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections import Counter
from typing import Final, NamedTuple, Self, get_args
from urllib.parse import urlencode

import structlog
from aiohttp import web

from console.config import ConsoleConfig
from postroom import BrokerClient
from postroom._wire.administration import CallerRole
from postroom.chassis.routes import is_media
from postroom.errors import InvalidMessage, NotPermitted, TryAgain

ROLES: Final[tuple[str, ...]] = get_args(CallerRole)  # each may do what the one before may

COOKIE: Final = "postroom_console"
OWN_PATH: Final = re.compile(r"/(?![/\\])[!-~]*")
MOST_SESSIONS: Final = 1000
MOST_ATTEMPTS: Final = 10  # to log in, that fail, of one address in a minute
_FORM: Final = "application/x-www-form-urlencoded"
_MINUTE: Final = 60.0
_SWEEP_SECONDS: Final = 30.0
_SECONDS: Final = 30.0  # that one request to the broker may take
_PATIENCE: Final = 2.0  # seconds that a page waits for a broker that is being restarted

_log = structlog.get_logger(__name__)


class Session(NamedTuple):
    """An operator's log-in: its name, its role, its mesh (None: all), and when it ends (monotonic)."""

    key: str
    client: BrokerClient
    actor: str
    role: CallerRole
    mesh: str | None
    ends_at: float

    def may(self, access: str) -> bool:
        """Return whether the operator may do what a role may, in a mesh or, as in `look everywhere`, in all of them."""
        role, _, everywhere = access.partition(" ")
        return ROLES.index(self.role) >= ROLES.index(role) and not (everywhere and self.mesh)


SESSION: Final = web.RequestKey("session", Session)


class Sessions:
    """The sessions of this process, and which requests are answered by them."""

    def __init__(self, config: ConsoleConfig) -> None:
        self._config = config
        self._monotonic = time.monotonic
        self._sessions: dict[str, Session] = {}
        self._used_at: dict[str, float] = {}
        self._secret = secrets.token_bytes(32)
        self._attempts: Counter[str] = Counter()  # by address, since `_attempts_since`
        self._attempts_since = self._monotonic()
        # whether browsers reach the console over TLS, so that cookies are sent over TLS only
        self.secure = (config.public_url or "").startswith("https://")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for key in list(self._sessions):
            await self.end(key)

    def form_key(self, cookie: str) -> str:
        """Return the key that every form of a browser with this cookie has to send: other sites cannot know it."""
        return hmac.new(self._secret, cookie.encode(), hashlib.sha256).hexdigest()

    async def begin(self, token: str, address: str) -> Session:
        """Log the owner of a `token` in, from an `address`.

        Raises `NotPermitted` where the broker does not know it, `TryAgain` (429) after too many attempts.
        """
        if self._monotonic() - self._attempts_since > _MINUTE:
            self._attempts.clear()
            self._attempts_since = self._monotonic()
        if self._attempts[address] >= MOST_ATTEMPTS:
            raise TryAgain.of("too_busy", "too many attempts to log in have failed: wait a minute", retry_after=_MINUTE)
        self._attempts[address] += 1
        if not (token.isascii() and token.isprintable() and token):
            raise InvalidMessage.of("invalid_token", "that is not a token: paste one line of plain text")
        client = BrokerClient(
            self._config.broker_url, token, timeout=_SECONDS, patience=_PATIENCE, ca_file=self._config.broker_ca_file
        )
        try:
            who = await client.whoami()
        except BaseException as error:
            if not isinstance(error, NotPermitted):  # it is not known whether the token is wrong
                self._attempts[address] -= 1
            await client.close()
            raise
        self._attempts[address] -= 1
        ends_at = self._monotonic() + self._config.session_minutes * _MINUTE
        session = Session(new_cookie(), client, who.actor, who.role, who.mesh, ends_at)
        while len(self._sessions) >= MOST_SESSIONS:
            await self.end(min(self._used_at, key=self._used_at.__getitem__))
        self._sessions[session.key] = session
        self._used_at[session.key] = self._monotonic()
        _log.info("logged_in", actor=session.actor, role=session.role, address=address)
        return session

    def find(self, cookie: str) -> Session | None:
        """Return the session that a cookie names, unless it has ended; this counts as using it."""
        if self.is_over(cookie):
            return None
        self._used_at[cookie] = self._monotonic()
        return self._sessions[cookie]

    def is_over(self, cookie: str) -> bool:
        """Return whether a session has ended, without using it."""
        if (session := self._sessions.get(cookie)) is None:
            return True
        idle_from = self._used_at[cookie] + self._config.idle_minutes * _MINUTE
        return self._monotonic() >= min(session.ends_at, idle_from)

    async def end(self, cookie: str) -> None:
        """Forget a session and its token; a missing one is not an error."""
        self._used_at.pop(cookie, None)
        if (session := self._sessions.pop(cookie, None)) is not None:
            _log.info("logged_out", actor=session.actor)
            await session.client.close()

    async def sweep(self) -> None:
        """Forget the sessions that have ended, for ever."""
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for key in list(self._sessions):
                if self.is_over(key):
                    await self.end(key)

    async def authorize(self, request: web.Request, access: str) -> None:
        """Put the session on the request, or redirect to the log-in without one; `access` is `anyone` or a role.

        Raises `NotPermitted` for a role that may not do this, and for a form that no page of the console has sent.
        """
        cookie = request.cookies.get(COOKIE, "")
        if request.method == "POST":
            await self._check_form(request, cookie)
        session = self.find(cookie)
        if session is not None:
            request[SESSION] = session
        if access == "anyone":
            return
        if session is None:
            raise web.HTTPSeeOther(f"/login{next_of(request)}")
        if not session.may(access):
            where = session.mesh or "every mesh"
            sentence = f"{session.actor} may {session.role} in {where}, and this is for those who may {access}"
            raise NotPermitted.of("not_permitted", sentence)

    async def _check_form(self, request: web.Request, cookie: str) -> None:
        own = self._config.public_url or f"http://{request.host}"
        if (
            request.headers.get("Origin") != own
            or request.headers.get("Sec-Fetch-Site", "same-origin") != "same-origin"
        ):
            raise NotPermitted.of("foreign_form", f"the form was not sent by a page of {own}: open the page there")
        if not is_media(request.headers.get("Content-Type", ""), _FORM):
            raise InvalidMessage.of(
                "unsupported_media_type", f"a form comes as {_FORM}, in UTF-8: send it from its page"
            )
        try:
            given = (await request.post()).get("form_key")
        except UnicodeDecodeError:
            raise InvalidMessage.of("invalid_request", "the form is not UTF-8: send it from its page") from None
        wanted = self.form_key(cookie)
        if not (cookie and isinstance(given, str) and hmac.compare_digest(given.encode(), wanted.encode())):
            raise NotPermitted.of("stale_form", "the form is from before the last log-in: open the page again")


def new_cookie() -> str:
    """Make the value of a cookie, which cannot be guessed."""
    return secrets.token_urlsafe(32)


def page_of(request: web.Request) -> str:
    """Return the page that a request is for, or of a form the page that it was sent from."""
    if request.method != "POST":
        return request.path_qs
    path = request.headers.get("Referer", "").removeprefix(request.headers.get("Origin", ""))
    return path if OWN_PATH.fullmatch(path) else "/"


def next_of(request: web.Request) -> str:
    """Return the query of the log-in page that leads back to the page of a request."""
    back = page_of(request)
    return "" if back == "/" or back.startswith("/login") else f"?{urlencode({'next': back})}"
