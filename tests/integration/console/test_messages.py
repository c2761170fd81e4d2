"""Finding messages, and the story of one, with its body for those who may read it, as text."""

from __future__ import annotations

import html
import re
from typing import Any

import msgspec
import pytest

from console.messages import MOST_TEXT
from postroom._wire.message import prepare

BODIES = {
    "script": "<script>alert(1)</script>",
    "svg": '<svg onload="alert(1)"><desc>"\'><img src=x onerror=alert(1)>',
    "template": "{{ 7 * 7 }}{% raw %}${7*7}",
    "long": "x" * 100_000,
    "deep": "[" * 2000 + "]" * 2000,
}


def message(name: str, to: str = "topic:orders", **fields: Any) -> dict[str, Any]:
    """An item of a batch, as the daemon posts it."""
    prepared = prepare(msgspec.json.encode({"to": to, "body": "hello", **fields}), idempotency_key=name)
    return {
        "client_message_id": name,
        "request_fingerprint": prepared.fingerprint.hex(),
        "message": msgspec.json.decode(prepared.payload),
    }


async def test_messages_are_listed_and_found_by_sender_and_destination(office: Any, admin: Any) -> None:
    await office.send(message("one"), message("two", "dm:bob"))
    await office.send(message("three", "dm:alice"), sender="bob")

    page = await admin.open(f"/messages?mesh={office.mesh}")
    places = [page.text.index(f'href="/trace/{name}"') for name in ("three", "two", "one")]
    assert places == sorted(places)
    page = await admin.open(f"/messages?mesh={office.mesh}&sender=alice&destination=dm:bob&since=&until=")
    assert ["/trace/two" in page.text, "/trace/one" in page.text] == [True, False]
    assert 'value="dm:bob"' in page.text
    assert (await admin.open("/messages?since=soon")).status == 400


async def test_a_long_list_comes_page_by_page(office: Any, admin: Any) -> None:
    await office.send(*(message(f"id-{number:03}") for number in range(120)))

    page = await admin.open(f"/messages?mesh={office.mesh}")
    seen = []
    while True:
        assert len(page.text) < 100_000
        seen.append(page.text.count('href="/trace/id-'))
        if 'rel="next"' not in page.text:
            break
        page = await admin.open(html.unescape(page.text.split('rel="next" href="')[1].split('"')[0]))
    assert seen == [50, 50, 20]


async def test_the_story_says_what_happened_and_where_it_waits(office: Any, admin: Any) -> None:
    await office.send(message("order-42", body='{"total": 42}'))

    page = await admin.open("/find?id=+order-42+")
    assert page.path == "/trace/order-42"
    assert "it waits for a worker to publish it" in page.text
    assert "<code>postroom worker backlog</code>" in page.text
    assert "from alice" in page.text
    assert "&#34;total&#34;: 42" in page.text
    assert (await admin.open("/find?id=")).path == "/messages"


@pytest.mark.parametrize("id_", [".", "..", "~a.b:c-d"])
async def test_a_story_is_reached_by_any_id_that_a_message_may_have(office: Any, admin: Any, id_: str) -> None:
    await office.send(message(id_, body="odd"))
    listed = await admin.open(f"/messages?mesh={office.mesh}")
    (link,) = re.findall(rf'href="([^"]+)">{re.escape(id_)}</a>', listed.text)
    for path in (html.unescape(link), f"/find?id={id_}"):
        page = await admin.open(path)
        assert (page.status, "from alice" in page.text, "odd" in page.text) == (200, True, True), path


async def test_an_id_of_nothing_is_said_to_be_unknown(admin: Any) -> None:
    page = await admin.open("/trace/a%2F%3Cb%3E")
    assert (page.status, "&lt;b&gt;" in page.text) == (404, True)


async def test_a_member_sees_its_own_mesh_and_no_more_of_a_message_than_it_may_read(office: Any) -> None:
    await office.send(message("secret", "dm:ada", body="for ada alone"))
    await office.send(message("open", body="for all"))

    bob = await office.logged_in("bob")
    page = await bob.open("/messages")
    assert ["/trace/open" in page.text, "/trace/secret" in page.text] == [True, False]
    assert (await bob.open("/trace/secret")).status == 404
    assert "for all" in (await bob.open("/trace/open")).text
    assert (await bob.open("/messages?mesh=another")).status == 200
    ada = await office.logged_in("ada")
    assert "for ada alone" in (await ada.open("/trace/secret")).text


@pytest.mark.parametrize("kind", BODIES)
async def test_a_body_is_text_whatever_is_in_it(office: Any, admin: Any, kind: str) -> None:
    (answer,) = await office.send(message(kind, body=BODIES[kind]))

    page = await admin.open(f"/trace/{kind}")
    assert len(page.text) < 100_000
    assert html.escape(BODIES[kind]).replace("&#x27;", "&#39;").replace("&quot;", "&#34;")[:MOST_TEXT] in page.text
    assert page.text.count("<script") == 1  # ours
    assert "<img src=x" not in page.text

    file = await admin.open(f"/messages/{answer['broker_message_id']}/body")
    assert file.text == BODIES[kind]
    assert file.headers["Content-Type"] == "application/octet-stream"
    assert file.headers["Content-Disposition"].startswith("attachment")


async def test_a_body_that_is_no_text_is_a_file(office: Any, admin: Any) -> None:
    (answer,) = await office.send(message("bytes", body=None, body_base64="AP8="))

    assert "The body is not text." in (await admin.open("/trace/bytes")).text
    async with admin.session.get(f"{admin.url}/messages/{answer['broker_message_id']}/body") as file:
        assert await file.read() == b"\x00\xff"


@pytest.mark.parametrize("settings", [{"broker_url": "http://127.0.0.1:1"}])
async def test_where_the_broker_does_not_answer_the_page_says_so(office: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("console.sessions._PATIENCE", 0)
    page = await office.browse().log_in("a token of somebody")
    assert (page.status, "127.0.0.1:1" in page.text) == (503, True)
