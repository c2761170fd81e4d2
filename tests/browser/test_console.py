"""Every page for everybody: wide and narrow, light and dark, with our script and without; every repair by clicking."""

from __future__ import annotations

import os
import tarfile
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from support.operated import ADMIN_TOKEN

from console.views import NAVIGATION
from postroom import BrokerClient
from postroom._wire.jobs import StartJob

pytestmark = pytest.mark.browser

XSS = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>{{ 7 * 7 }}"
LETTERS = """
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, payload)
SELECT $1, id, $1 || '.dlq.orders', now() - n * interval '1 s', convert_to(jsonb_build_object(
    'message_id', id, 'original_subject', $1 || '.event.orders.v1', 'reason', 'poison', 'attempts', 5,
    'last_error', $2 || ' ' || n, 'consumer', 'billing')::text, 'UTF8'), convert_to($2, 'UTF8')
FROM generate_series(1, 60) AS n, LATERAL (SELECT $1 || '-' || n AS id) AS named
"""
EVENT = """
INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, event_version, payload,
  correlation_id, causation_id, subject, publish_attempts, publish_error, next_attempt_at)
VALUES ($1, 'topic', $2, 'orders', 1, '{}', $1, $1, $2, 7, $3, now())
"""


@pytest.fixture
async def mesh(operated: str, postgres: asyncpg.Connection[asyncpg.Record]) -> dict[str, str]:
    """A mesh with dead letters, a refused event and a job; what they are called."""
    name, event, job = f"m{uuid4().hex[:8]}", str(uuid4()), uuid4()
    async with BrokerClient(operated, ADMIN_TOKEN) as client:
        await client.create_mesh(name)
        request = msgspec.Raw(b'{"of": "january"}')
        await client.start_job(StartJob(mesh=name, flow="nightly-export", first="first", id=job, request=request))
    await postgres.execute(LETTERS, name, XSS)
    await postgres.execute(EVENT, event, f"{name}.event.orders.v1", XSS)
    letter = await postgres.fetchval("SELECT min(id) FROM postroom.dead_letters WHERE context = $1", name)
    return {"mesh": name, "event": event, "job": str(job), "letter": str(letter)}


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
    chromium: Any,
    mesh: dict[str, str],
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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
async def test_axe_finds_nothing_serious_on_any_page(chromium: Any, mesh: dict[str, str]) -> None:
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


@pytest.mark.parametrize("script", [True, False], ids=["script", "plain"])
async def test_every_repair_is_done_by_clicking(
    chromium: Any, mesh: dict[str, str], postgres: asyncpg.Connection[asyncpg.Record]
) -> None:
    async def confirm(words: str) -> None:
        await chromium.until("Nothing has changed yet")
        await chromium.type('main input[name="reason"]', "looked at it")
        await chromium.click("main form button")
        await chromium.until(words)

    # some letters are chosen, then all of them
    await chromium.open(f"/dead_letters?mesh={mesh['mesh']}")
    await chromium.click("td.number a")
    await chromium.click('tbody input[name="id"]')
    await chromium.click('button[value="drop"]')
    await confirm("1 dropped, 0 failed.")
    await chromium.open(f"/dead_letters/list?mesh={mesh['mesh']}")
    await chromium.click('input[name="all"]')
    await chromium.click('button[value="replay"]')
    await confirm("0 replayed, 59 failed.")  # nobody consumes
    await chromium.open(f"/dead_letters/list?mesh={mesh['mesh']}")
    await chromium.click('input[name="all"]')
    await chromium.click('button[value="drop"]')
    await confirm("59 dropped, 0 failed.")

    await chromium.open("/unpublished")
    await chromium.click(f'input[value="{mesh["event"]}"]')
    await chromium.click('button[value="drop"]')
    await confirm("1 dropped, 0 failed.")

    await chromium.open(f"/jobs/{mesh['job']}")
    await chromium.click('button[value="cancel"]')
    await confirm("1 is cancelled, 0 failed.")
    state = await postgres.fetchval("SELECT state FROM ledger.job WHERE id = $1", mesh["job"])
    assert state == "cancelled"
