"""Two instances, one id: exactly one accepts it (docs/contract/accept.md#accept-21)."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from support.databases import HOLD_NUMBERS

Message = Callable[..., dict[str, Any]]
Counts = Callable[[], Awaitable[dict[str, int]]]

IDS = 500
POSTS = 32
PARALLEL = 8  # batches in flight at each instance
SECONDS = 20.0  # a bound for what happens at once


async def test_500_ids_posted_32_times_at_two_instances_are_accepted_once_each(
    broker: Any, message: Message, counts: Counts, start_broker: Any
) -> None:
    ids = [f"race-{number:03}" for number in range(IDS)]
    variants = {content: [message(client_id, body=content) for client_id in ids] for content in ("one", "other")}
    order = random.Random(47)
    batches = []
    for post in range(POSTS):
        batch = list(variants["one" if post % 2 else "other"])
        order.shuffle(batch)
        batches.append(batch)

    statuses: dict[str, Counter[int]] = {client_id: Counter() for client_id in ids}
    async with start_broker(broker.services.config) as other:
        callers = [broker.member("alice"), broker.member("alice").at(other.url)]

        async def drain(caller: Any) -> None:
            while batches:
                for answer in await caller.send(*batches.pop()):
                    statuses[answer.client_message_id][answer.status] += 1

        await asyncio.gather(*(drain(caller) for caller in callers * PARALLEL))

    assert {frozenset(seen) for seen in statuses.values()} == {frozenset({201, 200, 409})}
    assert all(seen[201] == 1 and seen[200] == POSTS / 2 - 1 and seen[409] == POSTS / 2 for seen in statuses.values())
    rows = await counts()
    assert (rows["client_message_dedupe"], rows["topic_message"], rows["outbox_events"]) == (IDS, IDS, IDS)


async def test_an_id_taken_between_look_up_and_write_is_looked_up_again(
    broker: Any, message: Message, postgres: Any, waiting_for_lock: Callable[[int], Awaitable[None]]
) -> None:
    """Both batches pass B0 and stand before the mesh's numbers; the second then finds its id taken."""
    async with postgres.transaction():
        await postgres.execute(HOLD_NUMBERS)
        posts = [
            asyncio.create_task(broker.member(sender).send_one(message("id-1", body=body)))
            for sender, body in (("alice", "one"), ("bob", "one"), ("ada", "two"))
        ]
        await waiting_for_lock(2)  # the third waits for its turn inside the broker

    answers = sorted(await asyncio.gather(*posts), key=lambda answer: answer.status)
    assert [answer.status for answer in answers] == [201, 409, 409]
    assert {answer.problem.conflict for answer in answers[1:]} == {"id_of_another_member"}
    assert not any(answers[0].broker_message_id.encode() in msgspec.json.encode(answer) for answer in answers[1:])


@pytest.mark.parametrize(
    ("to", "path", "answered"),
    [
        ("topic:orders", "/v1/topics/demo/orders", 204),
        ("topic:orders", "/v1/topics/demo/orders/subscriptions/alice", 204),
        ("dm:bob", "/v1/members/demo/bob", 204),
        ("queue:work", "/v1/queues/demo/work", 204),
        ("queue:work", "/v1/meshes/demo", 409),  # by then it holds a message
    ],
    ids=["topic", "subscription", "member", "queue", "mesh"],
)
async def test_what_a_batch_goes_to_cannot_vanish_under_it(
    broker: Any,
    message: Message,
    postgres: Any,
    waiting_for_lock: Callable[[int], Awaitable[None]],
    *,
    to: str,
    path: str,
    answered: int,
) -> None:
    taking = postgres.transaction()
    await taking.start()
    await postgres.execute(
        "INSERT INTO mesh.client_message_dedupe (mesh_id, client_message_id, sender_id, broker_message_id, history_id, "
        "request_fingerprint, destination_kind, destination_ref) "
        "SELECT id, 'id-1', 1, gen_random_uuid(), 1, sha256(''), 'topic', 'orders' FROM mesh.mesh"
    )
    post = asyncio.create_task(broker.member("alice").send_one(message("id-1", to)))
    await waiting_for_lock(1)  # it holds what it goes to, and waits for its id
    deletion = asyncio.create_task(broker.admin.delete(path))
    async with asyncio.timeout(SECONDS):
        await waiting_for_lock(2)
    await taking.rollback()

    assert ((await post).status, (await deletion).status) == (201, answered)


async def test_a_member_revoked_under_way_writes_nothing(
    broker: Any, message: Message, postgres: Any, counts: Counts, waiting_for_lock: Callable[[int], Awaitable[None]]
) -> None:
    """The token passed the door and its member is revoked before the transaction: the transaction looks again."""
    async with postgres.transaction():
        await postgres.execute("UPDATE mesh.member SET revoked_at = now(), token_sha256 = NULL WHERE name = 'alice'")
        post = asyncio.create_task(broker.member("alice").post("/v1/accept", {"messages": [message("id-1")]}))
        await waiting_for_lock(1)

    assert (await post).status == 401
    assert not any((await counts()).values())
