"""An HTTP handler's consumer and the messages that no client would write: each is answered for, and the rest go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.hostile import WAYS, Chunks, byte_writer, chunks, quiet_logs
from support.http_consumers import Inbox, settled
from support.jetstream import Context

GOOD = [f"good-{number}" for number in range(20)]


@pytest.fixture(params=WAYS)
def messages(request: pytest.FixtureRequest) -> Iterator[Chunks]:
    with quiet_logs():
        yield chunks(request.param, seed=3)


async def test_whatever_arrives_is_posted_or_buried(
    context: Context, nats_url: str, start: Callable[[], Any], inbox: Inbox, messages: Chunks
) -> None:
    async with start() as services, byte_writer(nats_url) as raw:
        for chunk in messages:
            await raw.publish(context.subject, chunk)
            await settled(context)
        await context.publish(GOOD)
        await settled(context)
        counters = services.consumer.counters
        assert services.reasons() == []
    last = (await context.js.stream_info(context.events)).state.last_seq
    print(f"{last} messages: {counters.done} done, {counters.dead_lettered} buried")  # noqa: T201
    assert counters.done + counters.dead_lettered == last
    letters = await context.letters()  # two that have the same id are one message, and have one letter
    twice = max(5, counters.dead_lettered // 100)
    assert counters.dead_lettered - twice <= len({letter.sequence for letter in letters}) == len(letters)
    assert await inbox.processed() > set(GOOD)
