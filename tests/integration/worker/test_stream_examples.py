"""The files of examples/streams, each run by its own program, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncpg
import pytest
from nats.aio.client import Client
from nats.errors import Error
from nats.js import JetStreamContext
from support.handlers import serving
from support.waiting import until_so

from embedded import EmbeddedNats
from embedded.processes import tethered
from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings, StreamSettings
from postroom.delivery.streams import ensure_stream

EXAMPLES = Path(__file__).parents[3] / "examples" / "streams"


@pytest.fixture
async def connection(short_directory: Path) -> AsyncIterator[Client]:
    """A connection to a NATS without any stream."""
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    connection = await connect(NatsSettings(url=server.url), name="test", patience=20)
    yield connection
    await connection.close()
    server.stop()


@contextmanager
def running(*arguments: str, log: Path, **environ: str) -> Iterator[None]:
    environment = {
        "PATH": os.environ["PATH"],
        "POSTROOM_STATE": str(log.parent),
        "PYTHONPATH": str(EXAMPLES),
        **environ,
    }
    command = tethered([sys.executable, "-m", "cli", *arguments])
    with log.open("wb") as output, subprocess.Popen(command, stderr=output, env=environment, cwd=EXAMPLES) as process:
        try:
            yield
        finally:
            process.terminate()


def servers(program: str, connection: Client, database_url: str = "") -> dict[str, str]:
    (url,) = [f"nats://{uri.username}:{uri.password}@{uri.netloc.rpartition('@')[2]}" for uri in connection.servers]
    database = {f"POSTROOM_{program}_DATABASE_URL": database_url} if database_url else {}
    return {f"POSTROOM_{program}_NATS_URL": url, **database}


async def test_sea_reads_the_events_of_vibespro(connection: Client, database_url: str, tmp_path: Path) -> None:
    await migrate(database_url, ROOM)
    js = connection.jetstream()
    database = await asyncpg.connect(database_url)
    async with serving() as handler:
        handled = {"POSTROOM_CONSUMER_HANDLER_URL": handler.url}
        with (
            running(
                "worker",
                "run",
                "--config",
                "sea.toml",
                log=tmp_path / "w",
                **servers("WORKER", connection, database_url),
            ),
            running(
                *("consumer", "run", "--config", "sea_consumer.toml"),
                log=tmp_path / "c",
                **servers("CONSUMER", connection, database_url),
                **handled,
            ),
        ):
            await database.execute("SELECT postroom.emit('vibespro', 'vibe', '1', 'vibe_created', '{\"n\": 1}')")
            await handler.saw(1)
    await database.close()
    assert handler.calls[0].request.subject == "vibespro.event.vibe_created.v1"
    config = (await js.consumer_info("VIBESPRO_EVENTS", "sea__from_vibespro")).config
    assert (config.ack_wait, config.max_ack_pending, config.filter_subjects) == (120, 10_050, ["vibespro.event.>"])
    assert {info.config.name for info in await js.streams_info()} >= {"SEA_EVENTS", "VIBESPRO_EVENTS", "SEA_DLQ"}


async def test_an_agent_of_meshforge_says_where_its_events_go(
    connection: Client, database_url: str, tmp_path: Path
) -> None:
    await migrate(database_url, ROOM)
    js = connection.jetstream()
    nats_url = servers("X", connection)["POSTROOM_X_NATS_URL"]
    scribe = ("agent", "run", "meshforge_scribe:Scribe", "--tenant", "default", "--workspace", "demo")
    await ensure_stream(js, StreamSettings(name="MESHFORGE_COMMANDS", subjects=["cmd.>"], retention="workqueue"))
    alone = {"POSTROOM_NATS_URL": nats_url, "POSTROOM_AGENT_START_SECONDS": "3"}
    with running(*scribe, log=tmp_path / "alone", **alone):
        await until_so(lambda: _says(tmp_path / "alone", "no stream has evt.default.demo.scribe.*"))
    with (
        running(
            "worker",
            "run",
            "--config",
            "meshforge.toml",
            log=tmp_path / "w",
            **servers("WORKER", connection, database_url),
        ),
        running(*scribe, log=tmp_path / "agent", POSTROOM_NATS_URL=nats_url),
    ):
        await until_so(lambda: _published(js))
        await until_so(lambda: _is_there(js, "MESHFORGE_EVENTS", 1))
    event = await js.get_msg("MESHFORGE_EVENTS", 1)
    assert (event.subject, json.loads(event.data or b"")) == ("evt.default.demo.scribe.written", {"text": "hello"})
    assert (await js.stream_info("MESHFORGE_COMMANDS")).state.messages == 0


async def _published(js: JetStreamContext) -> bool:
    try:
        await js.publish("cmd.default.demo.scribe.write", b'{"text":"hello"}', headers={"Nats-Msg-Id": "a"})
    except Error:
        return False
    return True


async def _is_there(js: JetStreamContext, stream: str, sequence: int) -> bool:
    try:
        return (await js.stream_info(stream)).state.last_seq >= sequence
    except Error:
        return False


async def _says(log: Path, words: str) -> bool:
    return words in log.read_text()
