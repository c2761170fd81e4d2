"""The console in a real Chromium, steered through chromedriver; `make test-browser`."""

from __future__ import annotations

import base64
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import pytest
from aiohttp import web
from nats.aio.client import Client
from support.databases import migrated_database
from support.operated import ADMIN_TOKEN, operated_broker

from broker.database import migrate
from console.app import build
from console.config import ConsoleConfig
from console.sessions import Sessions
from embedded import EmbeddedNats, EmbeddedPostgres
from embedded.processes import tethered
from postroom.chassis.listener import listening
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # how WebDriver marks one
SHOTS = os.environ.get("SCREENSHOTS")  # a directory for those who want to look
_numbers = itertools.count(1)


class Elsewhere(Exception):
    """What was looked for is not on the page, or not any more."""


@dataclass
class Chromium:
    """One window, by the WebDriver protocol."""

    http: aiohttp.ClientSession
    session: str
    url: str

    async def call(self, method: str, path: str, body: Any = None) -> Any:
        data = {} if body is None and method == "POST" else body
        async with self.http.request(method, self.session + path, json=data) as answer:
            value = (await answer.json())["value"]
            if answer.status == 404 or (answer.status == 500 and "Node with given id" in value["message"]):
                raise Elsewhere(value["message"].partition("\n")[0])
            assert answer.status == 200, value
            return value

    async def open(self, path: str) -> None:
        await self.call("POST", "/url", {"url": self.url + path})

    async def run(self, script: str, *values: Any) -> Any:
        return await self.call("POST", "/execute/sync", {"script": script, "args": values})

    async def find(self, selector: str) -> str:
        """Wait for an element of the page, which may be on its way."""
        while True:
            with suppress(Elsewhere):
                wanted = {"using": "css selector", "value": selector}
                found: str = (await self.call("POST", "/element", wanted))[ELEMENT]
                return found

    async def click(self, selector: str) -> None:
        await self.call("POST", f"/element/{await self.find(selector)}/click")

    async def type(self, selector: str, text: str) -> None:
        await self.call("POST", f"/element/{await self.find(selector)}/value", {"text": text})

    async def text(self) -> str:
        found: str = await self.call("GET", f"/element/{await self.find('body')}/text")
        return found

    async def until(self, words: str) -> None:
        found = ""
        while words not in found:  # every look is a round trip to the browser
            with suppress(Elsewhere):
                found = await self.text()

    async def source(self) -> str:
        found: str = await self.call("GET", "/source")
        return found

    async def shoot(self, name: str) -> None:
        """Keep a picture, for whoever wants to look."""
        if SHOTS is not None:
            picture = base64.b64decode(await self.call("GET", "/screenshot"))
            (Path(SHOTS) / f"{name}.png").write_bytes(picture)

    async def log_in(self) -> None:
        await self.open("/login")
        await self.type('input[name="token"]', ADMIN_TOKEN)
        await self.click("main button")
        await self.find(".who")  # the click does not always wait for the page that it leads to


@pytest.fixture(scope="session")
def chromedriver() -> Iterator[str]:
    """Its address."""
    program = shutil.which("chromedriver")
    if program is None or shutil.which("chromium") is None:
        pytest.fail("there is no Chromium: apt-get install chromium chromium-driver")
    with subprocess.Popen(tethered([program, "--port=0"]), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = next(found[1] for line in process.stdout if (found := re.search(r"on port (\d+)\.", line)))
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.fixture(scope="session")
def database(postgres_server: EmbeddedPostgres) -> str:
    return migrated_database(postgres_server, "browser", migrate)


@pytest.fixture(scope="session")
def operated(session_directory: Path, database: str, nats_server: EmbeddedNats) -> Iterator[str]:
    directory = session_directory / "browser"
    directory.mkdir()
    with operated_broker(directory, database, NatsSettings(url=nats_server.url)) as reach:
        yield reach["POSTROOM_BROKER_URL"]


@pytest.fixture
async def postgres(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(database)
    yield connection
    await connection.close()


@pytest.fixture
async def connection(nats_url: str) -> AsyncIterator[Client]:
    connection = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    yield connection
    await connection.close()


@pytest.fixture
async def console(operated: str) -> AsyncIterator[str]:
    """The console's address."""
    config = ConsoleConfig(broker_url=operated)
    async with AsyncExitStack() as stack:
        sessions = await stack.enter_async_context(Sessions(config))
        runner = web.AppRunner(build(sessions), access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        yield await listening(runner, "127.0.0.1", 0)


@pytest.fixture
def script() -> bool:
    """Whether pages may run our script."""
    return True


@pytest.fixture
def width() -> int:
    """Of the window, in CSS pixels."""
    return 1280


@pytest.fixture
def scheme() -> str:
    return "light"


@pytest.fixture
async def chromium(
    chromedriver: str,
    console: str,
    script: bool,
    width: int,
    scheme: str,
    tmp_path: Path,
) -> AsyncIterator[Chromium]:
    """A window where the administrator is logged in."""
    options = {
        "args": ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", f"--user-data-dir={tmp_path}"],
        "prefs": {} if script else {"profile.managed_default_content_settings.javascript": 2},
    }
    always = {"browserName": "chrome", "goog:chromeOptions": options}
    async with aiohttp.ClientSession() as http:
        body = {"capabilities": {"alwaysMatch": always}}
        async with http.post(f"{chromedriver}/session", json=body) as answer:
            created = (await answer.json())["value"]
        assert "sessionId" in created, created
        window = Chromium(http, f"{chromedriver}/session/{created['sessionId']}", console)
        for command, parameters in (
            ("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}),
            (
                "Emulation.setDeviceMetricsOverride",
                {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
            ),
        ):
            await window.call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})
        await window.log_in()
        yield window
        await window.call("DELETE", "")
