"""The sender's retry policy at the consumer core, against a real JetStream."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from support.jetstream import QUICK, Context, Script

from postroom.claims import DONE, Outcome
from postroom.delivery.consumer import Attempts
from postroom.delivery.message import Delivery
from postroom.delivery.settings import BackoffSettings

AN_HOUR = BackoffSettings(first_seconds=3600, most_seconds=3600)


def attempts(most: int) -> Callable[[Delivery], Outcome]:
    """Return what a handler says that fails each attempt, of `most` that its operator allows."""
    limits = Attempts(most, AN_HOUR.schedule)
    return lambda delivery: limits.failed(delivery, delivery.attempt, "the database is away")


def body(**policy: int) -> bytes:
    return msgspec.json.encode({"message": {"to": "topic:orders", "meta": {"retry_policy": policy}}})


async def test_the_senders_policy_is_followed_instead_of_the_schedule(context: Context) -> None:
    await context.publish(["a"], body(max_attempts=3, backoff_ms=1))
    script = Script(attempts(20))
    async with context.consuming(script):
        await script.saw(3)
        await context.settled()
    (letter,) = await context.letters()
    assert [delivery.attempt for delivery in script.seen] == [1, 2, 3]
    assert (letter.reason, letter.attempts, letter.last_error) == ("max_deliver", 3, "the database is away")
    assert letter.data() == body(max_attempts=3, backoff_ms=1)


async def test_the_policy_cannot_raise_what_the_consumer_allows(context: Context) -> None:
    await context.publish(["a"], body(max_attempts=100, backoff_ms=1))
    script = Script(attempts(2))
    async with context.consuming(script):
        await script.saw(2)
        await context.settled()
    (letter,) = await context.letters()
    assert letter.attempts == 2


async def test_a_policy_that_none_can_follow_leaves_the_schedule(context: Context) -> None:
    await context.publish(["a"], b'{"retry_policy": {"max_attempts": "many"}}')
    often = Attempts(20, QUICK.schedule)
    script = Script(
        lambda delivery: DONE if delivery.attempt == 3 else often.failed(delivery, delivery.attempt, "not now")
    )
    async with context.consuming(script):
        await script.saw(3)
        await context.settled()
    assert await context.letters() == []


async def test_attempts_survive_the_consumers_restart(context: Context) -> None:
    await context.publish(["a"], body(max_attempts=2, backoff_ms=1))
    first, second = Script(attempts(20)), Script(attempts(20))
    async with context.consuming(first) as consumer:
        await first.saw(1)
        await consumer.stop()
    async with context.consuming(second):
        await context.settled()
    (letter,) = await context.letters()
    assert (letter.attempts, len(first.seen) + len(second.seen)) == (2, 2)
