"""Every page for everybody: wide and narrow, light and dark, with our script and without; every repair by clicking."""

from __future__ import annotations

import os
import tarfile
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from nats.aio.client import Client
from support.operated import ADMIN_TOKEN

from console.views import NAVIGATION
from postroom import BrokerClient
from postroom._wire.dead_letters import DeadLetter
from postroom._wire.jobs import StartJob

pytestmark = pytest.mark.browser

XSS = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>{{ 7 * 7 }}"
LETTERS = """
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, payload)
SELECT $1, id, $1 || '.dlq.orders', now() - n * interval '1 s', convert_to(jsonb_build_object(
    'message_id', id, 'original_subject', $1 || '.event.orders.v1', 'reason', $3 || n % $5, 'attempts', 5,
    'last_error', $2 || ' ' || n, 'consumer', 'billing')::text, 'UTF8'), convert_to($2, 'UTF8')
FROM generate_series(1, $4) AS n, LATERAL (SELECT $1 || '-' || n AS id) AS named
"""
MINUTES = """
INSERT INTO postroom.minute_counts
SELECT date_trunc('minute', now()) - n * interval '1 minute', name, 1 + n * n % 97 * 11 / of
FROM generate_series(0, 59) AS n, (VALUES ('accepted', 1), ('handled', 1), ('dead_lettered', 99), ('handled_in_3', 1),
  ('handled_in_6', 20)) AS counted (name, of)
ON CONFLICT DO NOTHING
"""
EVENT = """
INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, event_version, payload,
  correlation_id, causation_id, subject, publish_attempts, publish_error, next_attempt_at)
VALUES ($1, 'topic', $2, 'orders', 1, '{}', $1, $1, $2, 7, $3, now())
"""


@pytest.fixture
async def mesh(operated: str, postgres: asyncpg.Connection[asyncpg.Record]) -> dict[str, str]:
    """A mesh with dead letters, a refused event and two jobs; what they are called."""
    name, event, job, failing = f"m{uuid4().hex[:8]}", str(uuid4()), uuid4(), uuid4()
    async with BrokerClient(operated, ADMIN_TOKEN) as client:
        await client.create_mesh(name)
        request = msgspec.Raw(b'{"of": "january"}')
        for one in (job, failing):
            await client.start_job(StartJob(mesh=name, flow="nightly-export", first="first", id=one, request=request))
    await postgres.execute(LETTERS, name, XSS, "poison_", 60, 1)
    await postgres.execute(MINUTES)
    await postgres.execute(EVENT, event, f"{name}.event.orders.v1", XSS)
    letter = await postgres.fetchval("SELECT min(id) FROM postroom.dead_letters WHERE context = $1", name)
    return {"mesh": name, "event": event, "job": str(job), "failing": str(failing), "letter": str(letter)}


def pages(found: dict[str, str]) -> list[str]:
    mesh = found["mesh"]
    return [
        *(path for path, _ in NAVIGATION),
        f"/dead_letters?mesh={mesh}",
        f"/dead_letters/list?mesh={mesh}",
        f"/dead_letters/{mesh}/{found['letter']}",
        f"/trace/{mesh}-1",
        f"/trace/{found['job']}",
        f"/jobs/{found['job']}",
        "/nothing",
    ]


