"""The shop's tests: a fake daemon, and the requests that a consumer would make."""

import json
import os
from collections.abc import Iterator
from typing import Any

import django

os.environ |= {"DJANGO_SETTINGS_MODULE": "settings", "SHOP_DATABASE": ":memory:"}
django.setup()

import pytest
from django.conf import settings
from django.core.management import call_command
from django.test import Client
from shop import views
from shop.models import Order

from postroom import TryAgain
from postroom.testing import FakeClient, handler_request


@pytest.fixture
def post(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(views, "post", lambda: fake)
    return fake


@pytest.fixture
def web() -> Iterator[Client]:
    call_command("migrate", run_syncdb=True, verbosity=0)
    yield Client()
    Order.objects.all().delete()


def place(web: Client, **order: Any) -> Any:
    return web.post("/orders", json.dumps(order), content_type="application/json")


def test_an_order_is_handed_to_the_daemon_once(web: Client, post: FakeClient) -> None:
    assert place(web, number="17", total=42).json() == {"number": "17", "repeated": False}
    assert place(web, number="17", total=42).json() == {"number": "17", "repeated": True}
    assert place(web, number="17", total=43).status_code == 409
    assert [(sent.to, sent.json()) for sent in post.sent] == [("queue:orders", {"number": "17", "total": 42})]


def test_an_order_that_no_message_can_be_is_refused(web: Client, post: FakeClient) -> None:
    assert place(web, number="no id", total=42).status_code == 400
    assert post.sent == []


def test_a_full_outbox_is_not_hidden(web: Client, post: FakeClient) -> None:
    with post.daemon.failing(TryAgain.of("outbox_full", "the outbox is full")), pytest.raises(TryAgain):
        place(web, number="17", total=42)


def test_what_was_sent_is_stored_once_however_often_it_is_posted(web: Client, post: FakeClient) -> None:
    place(web, number="17", total=42)
    request = handler_request(post.sent[0], secret=settings.POSTROOM_SECRET)
    headers = {name: value for name, value in request.headers.items() if name != "Content-Type"}
    answers = [web.post("/handle", request.body, "application/json", headers=headers) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 409]
    assert list(Order.objects.values_list("number", "total")) == [("17", 42)]


def test_what_nobody_signed_is_refused(web: Client, post: FakeClient) -> None:
    place(web, number="17", total=42)
    for secret in (None, b"another secret"):
        request = handler_request(post.sent[0], secret=secret)
        assert web.post("/handle", request.body, "application/json", headers=request.headers).status_code == 401
    assert not Order.objects.exists()
