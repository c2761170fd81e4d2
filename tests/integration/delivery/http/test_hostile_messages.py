"""An HTTP handler's consumer and the messages that no client would write: each is answered for, and the rest go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hostile import HostileMessage, byte_writer, odd_messages, quiet_logs, random_messages
from http_consumers import Inbox, settled
from jetstream import Context

GOOD = [f"good-{number}" for number in range(20)]


@pytest.fixture(params=[None, 3], ids=["odd", "random"])
def messages(request: pytest.FixtureRequest) -> Iterator[Iterator[HostileMessage]]:
    with quiet_logs():
        yield odd_messages() if request.param is None else random_messages(200, seed=request.param)


async def test_whatever_arrives_is_posted_or_buried(
    context: Context, nats_url: str, start: Callable[[], Any], inbox: Inbox, messages: Iterator[HostileMessage]
) -> None:
    async with start() as services, byte_writer(nats_url) as raw:
        await raw.publish(context.subject, messages)
        await context.publish(GOOD)
        await settled(context)
        counters = services.consumer.counters
        assert services.reasons() == []
    last = (await context.js.stream_info(context.events)).state.last_seq
    assert counters.done + counters.dead_lettered == last
    letters = await context.letters()  # one for each message: two that have the same id are one
    assert counters.dead_lettered - 5 <= len({letter.sequence for letter in letters}) == len(letters)
    assert await inbox.processed() > set(GOOD)