@pytest.mark.parametrize("script", [True, False], ids=["script", "plain"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
async def test_every_page_fits_and_what_it_shows_stays_text(
    mesh: dict[str, str],
    chromium: Any,
    script: bool,
    width: int,
    scheme: str,
) -> None:
    for path in pages(mesh):
        await chromium.open(path)
        name = path.split("?")[0].strip("/").replace("/", "-").replace(mesh["mesh"], "mesh")[:40] or "overview"
        await chromium.shoot(f"{name}-{width}-{scheme}-{'script' if script else 'plain'}")
        wide, title = await chromium.run("return [document.documentElement.scrollWidth, document.title]")
        assert wide <= width, path
        assert title.endswith("Postroom"), path
        assert await chromium.run("return document.querySelectorAll('h1').length") == 1, path
        if path == "/":
            drawn = (
                "return [...document.querySelectorAll('.plot path')].filter((one) => one.getTotalLength() > 50).length"
            )
            assert await chromium.run(drawn) == 5


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
async def test_axe_finds_nothing_serious_on_any_page(mesh: dict[str, str], chromium: Any) -> None:
    with tarfile.open(os.environ["AXE"]) as packed:
        axe = packed.extractfile("package/axe.min.js").read().decode()
    faults = []
    for path in ["/login", *pages(mesh)]:
        await chromium.open(path)
        await chromium.run(axe)
        found = await chromium.call(
            "POST",
            "/execute/async",
            {"script": "const done = arguments[0]; axe.run().then((found) => done(found.violations));", "args": []},
        )
        faults += [
            (path, one["id"], one["nodes"][0]["html"][:200], one["nodes"][0].get("failureSummary", "")[:300])
            for one in found
            if one["impact"] in ("serious", "critical")
        ]
    assert faults == []


async def test_an_overview_whose_numbers_no_longer_change_says_so(operated: str, chromium: Any) -> None:
    watcher = f"watcher-{uuid4().hex[:8]}"
    async with BrokerClient(operated, ADMIN_TOKEN) as client:
        token = (await client.create_operator(watcher, "look")).token
        await chromium.open("/")
        await chromium.click('form[action="/logout"] button')
        await chromium.type('input[name="token"]', token)
        await chromium.click("main button")
        await chromium.until("What is wrong")
        await client.revoke_operator(watcher)
        await chromium.until("The log-in has ended: reload the page")


async def confirm(chromium: Any, words: str) -> None:
    await chromium.until("Nothing has changed yet")
    await chromium.type('main input[name="reason"]', "looked at it")
    await chromium.click("main form button")
    await chromium.until(words)


@pytest.mark.parametrize("script", [True, False], ids=["script", "plain"])
async def test_every_repair_is_done_by_clicking(
    chromium: Any, mesh: dict[str, str], postgres: asyncpg.Connection[asyncpg.Record], connection: Client
) -> None:
    # some letters are chosen, then all of them
    await chromium.open(f"/dead_letters?mesh={mesh['mesh']}")
    await chromium.click("td.number a")
    await chromium.click('tbody input[name="id"]')
    await chromium.click('button[value="drop"]')
    await confirm(chromium, "1 dropped, 0 failed.")
    await chromium.open(f"/dead_letters/list?mesh={mesh['mesh']}")
    await chromium.click('input[name="all"]')
    await chromium.click('button[value="replay"]')
    await confirm(chromium, "0 replayed, 59 failed.")  # nobody consumes
    await chromium.open(f"/dead_letters/list?mesh={mesh['mesh']}")
    await chromium.click('input[name="all"]')
    await chromium.click('button[value="drop"]')
    await confirm(chromium, "59 dropped, 0 failed.")

    await chromium.open("/unpublished")
    await chromium.click(f'input[value="{mesh["event"]}"]')
    await chromium.click('button[value="drop"]')
    await confirm(chromium, "1 dropped, 0 failed.")

    await chromium.open(f"/jobs/{mesh['job']}")
    await chromium.click('button[value="cancel"]')
    await confirm(chromium, "1 cancelled, 0 failed.")
    state = await postgres.fetchval("SELECT state FROM ledger.job WHERE id = $1", mesh["job"])
    assert state == "cancelled"

    (activity,) = await postgres.fetchrow("SELECT id FROM ledger.activity WHERE job_id = $1", mesh["failing"])
    await postgres.execute("SELECT ledger.fail($1, 'the disk is full')", activity)
    await chromium.open(f"/jobs/{mesh['failing']}")
    await chromium.click('button[value="retry"]')
    await confirm(chromium, "1 retried, 0 failed.")
    state = await postgres.fetchval("SELECT state FROM ledger.job WHERE id = $1", mesh["failing"])
    assert state == "running"

    stream = await consume(connection, mesh["mesh"])
    await chromium.open(f"/consumers?mesh={mesh['mesh']}")
    for verb, done, paused in (("pause", "1 paused", True), ("resume", "1 resumed", None)):
        await chromium.click('tbody input[name="id"]')
        await chromium.click(f'button[value="{verb}"]')
        await confirm(chromium, f"{done}, 0 failed.")
        assert (await connection.jetstream().consumer_info(stream, "billing")).paused is paused
        await chromium.click('a[href^="/consumers?"]')
    await connection.jetstream().delete_stream(stream)


async def consume(connection: Client, mesh: str) -> str:
    """Make the consumer of the letters, and return its stream."""
    js, stream = connection.jetstream(), f"{mesh.upper()}_EVENTS"
    await js.add_stream(name=stream, subjects=[f"{mesh}.event.>"])
    await js.add_consumer(stream, durable_name="billing", ack_policy="explicit")
    return stream


async def bury_as_agents_do(connection: Client, mesh: str, reason: str, count: int) -> None:
    """Keep letters in their stream alone."""
    js = connection.jetstream()
    await js.add_stream(name=f"{mesh.upper()}_DLQ", subjects=[f"{mesh}.dlq.>"])
    for number in range(count):
        letter = DeadLetter(
            message_id=f"agent-{number}",
            original_subject=f"{mesh}.event.orders.v1",
            reason=reason,
            attempts=5,
            last_error=XSS,
            consumer="billing",
            payload=XSS,
        )
        body = msgspec.json.encode(letter)
        await js.publish_async(f"{mesh}.dlq.orders.v1", body, headers={"Nats-Msg-Id": f"dead:billing:agent-{number}"})
    await js.publish_async_completed()


async def test_10_000_letters_of_five_causes_are_found_understood_and_replayed(
    chromium: Any, operated: str, postgres: asyncpg.Connection[asyncpg.Record], connection: Client
) -> None:
    mesh = f"m{uuid4().hex[:8]}"
    async with BrokerClient(operated, ADMIN_TOKEN) as client:
        for name in (mesh, f"other_{mesh}"):
            await client.create_mesh(name)
    await postgres.execute(LETTERS, mesh, XSS, "cause_", 8_000, 4)
    stream = await consume(connection, mesh)
    await bury_as_agents_do(connection, mesh, "cause_4", 2_000)

    async def looked() -> None:
        size, rows = await chromium.run(
            "return [performance.getEntriesByType('navigation')[0].decodedBodySize,"
            " document.querySelectorAll('tbody tr').length]"
        )
        assert (size <= 100_000, rows <= 50) == (True, True), (size, rows)

    for cause in range(5):
        await chromium.open("/")
        await chromium.click('nav a[href="/dead_letters"]')
        await chromium.type('select[name="mesh"]', mesh)
        await chromium.click("form.filters button")
        await chromium.until(f"{10_000 - 2_000 * cause:,} messages")
        await looked()
        await chromium.click(f'td.number a[href*="reason=cause_{cause}"]')
        await chromium.until("All that match")
        await looked()
        await chromium.click('input[name="all"]')
        await chromium.click('button[value="replay"]')
        await chromium.until("Nothing has changed yet")
        await looked()
        await chromium.type('main input[name="reason"]', "the handler is fixed")
        await chromium.click("main form button")
        await chromium.until("of 2,000")
        await chromium.until("2,000 replayed, 0 failed.")
        await looked()
    assert (await connection.jetstream().stream_info(stream)).state.messages == 10_000
    query = "SELECT count(*) FROM postroom.dead_letters WHERE context = $1 AND act = 'replayed'"
    assert await postgres.fetchval(query, mesh) == 10_000
    for one in (stream, f"{mesh.upper()}_DLQ"):
        await connection.jetstream().delete_stream(one)
