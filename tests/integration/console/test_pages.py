"""The other pages: consumers, what is unpublished, jobs, programs, the log; who sees which, and what they change."""

from __future__ import annotations

import html
import platform
import re
import socket
from typing import Any
from uuid import uuid4

import asyncpg
import msgspec
import pytest
from nats.aio.client import Client
from structlog.testing import capture_logs
from support.databases import END_SESSIONS
from support.waiting import until_so
from yarl import URL

from console import overview
from console.views import NAVIGATION
from postroom import BrokerClient
from postroom._wire.jobs import JOBS, StartJob
from postroom._wire.programs import PROGRAMS

EVERYWHERE = ["/", "/consumers", "/unpublished", "/log"]


def finished(page: Any) -> bool:
    return 'http-equiv="refresh"' not in page.text


async def test_the_administrator_is_offered_every_page_and_each_is_there(admin: Any) -> None:
    for path, label in NAVIGATION:
        page = await admin.open(path)
        assert (page.status, len(page.text) < 100_000) == (200, True), path
        assert f'<a href="{path}" aria-current="page">{label}</a>' in page.text


async def test_what_is_for_others_is_neither_offered_nor_shown(office: Any) -> None:
    others = [path for path, _ in NAVIGATION if path != "/messages"]
    for name, hidden in (("ada", EVERYWHERE), ("lou", EVERYWHERE), ("eve", []), ("bob", others)):
        browser = await office.logged_in(name)
        for path, _ in NAVIGATION:
            assert (f'<li><a href="{path}"' in browser.shown.text) == (path not in hidden), (name, path)
        for path in hidden[1:]:  # the overview leads to the messages
            page = await browser.open(path)
            assert (page.status, "not_permitted" in page.text) == (403, True), (name, path)
            await browser.open("/messages")


async def test_a_consumer_that_nobody_runs_is_seen(office: Any, admin: Any, connection: Client) -> None:
    js = connection.jetstream()
    stream = f"{office.mesh.upper()}_EVENTS"
    await js.add_stream(name=stream, subjects=[f"{office.mesh}.event.>"])
    await js.add_consumer(stream, durable_name="billing", ack_policy="explicit")
    for _ in range(3):
        await js.publish(f"{office.mesh}.event.orders.v1", b"{}")

    postgres = await asyncpg.connect(office.database)
    await postgres.execute(
        "INSERT INTO postroom.minute_waiting SELECT date_trunc('minute', now()) - n * interval '1 minute', $1, who, n "
        "FROM (VALUES (5, 'billing'), (40, 'billing'), (61, 'billing'), (2, 'gone')) AS seen (n, who)",
        stream,
    )
    await postgres.close()
    page = await admin.open(f"/consumers?mesh={office.mesh}")
    row = page.text.split("<strong>billing</strong>")[1].split("</tr>")[0]
    assert '<td class="number">3<div class="faint">at most 40</div>' in row
    assert row.split('<path d="')[1].split('"')[0].count("M") == 2
    assert "stopped" in row
    assert "never" in row

    page = await admin.submit("/repairs", noun="/v1/consumers", mesh=office.mesh, id=f"{stream}/billing", verb="pause")
    assert "1 consumer would be paused:" in page.text
    await admin.submit(page.path, reason="it bills <b>twice")
    while not finished(admin.shown):
        await admin.open(page.path)
    assert "1 paused, 0 failed." in admin.shown.text
    page = await admin.open(f"/consumers?mesh={office.mesh}")
    assert "Paused by administrator: it bills &lt;b&gt;twice" in page.text
    page = await admin.submit("/repairs", noun="/v1/consumers", mesh=office.mesh, id=f"{stream}/billing", verb="pause")
    assert "cannot pause the consumer billing: it must be active, and is paused" in html.unescape(page.text)
    await admin.open(f"/consumers?mesh={office.mesh}")
    page = await admin.submit("/repairs", noun="/v1/consumers", mesh=office.mesh, id=f"{stream}/billing", verb="resume")
    await admin.submit(page.path, reason="fixed")
    while not finished(admin.shown):
        await admin.open(page.path)
    assert "1 resumed, 0 failed." in admin.shown.text
    eve = await office.logged_in("eve")
    page = await eve.open(f"/consumers?mesh={office.mesh}")
    assert ["<strong>billing</strong>" in page.text, 'value="pause"' in page.text] == [True, False]


