"""One worker that publishes, runs a flow, an agent and a consumer; and one that only has an agent."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import asyncpg
import pytest
from support.handlers import serving
from support.jetstream import Context
from support.mailroom import worker
from support.waiting import until_so
from support.zygote import Piped

from postroom._wire.programs import Program
from postroom.chassis.postgres import migrate
from postroom.delivery.nats import connect
from postroom.delivery.programs import list_programs
from postroom.delivery.settings import NatsSettings
from postroom.ledger import ROOMS
from postroom.ledger.primitives import Start, start_job

EXAMPLES = Path(__file__).parents[3] / "examples"
QUICK = {"POSTROOM_WORKER_RECORD_CHECK_SECONDS": "0.2", "POSTROOM_WORKER_JOBS_CHECK_SECONDS": "0.05"}


@pytest.fixture
async def context(nats_url: str) -> AsyncIterator[Context]:
    """A context whose streams nobody has declared yet."""
    client = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    context = Context(client)
    yield context
    await context.remove()
    await client.close()


async def ask(page: str, path: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(page + path) as answer:
        return answer.status, await answer.text()


async def programs(database_url: str) -> list[Program]:
    connection = await asyncpg.connect(database_url)
    try:
        return await list_programs(connection, None)
    finally:
        await connection.close()


def agent(context: Context, state: Path) -> str:
    return (
        f'[[agents]]\nagent_class = "nightly_export:Extract"\ntenant = "{context.name}"\nstate_directory = "{state}"\n'
    )


@pytest.mark.parametrize(
    ("nats", "sentence"),
    [
        ("", b"agents: two have the same name"),
        ('credentials_file = "/nowhere"', b"cannot read the NATS credentials /nowhere: No such file"),
    ],
)
async def test_a_worker_that_cannot_work_so_is_refused_at_its_start(
    nats: str, sentence: bytes, context: Context, tmp_path: Path
) -> None:
    config = tmp_path / "worker.toml"
    both = agent(context, tmp_path / "one") + agent(context, tmp_path / "two")
    config.write_text(f'[nats]\nurl = "nats://127.0.0.1:1"\n{nats}\n{both}')
    words = ["-m", "postroom.worker", "run", "--config", str(config)]
    worker = await Piped.start(words, {**os.environ, "PYTHONPATH": str(EXAMPLES)})
    code, said = await worker.communicate()
    assert (code, sentence in said) == (78, True), said


async def test_a_worker_runs_a_flow_an_agent_and_a_consumer_beside_publishing(
    context: Context, nats_url: str, database_url: str, tmp_path: Path
) -> None:
    await migrate(database_url, *ROOMS)
    connection = await asyncpg.connect(database_url)
    job, day = uuid4(), json.dumps({"day": "2031-01-01", "parts": 2})
    await start_job(connection, Start(job, context.name, "nightly-export", uuid4(), "extract", day))
    await connection.close()
    streams = "".join(
        f'[[streams]]\nname = "{each.name}"\nsubjects = {json.dumps(each.subjects)}\n' for each in context.streams
    )
    config = tmp_path / "worker.toml"
    async with serving() as handler:
        config.write_text(
            f'database_url = "{database_url}"\nflows = ["nightly_export:flow"]\n[nats]\nurl = "{nats_url}"\n'
            f'{streams}[[consumers]]\ncontext = "{context.name}"\nhandler.url = "{handler.url}"\n'
            f'consumer.stream = "{context.events}"\nconsumer.durable = "books"\n'
            f'consumer.filter_subjects = ["{context.name}.event.job_completed.>"]\n{agent(context, tmp_path / "state")}'
        )
        with worker("--config", str(config), PYTHONPATH=str(EXAMPLES), **QUICK) as (process, started):
            await handler.saw(1)
            well = (200, '{"status":"ok","reasons":[]}')  # once each source has been looked at
            await until_so(lambda: ask(started["page"], "/ready"), "ready", holds=well.__eq__)
            metrics = (await ask(started["page"], "/metrics"))[1]
            status, problem = await ask(started["page"], "/nowhere")
            assert (status, json.loads(problem)["code"]) == (404, "not_found")
            (reported,) = await programs(database_url)
            process.terminate()
            assert await asyncio.to_thread(process.wait) == 0

    parts = ["publishing", "consumer books", f"agent {context.name}.default.extract"]
    assert (reported.kind, reported.address, reported.name) == ("worker", started["page"], ", ".join(parts))
    assert [(part.name, part.flows) for part in reported.parts] == [
        (parts[0], ["nightly-export"]),
        (parts[1], []),
        (parts[2], []),
    ]
    assert await programs(database_url) == []  # it was stopped, and is not missed
    (call,) = handler.calls
    assert (call.request.payload["job"], call.request.payload["result"]["parts"]) == (str(job), 2)
    assert 'postroom_worker_published_total{source="events"}' in metrics
    assert 'postroom_consumer_calls_total{answer="http_200",consumer="books"} 1.0' in metrics
    assert f'postroom_agent_position{{agent="extract",mesh="{context.name}",workspace="default"}} ' in metrics


async def test_a_worker_with_only_an_agent_needs_no_postgres(context: Context, nats_url: str, tmp_path: Path) -> None:
    await context.declare()
    config = tmp_path / "worker.toml"
    config.write_text(f'[nats]\nurl = "{nats_url}"\n{agent(context, tmp_path / "state")}')
    with worker("--config", str(config), ready="ready", PYTHONPATH=str(EXAMPLES)) as (process, started):
        assert (started["agent"], (await ask(started["page"], "/ready"))[0]) == ("extract", 200)
        process.terminate()
        assert await asyncio.to_thread(process.wait) == 0
