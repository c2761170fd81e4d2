"""The consumer core against a real JetStream: what each outcome does, and what may never happen."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import pytest
from support.jetstream import QUICK, Context, Script, running
from support.waiting import until_so

from postroom._wire.dead_letters import DeadLetter
from postroom.claims import DONE, Dead, Done, Later, Outcome
from postroom.delivery.consumer import Attempts
from postroom.delivery.dead_letters import StreamLetters
from postroom.delivery.message import Delivery
from postroom.delivery.pull import Pull
from postroom.delivery.settings import BackoffSettings, StreamSettings

POISON = Dead("unprocessable", "the total is negative")
NOT_NOW = Later("the database is away", 0.01)


def attempts(most: int) -> Callable[[Delivery], Outcome]:
    """Return what a handler says that fails each of `most` attempts, which it counts by deliveries."""
    limits = Attempts(most, QUICK.schedule)
    return lambda delivery: limits.failed(delivery, delivery.attempt, "the database is away")


def raises(_: Delivery) -> Done:
    raise OSError("no such host")


async def test_a_done_message_is_gone_for_good(context: Context):
    await context.publish(["a"])
    script = Script()
    async with context.consuming(script) as consumer:
        await context.settled()
    assert script.ids() == ["a"]
    assert await context.letters() == []
    assert (consumer.counters.delivered, consumer.counters.done, consumer.in_hand) == (1, 1, 0)
    assert sum(consumer.took.counts) == 1


async def test_a_retry_comes_again_and_is_counted(context: Context):
    await context.publish(["a"])
    script = Script(lambda delivery: DONE if delivery.attempt == 3 else NOT_NOW)
    async with context.consuming(script) as consumer:
        await script.saw(3)
        await context.settled()
    assert [delivery.attempt for delivery in script.seen] == [1, 2, 3]
    assert (consumer.counters.retried, consumer.counters.redelivered, consumer.counters.done) == (2, 2, 1)


async def test_a_handler_that_counts_attempts_has_the_last_dead_lettered_and_none_just_stops(context: Context):
    await context.publish(["a"])
    script = Script(attempts(3))
    async with context.consuming(script) as consumer:
        await script.saw(3)
        await context.settled()
    (letter,) = await context.letters()
    assert (letter.reason, letter.attempts, letter.last_error) == ("max_deliver", 3, "the database is away")
    assert (consumer.counters.retried, consumer.counters.dead_lettered) == (2, 1)


async def test_a_dead_message_is_dead_lettered_at_once(context: Context):
    await context.publish(["a"], b'{"total":-1}')
    script = Script(lambda _: POISON)
    async with context.consuming(script):
        await script.saw(1)
        await context.settled()
    (letter,) = await context.letters()
    assert (letter.message_id, letter.reason, letter.attempts) == ("a", "unprocessable", 1)
    assert letter.data() == b'{"total":-1}'
    assert len(script.seen) == 1


async def test_a_message_on_which_the_handler_raises_comes_again_however_often(context: Context):
    await context.publish(["a"])
    script = Script(lambda delivery: DONE if delivery.attempt > 25 else raises(delivery))
    async with context.consuming(script, max_deliver=2) as consumer:
        await script.saw(26)
        await context.settled()
    assert await context.letters() == []
    assert (consumer.counters.retried, consumer.counters.done) == (25, 1)


class Silent(Script):
    """A handler that returns without a word."""

    async def handle(self, batch, settle):
        del settle
        self.seen.extend(batch)


async def test_a_message_that_the_handler_says_nothing_about_comes_again(context: Context):
    await context.publish(["a"])
    async with context.consuming(Silent()) as consumer:
        await until_so(lambda: _is(lambda: consumer.counters.retried > 1), "further deliveries")
    assert await context.letters() == []


async def test_a_second_word_about_one_message_is_not_heard(context: Context):
    await context.publish(["a"])

    class Twice(Script):
        async def handle(self, batch, settle):
            for delivery in batch:
                await settle(delivery, DONE)
                await settle(delivery, POISON)

    async with context.consuming(Twice()):
        await context.settled()
    assert await context.letters() == []


async def test_the_handler_decides_how_long_a_message_waits(context: Context):
    await context.publish(["a"])
    script = Script(lambda delivery: DONE if delivery.attempt > 1 else Later("soon", 0.01))
    an_hour = BackoffSettings(first_seconds=3600, most_seconds=3600)
    async with context.consuming(script, backoff=an_hour):
        await script.saw(2)
        await context.settled()


async def test_a_message_that_waits_for_its_next_attempt_does_not_hold_up_others(context: Context):
    ids = [str(number) for number in range(200)]
    await context.publish(ids)
    script = Script(lambda delivery: Later("later", 3600) if int(delivery.message_id or "") % 2 else DONE)
    async with context.consuming(script, max_ack_pending=5, batch=5) as consumer:
        await script.saw(200)
        await until_so(lambda: _is(lambda: consumer.counters.done == 100), "the others")
        await until_so(lambda: _pending(context, 100), "only those that wait are pending")
    assert sorted(script.ids()) == sorted(ids)


async def test_no_more_is_in_hand_than_max_ack_pending(context: Context):
    await context.publish(str(number) for number in range(60))
    gate, most = asyncio.Event(), 0

    async def wait(_: Delivery) -> Done:
        nonlocal most
        most = max(most, consumer.in_hand)
        await gate.wait()
        return DONE

    script = Script(wait)
    async with context.consuming(script, max_ack_pending=7, batch=2, batches_at_once=20) as consumer:
        await script.saw(7)
        assert consumer.in_hand == 7
        gate.set()
        await script.saw(60)
        await context.settled()
    assert most == 7


async def test_a_handler_slower_than_ack_wait_is_not_run_twice(context: Context):
    await context.publish(["slow", "other"])
    gate = asyncio.Event()

    async def wait(delivery: Delivery) -> Done:
        if delivery.message_id == "slow":
            await gate.wait()
        return DONE

    script = Script(wait)
    other = Script()
    async with context.consuming(script, ack_wait_seconds=0.3), context.consuming(other, ack_wait_seconds=0.3):
        await until_so(lambda: _is(lambda: "slow" in script.ids() + other.ids()), "it is being handled")
        if "slow" in other.ids():
            gate.set()
        await _ack_waits(context, 4)
        gate.set()
        await context.settled()
    assert sorted(script.ids() + other.ids()) == ["other", "slow"]


async def test_a_message_in_hand_that_comes_again_is_not_handed_over_again(context: Context):
    await context.publish(["a"])
    gate = asyncio.Event()

    async def wait(_: Delivery) -> Done:
        await gate.wait()
        return DONE

    script = Script(wait)
    async with context.consuming(script, ack_wait_seconds=0.4) as consumer:
        await script.saw(1)
        consumer._pull._doubt = True  # as after a silence: the server gets no word, and delivers it again
        look, consumer._pull._look = consumer._pull._look, _never
        await until_so(lambda: _delivered(context, 1), "the server gave up waiting")
        consumer._pull._look = look
        await until_so(lambda: _is(lambda: consumer.counters.redelivered >= 1), "the second delivery")
        gate.set()
        await context.settled()
    assert len(script.seen) == 1
    assert consumer.counters.done == 1


async def test_without_a_place_for_dead_letters_the_message_comes_again(context: Context):
    await context.publish(["a"])
    await context.js.delete_stream(context.dlq)
    taken = StreamSettings(name=f"{context.dlq}_2", subjects=[f"{context.name}.dlq.>"])
    await context.js.add_stream(name=taken.name, subjects=taken.subjects)
    script = Script(lambda _: POISON)
    async with context.consuming(script) as consumer:
        await until_so(lambda: _is(lambda: consumer.counters.retried >= 1), "another attempt")
        assert consumer.counters.dead_lettered == 0
        await context.js.delete_stream(taken.name)
        await until_so(lambda: _is(lambda: consumer.counters.dead_lettered == 1), "the dead letter")
    assert len(await context.letters()) == 1


async def test_a_message_too_large_for_a_dead_letter_has_one_without_its_payload(context: Context):
    bytes_that_grow = b"\xff" * (context.connection.max_payload - 1000)
    await context.publish(["a"], bytes_that_grow)
    async with context.consuming(Script(lambda _: POISON)):
        await context.settled()
    (letter,) = await context.letters()
    assert (letter.message_id, letter.has_payload, letter.payload_omitted) == ("a", False, True)


@pytest.mark.parametrize("copied", [False, True])
async def test_a_dead_letter_that_cannot_be_handled_has_no_letter_of_its_own(context: Context, *, copied: bool):
    """Seen before: one became seventeen in six seconds, each around the one before."""
    await context.publish(["a"])
    async with context.consuming(Script(lambda _: POISON)):
        await context.settled()
    stream, headers = context.dlq, {"Nats-Msg-Id": "raw"}
    if copied:
        stream, headers = context.events, {"Nats-Msg-Id": "raw", "Postroom-Event-Type": "MessageDeadLettered"}
        await context.publish([], b"")
    await context.js.publish(context.subject if copied else f"{context.name}.dlq.x.v1", b"{}", headers=headers)
    before = len(await context.stored(context.dlq))
    script = Script(lambda delivery: POISON if delivery.message_id == "raw" else attempts(2)(delivery))
    async with context.consuming(script, durable="reader", stream=stream) as reader:
        await context.settled("reader", stream)
    assert (
        len(await context.stored(context.dlq)) == before + copied
    )  # of the message beside the copy, in its own stream
    assert reader.counters.dead_lettered == copied


async def test_two_consumers_of_one_name_share_the_work(context: Context):
    ids = [str(number) for number in range(400)]
    await context.publish(ids)
    one, other = Script(_yield), Script(_yield)
    async with (
        context.consuming(one, max_ack_pending=10, batch=5),
        context.consuming(other, max_ack_pending=10, batch=5),
    ):
        await until_so(lambda: _is(lambda: len(one.seen) + len(other.seen) >= 400), "all of them")
        await context.settled()
    assert sorted(one.ids() + other.ids()) == sorted(ids)
    assert one.seen
    assert other.seen


async def test_a_stop_finishes_what_is_handled_and_hands_back_the_rest_at_once(context: Context):
    await context.publish(str(number) for number in range(20))
    gate = asyncio.Event()

    async def wait(_: Delivery) -> Done:
        await gate.wait()
        return DONE

    script = Script(wait)
    consumer = context.consumer(script, batch=3, batches_at_once=1, ack_wait_seconds=3600)
    task = asyncio.create_task(consumer.run())
    await script.saw(1)  # the first batch: it is what had arrived
    stopping = asyncio.create_task(consumer.stop())
    await until_so(lambda: _is(lambda: consumer.in_hand == len(script.seen)), "the rest is handed back")
    assert not stopping.done()
    gate.set()
    await stopping
    await task
    later = Script()
    async with context.consuming(later, ack_wait_seconds=3600):
        await later.saw(20 - len(script.seen))
        await context.settled()
    assert sorted(script.ids() + later.ids(), key=lambda word: int(word or "")) == [str(n) for n in range(20)]


async def test_a_stop_twice_and_before_the_start_is_harmless(context: Context):
    consumer = context.consumer(Script())
    await consumer.stop()
    await consumer.stop()
    async with running(context.consumer(Script())) as task:
        assert not task.done()


async def test_the_epoch_of_a_redrive_is_no_part_of_the_message_id(context: Context):
    await context.publish(["3f1c/2", "3f1c/3"])
    script = Script()
    async with context.consuming(script):
        await script.saw(2)
        await context.settled()
    assert script.ids() == ["3f1c", "3f1c"]


async def test_an_id_of_another_program_that_ends_like_an_epoch_stays_whole(context: Context):
    for message_id in ("order-9/1", "order-9/2"):  # its lines, say
        await context.js.publish(context.subject, b"{}", headers={"Nats-Msg-Id": message_id})
    script = Script()
    async with context.consuming(script):
        await script.saw(2)
        await context.settled()
    assert script.ids() == ["order-9/1", "order-9/2"]


async def test_without_a_message_id_the_brokers_id_in_the_body_is_it(context: Context):
    await context.js.publish(context.subject, b'{"broker_message_id":"01HZ"}')
    await context.js.publish(context.subject, b"no json")
    script = Script()
    async with context.consuming(script):
        await script.saw(2)
        await context.settled()
    assert script.ids() == ["01HZ", None]


async def test_a_thousand_poison_messages_among_ten_thousand_are_all_dead_lettered(context: Context):
    """Half of them at once, half after three attempts; the others are undisturbed."""
    count, poison, every = 10_000, 1_000, 10
    await context.publish(str(number) for number in range(count))

    fails_three_times = attempts(3)

    def judge(delivery: Delivery) -> Outcome:
        number = int(delivery.message_id or "")
        if number % every:
            return DONE
        return POISON if number % (2 * every) else fails_three_times(delivery)

    async with context.consuming(Script(judge), max_ack_pending=50) as consumer:
        await until_so(lambda: _is(lambda: consumer.counters.dead_lettered == poison), "every dead letter")
        await context.settled()
    letters = await context.letters()
    assert consumer.counters.done == count - poison
    assert sorted(int(letter.message_id or "") for letter in letters) == list(range(0, count, every))
    assert {(letter.reason, letter.attempts) for letter in letters} == {("unprocessable", 1), ("max_deliver", 3)}


async def test_a_dead_letter_that_was_published_before_a_crash_is_not_published_again(context: Context):
    await context.publish(["a"])

    class Crashing(StreamLetters):
        """Publishes for real, and then is gone."""

        async def keep(self, letter: DeadLetter) -> None:
            await super().keep(letter)
            raise asyncio.CancelledError

    consumer = context.consumer(
        Script(lambda _: POISON), dead_letters=Crashing(context.js, context.name), ack_wait_seconds=0.2
    )
    task = asyncio.create_task(consumer.run())
    await until_so(lambda: _is_buried(context), "the dead letter")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await consumer._pull.stop()
    script = Script(lambda _: POISON)
    async with context.consuming(script, ack_wait_seconds=0.2):
        await script.saw(1)
        await context.settled()
    assert script.seen[0].attempt == 2
    assert len(await context.letters()) == 1


async def _is(condition) -> bool:
    return bool(condition())


async def _pending(context: Context, count: int) -> bool:
    return (await context.info()).num_ack_pending == count


async def _is_buried(context: Context) -> bool:
    return len(await context.letters()) == 1


async def _delivered(context: Context, more_than: int) -> bool:
    info = await context.info()
    return info.num_redelivered > 0 or info.delivered.consumer_seq > more_than


async def _ack_waits(context: Context, count: int) -> None:
    """Return after `count` times the consumer's ack_wait."""
    loop = asyncio.get_running_loop()
    end = loop.time() + (await context.info()).config.ack_wait * count
    await until_so(lambda: _is(lambda: loop.time() >= end), "the time passes")


async def _never() -> bool:
    return False


async def _yield(_: Delivery) -> Done:
    await asyncio.sleep(0)
    return DONE


async def test_a_consumer_ends_though_its_look_swallows_the_cancellation(
    context: Context, monkeypatch: pytest.MonkeyPatch
):
    begun = asyncio.Event()

    async def look(_: Pull) -> bool:
        begun.set()
        with suppress(asyncio.CancelledError):
            await asyncio.get_running_loop().create_future()
        return False

    monkeypatch.setattr(Pull, "_look", look)
    consuming = asyncio.create_task(context.consumer(Script()).run())
    await begun.wait()
    consuming.cancel()
    await asyncio.wait({consuming}, timeout=10)
    assert consuming.cancelled()