@pytest.fixture
async def refused(office: Any) -> str:
    """An event that JetStream has refused; its id."""
    event = str(uuid4())
    postgres = await asyncpg.connect(office.database)
    await postgres.execute(
        "INSERT INTO postroom.outbox_events (id, aggregate_type, aggregate_id, event_type, event_version, payload, "
        "correlation_id, causation_id, subject, publish_attempts, publish_error, next_attempt_at) "
        "VALUES ($1, 'topic', $2, 'orders', 1, '{}', $1, $1, $2, 7, '<b>too large</b>', now())",
        event,
        f"{office.mesh}.event.orders.v1",
    )
    await postgres.close()
    return event


async def test_a_refused_event_is_dropped_by_choosing_it(admin: Any, refused: str) -> None:
    page = await admin.open("/unpublished")
    assert "&lt;b&gt;too large" in page.text
    page = await admin.submit("/repairs", noun="/v1/unpublished/events", id=refused, verb="drop")
    assert "Drop 1 event" in page.text
    await admin.submit(page.path, reason="can never be published")
    while not finished(admin.shown):
        await admin.open(page.path)
    assert "1 dropped, 0 failed." in admin.shown.text
    assert refused not in (await admin.open("/unpublished")).text
    page = await admin.open(f"/log?verb=drop&key={refused}")
    assert "can never be published" in page.text


async def test_a_job_is_found_shown_and_cancelled(office: Any, admin: Any) -> None:
    flow, job = f"flow-{uuid4().hex[:8]}", uuid4()
    async with BrokerClient(office.broker_url, office.tokens["administrator"]) as client:
        request = msgspec.Raw(b'{"of": "<script>"}')
        await client.start_job(StartJob(mesh=office.mesh, flow=flow, first="first", id=job, request=request))

    assert f'href="/jobs/{job}"' in (await admin.open(f"/jobs?mesh={office.mesh}&flow={flow}&state=running")).text
    buttons = re.findall(r'<button name="verb" value="(.+)">', admin.shown.text)
    assert buttons == [f'{name}" class="grave' if verb.grave else name for name, verb in JOBS.verbs.items()]
    assert str(job) not in (await admin.open(f"/jobs?mesh={office.mesh}&flow={flow}&state=failed")).text
    page = await admin.open(f"/jobs/{job}")
    assert ['value="cancel"' in page.text, 'value="retry"' in page.text] == [True, False]
    assert '<span class="what">first</span>' in page.text
    assert "<summary>Ledger <code>000000000000000</code></summary>" in page.text
    assert "leg 1 was attempted 0 times (at most 999)" in page.text
    page = await admin.submit("/repairs", noun="/v1/jobs", id=str(job), verb="cancel")
    await admin.submit(page.path, reason="the wrong day")
    while not finished(admin.shown):
        await admin.open(page.path)
    assert "1 cancelled, 0 failed." in admin.shown.text
    page = await admin.open(f"/jobs/{job}")
    assert ["An operator ended it." in page.text, "the wrong day" in page.text] == [True, True]
    assert (await admin.open("/jobs?state=odd")).status == 400


