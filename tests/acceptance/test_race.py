"""One id, many posts at once, half of them with other content: one message wins, everybody is told the truth."""

import asyncio
import random
from collections import defaultdict

import aiohttp
from support.mailroom import TOPIC

from postroom import AsyncClient

IDS = 200
POSTS = 32
AT_ONCE = 256


async def test_the_first_content_of_an_id_wins_and_reaches_the_broker_once(mailroom, accepted):
    posts = [(f"race-{number}", content) for number in range(IDS) for content in ["this", "that"] * (POSTS // 2)]
    random.Random(200).shuffle(posts)
    told: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    statuses: dict[str, list[int]] = defaultdict(list)
    free = asyncio.Semaphore(AT_ONCE)

    async def post(session: aiohttp.ClientSession, message_id: str, content: str) -> None:
        request = {"to": TOPIC, "body": content}
        async with (
            free,
            session.post("http://localhost/v1/send", json=request, headers={"Idempotency-Key": message_id}) as answer,
        ):
            told[message_id][answer.status].add(content)
            statuses[message_id].append(answer.status)

    connector = aiohttp.UnixConnector(str(mailroom.socket), limit=AT_ONCE)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(post(session, *one) for one in posts))
    async with AsyncClient(mailroom.socket) as client:
        for message_id in told:
            assert (await client.wait(message_id, 120)).status == "done"
    held = await accepted()
    assert len(held) == IDS
    for message_id, by_status in told.items():
        assert set(by_status) <= {200, 202, 409}
        winners = by_status[200] | by_status[202]
        assert len(winners) == 1
        assert by_status[409] == {"this", "that"} - winners
        assert statuses[message_id].count(409) == POSTS // 2
        assert held[message_id].decode() in winners
