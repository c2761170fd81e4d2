"""Webhooks of a topic at the broker: who may have which, and what of them is ever shown."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from broker.administration import MOST_PER_TOPIC
from postroom.delivery.settings import AddressSettings

PATH = "/v1/topics/demo/orders/webhooks"
URL = "http://127.0.0.1:9/hook"


@pytest.fixture
def config(config: Any) -> Any:
    """A broker that allows one network of loopback."""
    return msgspec.structs.replace(config, webhooks=AddressSettings(allow_networks=["127.0.0.0/24"]))


async def test_a_webhook_comes_and_goes_and_its_secret_is_shown_once(broker: Any, postgres: Any) -> None:
    ada = broker.member("ada")
    made = await ada.post(PATH, {"url": URL})

    assert (made.status, made.body["mesh"], made.body["topic"], made.body["url"]) == (201, "demo", "orders", URL)
    assert made.body["secret"] == await postgres.fetchval("SELECT secret FROM mesh.webhook")
    assert len(made.body["secret"]) > 40
    shown = {name: made.body[name] for name in ("id", "mesh", "topic", "url", "created_at")}
    assert (await ada.get(PATH)).body == {"webhooks": [shown]}
    assert (await broker.admin.delete(f"{PATH}/{made.body['id']}")).status == 204
    assert (await ada.get(PATH)).body == {"webhooks": []}


async def test_an_admin_of_another_mesh_neither_sees_nor_deletes_a_webhook(broker: Any) -> None:
    await broker.add_mesh("other", {"oscar": "admin"})
    made = await broker.member("ada").post(PATH, {"url": URL})
    oscar = broker.member("oscar", "other")
    crossings = [
        await oscar.post(PATH, {"url": URL}),
        await oscar.get(PATH),
        await oscar.delete(f"{PATH}/{made.body['id']}"),
    ]

    assert {(answer.status, answer.code) for answer in crossings} == {(403, "other_mesh")}
    by_its_own_topic = await oscar.delete(f"/v1/topics/other/orders/webhooks/{made.body['id']}")
    assert (by_its_own_topic.status, by_its_own_topic.code) == (404, "webhook_not_found")
    assert len((await broker.member("ada").get(PATH)).body["webhooks"]) == 1


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.1.1/",
        "http://10.0.0.1/",
        "http://169.254.169.254/latest/meta-data",
        "http://[::1]/",
        "http://[fe80::1]/",
        "http://[fd00::1]/",
        "http://[::ffff:10.0.0.1]/",
        "http://224.0.0.1/",
        "http://user:password@127.0.0.1/",
        "http://127.0.0.1/#part",
        "http://nowhere.invalid/",
    ],
)
async def test_an_address_that_no_webhook_may_have_is_refused(broker: Any, url: str) -> None:
    answer = await broker.member("ada").post(PATH, {"url": url})
    assert (answer.status, answer.code, answer.body["field"]) == (400, "invalid_webhook", "url")
    assert "password" not in str(answer.body)


@pytest.mark.parametrize("body", [{}, {"url": "ftp://x/"}, {"url": "http://x y/"}, {"url": "http://" + "x" * 2042},
                                  {"url": URL, "secret": "mine"}])  # fmt: skip
async def test_what_is_no_webhook_is_refused(broker: Any, body: dict[str, str]) -> None:
    answer = await broker.member("ada").post(PATH, body)
    assert (answer.status, answer.code) == (400, "invalid_request")


async def test_what_is_not_there_has_no_webhooks(broker: Any) -> None:
    ada = broker.member("ada")
    missing = "/v1/topics/demo/nothing/webhooks"
    topics = [await ada.post(missing, {"url": URL}), await ada.get(missing)]
    assert {(answer.status, answer.code) for answer in topics} == {(404, "topic_not_found")}
    for key in ("x", "00000000-0000-0000-0000-000000000000", "%00"):
        assert (await ada.delete(f"{PATH}/{key}")).code == "webhook_not_found"


async def test_a_topic_has_so_many_webhooks_and_takes_them_along(broker: Any, postgres: Any) -> None:
    ada = broker.member("ada")
    for _ in range(MOST_PER_TOPIC):
        assert (await ada.post(PATH, {"url": URL})).status == 201
    one_more = await ada.post(PATH, {"url": URL})

    assert (one_more.status, one_more.code) == (409, "too_many_webhooks")
    assert (await ada.delete("/v1/topics/demo/orders")).status == 204
    assert await postgres.fetchval("SELECT count(*) FROM mesh.webhook") == 0


async def test_sixty_registrations_at_once_make_as_many_webhooks_as_a_topic_may_have(
    broker: Any, start_broker: Any, postgres: Any
) -> None:
    async with AsyncExitStack() as stack:
        brokers = [broker, *[await stack.enter_async_context(start_broker(broker.services.config)) for _ in range(3)]]
        callers = [who.at(each.url) for each in brokers for who in (broker.member("ada"), broker.admin)]
        answers = await asyncio.gather(*(callers[n % len(callers)].post(PATH, {"url": URL}) for n in range(60)))

    assert Counter(answer.status for answer in answers) == {201: MOST_PER_TOPIC, 409: 60 - MOST_PER_TOPIC}
    assert await postgres.fetchval("SELECT count(*) FROM mesh.webhook") == MOST_PER_TOPIC


async def test_a_topic_that_is_deleted_while_a_webhook_is_registered_is_not_there(
    broker: Any, postgres: Any, waiting_for_lock: Any
) -> None:
    async with postgres.transaction():
        await postgres.execute("DELETE FROM mesh.topic")
        registration = asyncio.create_task(broker.admin.post(PATH, {"url": URL}))
        await waiting_for_lock(1)
    answer = await registration
    assert (answer.status, answer.code) == (404, "topic_not_found")