async def test_a_program_that_needs_help_says_what_is_wrong_and_what_helps(office: Any, admin: Any) -> None:
    now = "2026-01-31T12:00:00Z"
    report = {
        "host": platform.node(),
        "pid": 7,
        "version": "1",
        "started_at": now,
        "at": now,
        "status": "ok",
        "dead": 3,
    }
    headers = {"Authorization": f"Bearer {office.tokens['alice']}"}
    async with admin.session.post(office.broker_url + PROGRAMS.path, json=report, headers=headers) as answer:
        assert answer.status < 300, await answer.text()

    page = await admin.open("/programs")
    row = page.text.split(f"<strong>daemon alice</strong> of {office.mesh}")[1].split("</tr>")[0]
    assert "3 dead rows" in row
    assert "<code>postroom outbox list --status dead</code>" in html.unescape(row)


async def test_the_log_names_who_did_what(office: Any, admin: Any) -> None:
    page = await admin.open("/log?noun=mesh&verb=create")
    assert office.mesh in page.text
    assert "administrator" in page.text


async def test_the_overview_says_how_much_waits_where_and_goes_on_saying_it(
    office: Any, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_LOOK_SECONDS", 0.01)
    headers = {"Authorization": f"Bearer {office.tokens['alice']}"}

    async def report(seconds: int, relayed: int) -> None:
        at = f"2026-01-31T12:00:{seconds:02}Z"
        said = {"host": office.mesh, "pid": 7, "version": "1", "started_at": "2026-01-31T11:00:00Z", "at": at}
        body = {**said, "status": "degraded", "reasons": ["<b>no disk</b>"], "totals": {"relayed": relayed}}
        async with admin.session.post(office.broker_url + PROGRAMS.path, json=body, headers=headers) as answer:
            assert answer.status < 300, await answer.text()

    await report(0, 100)
    page = await admin.open("/")
    assert f"<strong>alice@{office.mesh} on {office.mesh}</strong>: " in page.text
    assert "&lt;b&gt;no disk&lt;/b&gt;" in page.text
    async with admin.session.get(f"{admin.url}/live") as stream:
        assert stream.content_type == "text/event-stream"
        told: dict[str, Any] = {}
        await report(10, 150)
        while told.get("numbers", {}).get("relayed") != "5.0/s":
            line = await stream.content.readline()
            told = msgspec.json.decode(line.removeprefix(b"data: ")) if line.startswith(b"data: ") else told
        assert "<b>no disk</b>" in [trouble["what"] for trouble in told["wrong"]]
        await admin.open("/messages")
        await admin.submit("/logout")
        await stream.content.read()  # it ends


async def test_the_overview_draws_the_last_hour_and_says_it_as_a_table(
    office: Any, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(overview.api, "REPORT_SECONDS", 0.0)
    postgres = await asyncpg.connect(office.database)

    async def count(minutes_ago: int, **counts: int) -> None:
        await postgres.execute(
            "INSERT INTO postroom.minute_counts SELECT date_trunc('minute', now()) - $1 * interval '1 minute', name, n "
            "FROM unnest($2::text[], $3::bigint[]) AS counted (name, n)",
            minutes_ago,
            list(counts),
            list(counts.values()),
        )

    await count(61, accepted=5)
    await count(20, accepted=1000, handled=800, dead_lettered=3, handled_in_2=98, handled_in_8=2)
    await count(5, accepted=500)
    page = await admin.open("/")
    assert '<span data-live="hour_accepted">1,500, at most 1,000 in a minute</span>' in page.text
    assert '<span data-live="hour_p99">1.5 s, at most 1.5 s</span>' in page.text
    (row,) = [row for row in page.text.split("<tr>") if "1,000</td>" in row]
    cells = [cell.partition("<")[0] for cell in row.split('<td class="number">')[1:]]
    assert cells == ["1,000", "800", "3", "15 ms", "1.5 s"]
    assert page.text.count('<th scope="row">') == 60
    assert 'data-path="accepted" d="M' in page.text

    async with admin.session.get(f"{admin.url}/live") as stream:
        told = ""
        while not told.startswith("data: "):
            told = (await stream.content.readline()).decode()
        before = msgspec.json.decode(told.removeprefix("data: "))["paths"]["dead_lettered"]
        await count(1, dead_lettered=2)
        while '"hour_dead_lettered":"5, ' not in told:
            told = (await stream.content.readline()).decode()
        assert msgspec.json.decode(told.removeprefix("data: "))["paths"]["dead_lettered"] != before
    await postgres.execute("DELETE FROM postroom.minute_counts")
    await postgres.close()


async def test_the_overview_is_there_as_soon_as_the_minutes_can_be_read_again(office: Any) -> None:
    postgres = await asyncpg.connect(office.database)
    await postgres.execute("ALTER TABLE postroom.minute_counts RENAME TO away")
    browser = await office.logged_in()
    assert (browser.shown.path, browser.shown.status) == ("/", 500)
    await postgres.execute("ALTER TABLE postroom.away RENAME TO minute_counts")
    await postgres.close()
    page = await browser.open("/")
    assert (page.status, page.text.count('<th scope="row">')) == (200, 60)


async def test_the_overview_says_that_postgres_takes_no_writes_and_not_that_programs_are_away(
    office: Any, admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "_LOOK_SECONDS", 0.01)
    said = "Postgres is read-only, as a standby is: the broker cannot accept messages"
    postgres = await asyncpg.connect(office.database)
    await postgres.execute(
        "UPDATE postroom.programs SET reported_at = now() - interval '1 hour';"
        "ALTER DATABASE console SET default_transaction_read_only = on"
    )
    try:
        await postgres.execute(END_SESSIONS.format(name="console"))
        await until_so(lambda: _shows(admin, said))
        assert "no report since" not in admin.shown.text
    finally:
        await postgres.execute("ALTER DATABASE console RESET ALL")
        await postgres.close()
    await until_so(lambda: _shows(admin, said, shown=False))


async def _shows(browser: Any, text: str, *, shown: bool = True) -> bool:
    page = await browser.open("/")
    return page.status == 200 and (text in page.text) == shown


async def test_a_token_that_is_revoked_shows_nothing_while_others_look(office: Any, admin: Any) -> None:
    eve = await office.logged_in("eve")
    async with BrokerClient(office.broker_url, office.tokens["administrator"]) as client:
        await client.revoke_operator(f"eve-{office.mesh}")
    async with eve.session.get(f"{eve.url}/live") as stream:
        assert b'{"trouble":"the token is not valid' in await stream.read()  # and ends
    assert (await admin.open("/")).path == "/"
    assert (await eve.open("/")).path == "/login"
    assert (await admin.open("/")).path == "/"


async def test_a_page_that_is_closed_as_it_asks_for_the_stream_is_no_error(admin: Any) -> None:
    url = URL(admin.url)
    cookies = admin.session.cookie_jar.filter_cookies(url)
    lines = [
        f"GET /live HTTP/1.1\r\nHost: {url.authority}",
        *(f"Cookie: {one.OutputString()}" for one in cookies.values()),
    ]
    with capture_logs() as logged:
        with socket.create_connection((url.host, url.port)) as browser:
            browser.sendall(("\r\n".join(lines) + "\r\n\r\n").encode())
        assert (await admin.open("/")).path == "/"
    assert logged == []


async def test_whoever_may_not_look_everywhere_begins_at_the_messages(office: Any) -> None:
    ada = await office.logged_in("ada")
    assert ada.shown.path == "/messages"
    assert (await ada.open("/live")).status == 403


async def test_an_error_that_nobody_foresaw_is_a_page_and_in_the_log(
    admin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(BrokerClient, "list_things", fail)
    with capture_logs() as logged:
        page = await admin.open("/programs")
    assert (page.status, page.headers["Content-Type"]) == (500, "text/html; charset=utf-8")
    assert "internal error: see the log" in page.text
    assert [(line["event"], line["path"]) for line in logged] == [("unforeseen_error", "/programs")]
