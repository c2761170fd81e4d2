"""A console in front of a broker on the session's Postgres and NATS, and browsers without script."""

from __future__ import annotations

import html
import itertools
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from support.databases import migrated_database
from support.operated import ADMIN_TOKEN, operated_broker

from broker.database import migrate
from console.app import build
from console.config import ConsoleConfig
from console.sessions import Sessions
from embedded import EmbeddedNats, EmbeddedPostgres
from postroom import BrokerClient
from postroom._wire.administration import OperatorRole, Role
from postroom.chassis.listener import listening
from postroom.delivery.settings import NatsSettings

_numbers = itertools.count(1)
_FIELD = re.compile(r'<input type="hidden" name="(\w+)" value="([^"]*)">')


@dataclass(frozen=True)
class Page:
    """What a browser was given."""

    status: int
    text: str
    headers: Any
    path: str

    @property
    def hidden(self) -> dict[str, str]:
        """The hidden fields of its forms."""
        return {name: html.unescape(value) for name, value in _FIELD.findall(self.text)}


@dataclass
class Browser:
    """A browser: it keeps cookies, follows links, and sends the forms of the page that it shows."""

    session: aiohttp.ClientSession
    url: str
    shown: Page | None = None

    async def open(self, path: str, *, follow: bool = True) -> Page:
        async with self.session.get(self.url + path, allow_redirects=follow) as answer:
            self.shown = Page(answer.status, await answer.text(), answer.headers, answer.url.path_qs)
        return self.shown

    async def submit(self, path: str, /, *, follow: bool = True, origin: str | None = None, **fields: Any) -> Page:
        """Send the form that leads to a path, with what is hidden in the page, unless `fields` say otherwise."""
        assert self.shown is not None
        given = {"form_key": self.shown.hidden.get("form_key", ""), **fields}
        data = [(name, one) for name, value in given.items() for one in (value if isinstance(value, list) else [value])]
        headers = {"Origin": self.url if origin is None else origin, "Referer": self.url + self.shown.path}
        request = self.session.post(self.url + path, data=data, headers=headers, allow_redirects=follow)
        async with request as answer:
            self.shown = Page(answer.status, await answer.text(), answer.headers, answer.url.path_qs)
        return self.shown

    async def log_in(self, token: str) -> Page:
        await self.open("/login")
        return await self.submit("/login", token=token)


@dataclass
class Office:
    """A mesh of this test's own with its members, and the console in front of its broker."""

    url: str
    mesh: str
    broker_url: str
    database: str
    sessions: Sessions
    tokens: dict[str, str]
    browse: Callable[[], Browser]

    async def logged_in(self, name: str = "administrator") -> Browser:
        browser = self.browse()
        page = await browser.log_in(self.tokens[name])
        assert page.path != "/login", page.text
        return browser

    async def send(self, *items: dict[str, Any], sender: str = "alice") -> list[dict[str, Any]]:
        """Accept a batch, as a daemon posts it; returns the answers."""
        headers = {"Authorization": f"Bearer {self.tokens[sender]}"}
        session = self.browse().session
        async with session.post(f"{self.broker_url}/v1/accept", json={"messages": items}, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            answers: list[dict[str, Any]] = (await answer.json())["answers"]
        assert all(each["status"] < 300 for each in answers), answers
        return answers


@pytest.fixture(scope="session")
def console_database(postgres_server: EmbeddedPostgres) -> str:
    return migrated_database(postgres_server, "console", migrate)


@pytest.fixture(scope="session")
def operated(session_directory: Path, console_database: str, nats_server: EmbeddedNats) -> Iterator[str]:
    """The broker's address."""
    directory = session_directory / "console"
    directory.mkdir()
    with operated_broker(directory, console_database, NatsSettings(url=nats_server.url)) as reach:
        yield reach["POSTROOM_BROKER_URL"]


@pytest.fixture
def settings() -> dict[str, Any]:
    """What a test sets in the console's config."""
    return {}


@pytest.fixture
async def office(operated: str, console_database: str, settings: dict[str, Any]) -> AsyncIterator[Office]:
    """A mesh with alice, bob and the admin ada at its topic `orders`; its operators lou and rex, and eve of all."""
    mesh, tokens = f"m{next(_numbers)}", {"administrator": ADMIN_TOKEN}
    async with BrokerClient(operated, ADMIN_TOKEN) as client:
        await client.create_mesh(mesh)
        await client.create_topic(mesh, "orders")
        members: dict[str, Role] = {"alice": "member", "bob": "member", "ada": "admin"}
        for name, role in members.items():
            tokens[name] = (await client.create_member(mesh, name, role)).token
            await client.subscribe(mesh, "orders", name)
        operators: list[tuple[str, OperatorRole, str | None]] = [
            ("lou", "look", mesh), ("rex", "repair", mesh), ("eve", "look", None),
        ]  # fmt: skip
        for name, may, where in operators:
            tokens[name] = (await client.create_operator(f"{name}-{mesh}", may, where)).token
    config = ConsoleConfig(**{"broker_url": operated, **settings})
    async with AsyncExitStack() as stack:
        sessions = await stack.enter_async_context(Sessions(config))
        runner = web.AppRunner(build(sessions), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        url = await listening(runner, "127.0.0.1", 0)
        opened: list[aiohttp.ClientSession] = []

        def browse() -> Browser:
            opened.append(aiohttp.ClientSession(cookie_jar=aiohttp.CookieJar(unsafe=True)))
            return Browser(opened[-1], url)

        yield Office(url, mesh, operated, console_database, sessions, tokens, browse)
        for session in opened:
            await session.close()


@pytest.fixture
async def admin(office: Office) -> Browser:
    """The administrator's browser."""
    return await office.logged_in()
