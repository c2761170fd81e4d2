"""Dead letters on the page: understood by cause, chosen, looked at first, then replayed or dropped for a reason."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import msgspec
import pytest
from nats.aio.client import Client

from console.views import ROWS

INSERT = """
INSERT INTO postroom.dead_letters (context, letter_id, subject, died_at, letter, payload)
SELECT $1, id, $2, now() - interval '1 hour' + n * interval '1 ms', convert_to(letter::text, 'UTF8'), $5
FROM generate_series(1, $6) AS n, LATERAL (SELECT $7 || '-' || n AS id) AS named, LATERAL (
  SELECT $3::jsonb || jsonb_build_object('message_id', id, 'last_error', replace($4, '%', n::text)) AS letter
) AS made
"""


class Letters:
    """The dead letters of a mesh, made without a consumer; the one that they are of can be there."""

    def __init__(self, mesh: str, postgres: asyncpg.Connection[asyncpg.Record], nats: Client) -> None:
        self.mesh = mesh
        self.subject = f"{mesh}.event.orders.v1"
        self.postgres = postgres
        self.nats = nats

    async def bury(
        self, name: str, count: int, *, reason: str = "poison", error: str = "no", payload: bytes = b"{}"
    ) -> None:
        letter = {
            "original_subject": self.subject,
            "reason": reason,
            "attempts": 5,
            "consumer": "billing",
            "died_at": "2026-01-31T12:00:00Z",
            "published_at": "2026-01-31T11:00:00Z",
        }
        text = msgspec.json.encode(letter).decode()
        dead = f"{self.mesh}.dlq.orders"
        await self.postgres.execute(INSERT, self.mesh, dead, text, error, payload, count, name)

    async def left(self) -> int:
        query = "SELECT count(*) FROM postroom.dead_letters WHERE context = $1 AND settled_at IS NULL"
        found: int = await self.postgres.fetchval(query, self.mesh)
        return found

    async def consume(self) -> None:
        js = self.nats.jetstream()
        await js.add_stream(name=f"{self.mesh.upper()}_EVENTS", subjects=[f"{self.mesh}.event.>"])
        await js.add_consumer(f"{self.mesh.upper()}_EVENTS", durable_name="billing", ack_policy="explicit")

    async def replayed(self) -> int:
        return int((await self.nats.jetstream().stream_info(f"{self.mesh.upper()}_EVENTS")).state.messages)


@pytest.fixture
async def letters(office: Any, connection: Client) -> AsyncIterator[Letters]:
    postgres = await asyncpg.connect(office.database)
    yield Letters(office.mesh, postgres, connection)
    await postgres.close()


async def finished(browser: Any) -> Any:
    """Open the page of a repair again, as a browser does, until it is over."""
    while 'http-equiv="refresh"' in browser.shown.text:
        await browser.open(browser.shown.path)
    return browser.shown


async def test_causes_have_their_number_and_one_example_each(office: Any, admin: Any, letters: Letters) -> None:
    await letters.bury("a", 3, error="the total of order-2026-000% is -%")
    await letters.bury("b", 2, reason="max_deliver", error="http_503: try % again")

    page = await admin.open(f"/dead_letters?mesh={office.mesh}")
    assert page.text.count("/dead_letters/list?mesh=") == 3  # two causes, and all of them
    assert "the total of order-2026-0003 is -3" in page.text
    link = html.unescape(page.text.split('class="number"><a href="')[1].split('"')[0])
    page = await admin.open(link)
    assert [f"/trace/a-{number}" in page.text for number in (1, 2, 3)] == [True] * 3
    assert "/trace/b-1" not in page.text


async def test_10_000_letters_of_five_causes_are_understood_and_replayed_page_by_page(
    office: Any, admin: Any, letters: Letters
) -> None:
    await letters.consume()
    for number in range(5):
        await letters.bury(f"c{number}", 1999 if number else 4, reason=f"cause_{number}", error="order % is broken")
    await letters.bury("rest", 2000, reason="cause_5", error="x" * 3000)

    page = await admin.open(f"/dead_letters?mesh={office.mesh}")
    assert len(page.text) < 100_000
    assert "10,000 messages" in page.text
    page = await admin.open(f"/dead_letters/list?mesh={office.mesh}")
    assert (page.text.count('name="id" value='), len(page.text) < 100_000) == (ROWS, True)
    page = await admin.open(f"/dead_letters/list?mesh={office.mesh}&reason=cause_0")
    page = await admin.submit(
        "/repairs", noun="/v1/dead_letters", mesh=office.mesh, reason="cause_0", all="yes", verb="replay"
    )
    assert "Replay 4 dead letters" in page.text
    page = await admin.submit(page.path, reason="the handler is fixed")
    assert "4 replayed, 0 failed." in (await finished(admin)).text
    assert (await letters.replayed(), await letters.left()) == (4, 9996)


async def test_nothing_changes_before_it_is_confirmed_with_a_reason_and_then_once(
    office: Any, admin: Any, letters: Letters
) -> None:
    await letters.bury("a", 3)
    page = await admin.open(f"/dead_letters/list?mesh={office.mesh}")
    ids = [part.partition('"')[0] for part in page.text.split('name="id" value="')[1:]]

    page = await admin.submit("/repairs", noun="/v1/dead_letters", mesh=office.mesh, id=ids[:2], verb="drop")
    assert ("Nothing has changed yet" in page.text, await letters.left()) == (True, 3)
    plan = page.path
    for reason in ("", "  ", "x" * 1001):
        await admin.open(plan)
        assert (await admin.submit(plan, reason=reason)).status == 400
    await admin.open(plan)
    await admin.submit(plan, reason="ordered by mistake")
    assert "2 dropped, 0 failed." in (await finished(admin)).text
    await admin.submit(plan, reason="again")
    assert (await letters.left(), "2 dropped" in admin.shown.text) == (1, True)


async def test_what_fails_is_said_with_why(office: Any, admin: Any, letters: Letters) -> None:
    await letters.bury("a", 1)  # nobody consumes
    await admin.open("/dead_letters")
    page = await admin.submit("/repairs", noun="/v1/dead_letters", mesh=office.mesh, all="yes", verb="replay")
    await admin.submit(page.path, reason="try")
    page = await finished(admin)
    assert "0 replayed, 1 failed." in page.text
    assert "billing" in page.text
    assert await letters.left() == 1


async def test_a_repair_is_of_the_one_who_planned_it(office: Any, admin: Any, letters: Letters) -> None:
    await letters.bury("a", 1)
    await admin.open("/dead_letters")
    page = await admin.submit("/repairs", noun="/v1/dead_letters", mesh=office.mesh, all="yes", verb="drop")
    ada = await office.logged_in("ada")
    assert (await ada.open(page.path)).status == 404
    await ada.open("/dead_letters")
    assert (await ada.submit(page.path, reason="not mine")).status == 404
    assert await letters.left() == 1
    for number in ("x", "9" * 5000):
        assert (await ada.open(f"/repairs/{number}")).status == 404


async def test_a_form_that_means_nothing_is_refused(office: Any, admin: Any) -> None:
    await admin.open("/dead_letters")
    for fields, code in (
        ({"noun": "/v1/dead_letters", "verb": "replay"}, "nothing_chosen"),
        ({"noun": "/v1/dead_letters", "verb": "explode", "all": "yes"}, "invalid_request"),
        ({"noun": "/v1/meshes", "verb": "drop", "all": "yes"}, "invalid_request"),
    ):
        await admin.open("/dead_letters")
        page = await admin.submit("/repairs", mesh=office.mesh, **fields)
        assert (page.status, code in page.text) == (400, True)
        assert '<a href="/dead_letters">Open the page again</a>' in page.text


async def test_a_mesh_that_there_is_not_is_no_good_news(admin: Any) -> None:
    for path in ("/dead_letters", "/dead_letters/list"):
        page = await admin.open(f"{path}?mesh=nowhere")
        assert page.status == 404
        assert "there is no mesh" in page.text


async def test_who_may_not_look_sees_none_and_who_may_not_repair_changes_none(office: Any, letters: Letters) -> None:
    await letters.bury("a", 1)
    bob = await office.logged_in("bob")
    assert "/dead_letters" not in bob.shown.text
    assert (await bob.open("/dead_letters")).status == 403
    await bob.open("/messages")
    page = await bob.submit("/repairs", noun="/v1/dead_letters", mesh=office.mesh, all="yes", verb="drop")
    assert (page.status, await letters.left()) == (403, 1)


@pytest.mark.parametrize("payload", ["<script>alert(1)</script>", "{{ 7 * 7 }}", "x" * 100_000])
async def test_a_payload_and_an_error_are_text(office: Any, admin: Any, letters: Letters, payload: str) -> None:
    await letters.bury("<svg onload=alert(1)>", 1, error=payload, payload=payload.encode())
    page = await admin.open(f"/dead_letters/list?mesh={office.mesh}")
    (id_,) = [part.partition('"')[0] for part in page.text.split('name="id" value="')[1:]]
    pages = [page, await admin.open(f"/dead_letters?mesh={office.mesh}")]
    pages.append(await admin.open(f"/dead_letters/{office.mesh}/{id_}"))
    for page in pages:
        assert len(page.text) < 100_000
        assert page.text.count("<script") == 1
        assert "<svg" not in page.text
        assert html.escape(payload, quote=False)[:200] in page.text


@pytest.mark.parametrize(("name", "left"), [("lou", 1), ("eve", 1), ("rex", 0)])
async def test_a_looker_is_offered_no_change_and_makes_none_while_a_repairer_does(
    office: Any, letters: Letters, name: str, left: int
) -> None:
    await letters.bury("a", 1)
    browser = await office.logged_in(name)
    page = await browser.open(f"/dead_letters/list?mesh={office.mesh}")
    assert "/trace/a-1" in page.text
    assert ('name="verb"' in page.text) == (not left)
    page = await browser.submit("/repairs", noun="/v1/dead_letters", mesh=office.mesh, all="yes", verb="drop")
    assert page.status == (403 if left else 200)
    if not left:
        await browser.submit(page.path, reason="ordered by mistake")
        assert "1 dropped, 0 failed." in (await finished(browser)).text
    assert await letters.left() == left
