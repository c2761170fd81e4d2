"""Logging in and out, and who is let through: the cookie, the forms' key, the origin, the headers of every answer."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import asyncpg
import pytest
from support.waiting import until_so

from console.app import ROUTES, STATIC
from console.sessions import MOST_ATTEMPTS, ROLES

FORBIDDING = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "X-Frame-Options": "DENY",
    "Cache-Control": "no-store",
}


def reads() -> list[str]:
    """The pages, of a thing that is not there."""
    return [route.path.format(id="nothing", mesh="nothing", name="x") for route in ROUTES if route.method == "GET"]


async def test_whoever_has_a_token_logs_in_and_comes_to_the_page_that_was_asked_for(office: Any) -> None:
    browser = office.browse()
    page = await browser.open("/messages?sender=alice")
    assert (page.status, page.path) == (200, "/login?next=/messages?sender%3Dalice")

    page = await browser.submit(page.path, token=f"  {office.tokens['administrator']}\n")
    assert (page.status, page.path) == (200, "/messages?sender=alice")
    assert "administrator" in page.text

    page = await browser.submit("/logout")
    assert page.path == "/login"
    assert (await browser.open("/messages", follow=False)).status == 303


async def test_the_cookie_is_for_this_browser_and_this_site_alone(office: Any) -> None:
    browser = office.browse()
    before = (await browser.open("/login")).headers["Set-Cookie"]
    page = await browser.submit("/login", token=office.tokens["ada"], follow=False)
    given = page.headers["Set-Cookie"]

    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(given.split("; "))
    assert "Secure" not in given
    assert given.partition(";")[0] != before.partition(";")[0]  # nobody can have planted it
    assert office.tokens["ada"] not in given


@pytest.mark.parametrize("settings", [{"public_url": "https://console.example.com"}])
async def test_over_tls_the_cookie_is_for_tls_alone_and_forms_come_from_the_public_address(office: Any) -> None:
    browser = office.browse()
    page = await browser.open("/login")
    cookie = page.headers["Set-Cookie"].partition(";")[0]
    assert "Secure" in page.headers["Set-Cookie"].split("; ")
    browser.session.headers["Cookie"] = cookie  # which a proxy passes on

    shown = browser.shown
    assert (await browser.submit("/login", token=office.tokens["ada"])).status == 403
    browser.shown = shown
    page = await browser.submit(
        "/login", token=office.tokens["ada"], origin="https://console.example.com", follow=False
    )
    assert page.status == 303


@pytest.mark.parametrize("token", ["nonsense", "", "ä" * 30, "x" * 5000])
async def test_a_token_that_is_nobodys_is_refused_and_not_repeated(office: Any, token: str) -> None:
    page = await office.browse().log_in(token)

    assert page.status in (400, 401)
    assert not token or token not in page.text
    assert 'role="alert"' in page.text


async def test_after_ten_wrong_tokens_nobody_logs_in_from_there_for_a_minute(
    office: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = office.browse()
    for _ in range(MOST_ATTEMPTS):
        assert (await browser.log_in("nonsense")).status == 401
    page = await browser.log_in(office.tokens["ada"])
    assert (page.status, page.headers["Retry-After"]) == (429, "60")

    later = office.sessions._monotonic() + 61
    monkeypatch.setattr(office.sessions, "_monotonic", lambda: later)
    assert (await browser.log_in(office.tokens["ada"])).path == "/messages"


@pytest.mark.parametrize("settings", [{"broker_url": "http://127.0.0.1:1"}])
async def test_an_attempt_that_the_broker_does_not_answer_is_no_wrong_token(office: Any) -> None:
    await asyncio.gather(*(office.browse().log_in(office.tokens["ada"]) for _ in range(MOST_ATTEMPTS)))

    page = await office.browse().log_in(office.tokens["ada"])
    assert (page.status, "too many attempts" in page.text) == (503, False)


@pytest.mark.parametrize("seconds", [3601, 8 * 3600 + 1])
async def test_a_session_ends_when_it_is_not_used_and_when_its_time_is_over(
    office: Any, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    browser = await office.logged_in()
    begun = office.sessions._monotonic()
    for moment in range(0, seconds - 1, 3000 if seconds > 3601 else seconds):
        monkeypatch.setattr(office.sessions, "_monotonic", lambda moment=moment: begun + moment)
        assert (await browser.open("/messages")).path == "/messages"
    monkeypatch.setattr(office.sessions, "_monotonic", lambda: begun + seconds)
    assert (await browser.open("/messages")).path.startswith("/login")


async def test_a_form_whose_session_has_ended_leads_back_to_its_page(
    office: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = await office.logged_in()
    await browser.open(f"/dead_letters?mesh={office.mesh}")
    begun = office.sessions._monotonic()
    monkeypatch.setattr(office.sessions, "_monotonic", lambda: begun + 3601)
    page = await browser.submit("/repairs", noun="/v1/dead_letters", verb="drop", all="yes", mesh=office.mesh)
    page = await browser.submit(page.path, token=office.tokens["administrator"])
    assert page.path == f"/dead_letters?mesh={office.mesh}"


async def test_whose_token_the_broker_has_forgotten_has_to_log_in_again(office: Any) -> None:
    browser, admin = await office.logged_in("ada"), office.browse()
    headers = {"Authorization": f"Bearer {office.tokens['administrator']}"}
    path = f"{office.broker_url}/v1/members/{office.mesh}/ada"
    async with admin.session.delete(path, headers=headers) as answer:
        assert answer.status == 204
    while (await browser.open("/messages")).path == "/messages":
        pass  # the broker remembers a token for a second
    assert browser.shown.path.startswith("/login")
    assert (await browser.open("/messages", follow=False)).status == 303


async def test_a_page_that_loads_while_another_one_logs_out_leads_to_the_log_in(office: Any, admin: Any) -> None:
    postgres = await asyncpg.connect(office.database)
    waiting = "SELECT FROM pg_locks WHERE relation = 'mesh.mesh'::regclass AND NOT granted"
    try:
        async with postgres.transaction():
            await postgres.execute("LOCK TABLE mesh.mesh")
            loading = asyncio.create_task(admin.open("/messages", follow=False))
            await until_so(partial(postgres.fetch, waiting), "the page waits for the broker")
            await admin.submit("/logout", follow=False)
    finally:
        await postgres.close()
    page = await loading
    assert (page.status, page.headers.get("Location")) == (303, "/login?next=/messages")


@pytest.mark.parametrize("elsewhere", ["//evil.example", "/\\evil.example", "https://evil.example", "evil"])
async def test_the_log_in_leads_to_no_other_site(office: Any, elsewhere: str) -> None:
    browser = office.browse()
    await browser.open("/login")
    page = await browser.submit(f"/login?next={elsewhere}", token=office.tokens["ada"], follow=False)
    assert page.headers["Location"] == "/"


async def test_every_page_but_the_log_in_needs_a_session(office: Any) -> None:
    browser = office.browse()
    for route in ROUTES:
        if route.method == "GET" and route.access != "anyone":
            page = await browser.open(route.path.format(id="x", mesh="x", name="x"), follow=False)
            assert (page.status, page.headers["Location"].partition("?")[0]) == (303, "/login"), route.path
        assert route.access.removesuffix(" everywhere") in ("anyone", *ROLES)
        assert route.method != "POST" or route.access in ("repair", "administer") or route.path in ("/login", "/logout")


async def test_every_form_needs_its_key_and_its_origin(admin: Any) -> None:
    await admin.open("/messages")
    key = admin.shown.hidden["form_key"]
    for route in ROUTES:
        if route.method != "POST":
            continue
        path = route.path.format(id="x", mesh="x", name="x")
        for origin, given, code in (
            (admin.url, "", "stale_form"),
            (admin.url, "0" * 64, "stale_form"),
            ("https://evil.example", key, "foreign_form"),
            ("null", key, "foreign_form"),
            ("", key, "foreign_form"),
        ):
            page = await admin.submit(path, form_key=given, origin=origin)
            assert (page.status, code in page.text) == (403, True), (path, origin, given)
    assert (await admin.open("/messages")).path == "/messages"  # it did not even log out


@pytest.mark.parametrize(
    ("media", "form"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=a", b"--a\r\nContent-Disposition: form-data; name=token\r\n\r\nabc"),
        ("application/x-www-form-urlencoded; charset=nonsense", b"token=a"),
        ("application/x-www-form-urlencoded", b"token=\xff\xfe"),
        ("application/json", b"{}"),
    ],
)
async def test_a_form_that_no_page_sends_is_refused(admin: Any, media: str, form: bytes) -> None:
    for path in ("/login", "/repairs", "/logout"):
        headers = {"Origin": admin.url, "Content-Type": media}
        async with admin.session.post(f"{admin.url}{path}", data=form, headers=headers) as answer:
            assert answer.status in {400, 415}, path
            assert "form" in await answer.text()


async def test_every_answer_forbids_browsers_what_no_page_needs(admin: Any) -> None:
    paths = [*(path for path in reads() if path != "/live"), "/nothing", "/messages?since=soon", "/static/nothing"]
    for path in paths:
        page = await admin.open(path, follow=False)
        policy = dict(rule.split(" ", 1) for rule in page.headers["Content-Security-Policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            **dict.fromkeys(("style-src", "script-src", "img-src", "connect-src", "form-action"), "'self'"),
            "base-uri": "'none'",
            "frame-ancestors": "'none'",
        }, path
        assert {name: page.headers[name] for name in FORBIDDING} == FORBIDDING, path
        assert "style=" not in page.text
        assert "<style" not in page.text
        assert " on" not in "".join(part.partition(">")[0] for part in page.text.split("<script")[1:])


async def test_every_page_answers_a_head_without_a_body(office: Any, admin: Any) -> None:
    async def statuses(browser: Any, path: str) -> tuple[int, int]:
        async with browser.session.head(f"{browser.url}{path}", allow_redirects=False) as head:
            assert await head.read() == b""
            if path == "/live":
                return head.status, head.status
            page = await browser.open(path, follow=False)
            assert head.headers.get("Location") == page.headers.get("Location")
            return head.status, page.status

    stranger = office.browse()
    for path in reads():
        for browser in (admin, stranger):
            head, page = await statuses(browser, path)
            assert head == page, path


async def test_what_is_static_is_kept_under_its_version(admin: Any) -> None:
    for name in STATIC:
        async with admin.session.get(f"{admin.url}/static/{name}") as answer:
            assert (answer.status, await answer.read()) == (200, STATIC[name])
            assert "immutable" in answer.headers["Cache-Control"]


async def test_what_is_not_there_is_said_on_a_page(admin: Any) -> None:
    page = await admin.open("/nothing")
    assert (page.status, "<h1>That did not work</h1>" in page.text) == (404, True)
    assert "there is no page /nothing" in page.text
    page = await admin.submit("/messages")
    assert (page.status, "<h1>" in page.text) == (405, True)
