"""An agent's attempts at a message: counted in its store, told to the next one, and ended in the dead letters."""

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.agents import Counting, Running, Tally, attempted, opened, running_agent, settled
from support.jetstream import Context
from support.waiting import until, until_so

from postroom.agent import Emit, Envelope
from postroom.claims import Outcome
from postroom.delivery.message import Delivery
from postroom.delivery.settings import AgentSettings


class Witness(Counting):
    """Notes what each attempt was told, and fails as often as the order says."""

    told: list[tuple[int, str | None]] = []  # noqa: RUF012 - emptied by the fixture

    async def receive(self, envelope: Envelope) -> list[Emit]:
        self.told.append((self.attempt, self.last_error))
        if self.attempt <= envelope.payload["failures"]:
            raise OSError(f"no stock, {self.attempt}")
        return await super().receive(envelope)


@pytest.fixture(autouse=True)
def no_attempts_yet() -> None:
    Witness.told.clear()


def order(failures: int, more: str = "") -> bytes:
    return b'{"failures":%d,"total":2%s}' % (failures, more.encode())


async def test_an_attempt_is_told_its_number_and_why_the_one_before_failed(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(2))
    async with running_agent(context, tmp_path, Witness) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)
    assert Witness.told == [(1, None), (2, "OSError: no stock, 1"), (3, "OSError: no stock, 2")]


async def test_the_next_message_is_told_nothing_of_the_one_before(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(1))
    async with running_agent(context, tmp_path, Witness):
        await settled(context)
        await context.publish(["order-2"], order(0))
        await settled(context)
    assert Witness.told[-1] == (1, None)


async def test_attempts_and_the_last_error_survive_a_restart(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(2))
    slow = {"backoff": {"first_seconds": 3600, "most_seconds": 3600}}

    async with running_agent(context, tmp_path, Witness, **slow) as running:

        async def failed_once() -> bool:
            return running.consumers[0].counters.retried == 1

        await until_so(failed_once, "the first attempt has failed")
    await context.js.delete_consumer(context.events, "counting_consumer")  # the server forgets what it delivered
    async with running_agent(context, tmp_path, Witness):
        await settled(context)
    assert Witness.told == [(1, None), (2, "OSError: no stock, 1"), (3, "OSError: no stock, 2")]


async def test_the_last_attempt_ends_in_the_dead_letters_with_its_error(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(9))
    async with running_agent(context, tmp_path, Witness, max_deliver=3):
        await settled(context)
    (letter,) = await context.letters()
    assert (letter.reason, letter.attempts, letter.last_error) == ("max_deliver", 3, "OSError: no stock, 3")
    assert len(Witness.told) == 3


async def test_an_error_of_which_no_store_keeps_each_character_ends_no_agent(context: Context, tmp_path: Path):
    class Odd(Counting):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            if self.attempt == 1:
                raise ValueError("half a character: \ud800")
            Witness.told.append((self.attempt, self.last_error))
            return await super().receive(envelope)

    await context.publish(["order-1"], order(0))
    async with running_agent(context, tmp_path, Odd):
        await settled(context)
    assert Witness.told == [(2, "ValueError: half a character: \\ud800")]


async def test_the_senders_policy_ends_it_earlier(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(9, ',"retry_policy":{"max_attempts":2,"backoff_ms":1}'))
    async with running_agent(context, tmp_path, Witness):
        await settled(context)
    (letter,) = await context.letters()
    assert (letter.reason, letter.attempts, letter.last_error) == ("max_deliver", 2, "OSError: no stock, 2")


async def test_what_was_buried_is_not_attempted_again_where_its_ack_was_lost(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(9))
    async with running_agent(context, tmp_path, Witness, max_deliver=2):
        await settled(context)
    await context.js.delete_consumer(context.events, "counting_consumer")  # everything is delivered once more
    async with running_agent(context, tmp_path, Witness, max_deliver=2):
        await settled(context)
    assert len(Witness.told) == 2
    assert len(await context.letters()) == 1


async def test_a_replay_of_what_was_buried_has_all_its_attempts_again(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(9))
    async with running_agent(context, tmp_path, Witness, max_deliver=2):
        await settled(context)
        headers = {"Nats-Msg-Id": "order-1~counting_consumer.1", "Postroom-Replay-Of": "order-1"}
        await context.js.publish(context.subject, order(1), headers=headers)
        await settled(context)
        assert attempted(tmp_path) == {"order-1": (2, "OSError: no stock, 2")}
    assert Witness.told[2:] == [(1, None), (2, "OSError: no stock, 1")]


async def test_what_an_agent_handled_at_last_leaves_no_attempts_behind(context: Context, tmp_path: Path):
    await context.publish(["order-1"], order(2))
    async with running_agent(context, tmp_path, Witness):
        await settled(context)
    assert attempted(tmp_path) == {}


async def test_what_another_message_of_its_key_was_handled_for_leaves_no_attempts_behind(
    context: Context, tmp_path: Path
):
    async def publish(name: str, failures: int) -> None:
        headers = {"Nats-Msg-Id": name, "Idempotency-Key": "order"}
        await context.js.publish(context.subject, order(failures), headers=headers)

    slow = {"backoff": {"first_seconds": 3600, "most_seconds": 3600}}
    async with running_agent(context, tmp_path, Witness, **slow) as running:
        await publish("fails", 9)
        await until_so(lambda: counted(running, "retried"), "the first attempt has failed")
        await publish("is-handled", 0)
        await until_so(lambda: counted(running, "done"), "the other is handled")
    assert attempted(tmp_path).keys() == {"fails"}
    await context.js.delete_consumer(context.events, "counting_consumer")  # so that both come again
    async with running_agent(context, tmp_path, Witness):
        await settled(context)
    assert (attempted(tmp_path), await context.letters()) == ({}, [])


async def counted(running: Running, counter: str) -> bool:
    return getattr(running.consumers[0].counters, counter) == 1


@pytest.mark.parametrize("method", ["receive", "apply"])
@pytest.mark.parametrize(
    ("ending", "words"),
    [
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(3), "SystemExit: 3"),
        (BaseException("odd"), "BaseException: odd"),
    ],
    ids=["cancelled", "leaves", "odd"],
)
async def test_what_would_end_the_process_is_a_failed_attempt(
    context: Context, tmp_path: Path, ending: BaseException, words: str, method: str
):
    class Ending(Witness):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            effects = await super().receive(envelope)
            if method == "receive" and self.attempt == 1:
                raise ending
            return effects

        def apply(self, state: Tally, event: Envelope) -> Tally:
            if method == "apply" and self.attempt == 1:
                raise ending
            return super().apply(state, event)

    await context.publish(["order-1"], order(0))
    async with running_agent(context, tmp_path, Ending):
        await settled(context)
    assert Witness.told == [(1, None), (2, f"HandlerEnded: the handler ended with {words}")]


async def test_an_agent_that_cancels_its_own_task_is_a_failed_attempt(context: Context, tmp_path: Path):
    class Cancelling(Witness):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            effects = await super().receive(envelope)
            if self.attempt == 1:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            return effects

    await context.publish(["order-1"], order(0))
    async with running_agent(context, tmp_path, Cancelling):
        await settled(context)
    assert Witness.told == [(1, None), (2, "HandlerEnded: the handler ended with CancelledError")]


async def test_an_attempt_that_a_stop_ended_is_not_counted(context: Context, tmp_path: Path):
    class Waiting(Witness):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            effects = await super().receive(envelope)
            if len(self.told) == 1:
                began.set()
                await asyncio.Event().wait()
            return effects

    began = asyncio.Event()
    await context.publish(["order-1"], order(0))
    runtime = await opened(context, tmp_path, Waiting)
    task = asyncio.create_task(runtime.run())
    delivery = Delivery(context.subject, order(0), {}, "order-1", context.events, 1, 1, published_at=datetime.now(UTC))
    handling = asyncio.create_task(runtime.handle([delivery], ignore))
    await began.wait()
    runtime.stop()
    task.cancel()
    handling.cancel()
    await asyncio.gather(task, handling, return_exceptions=True)
    await runtime.close()
    async with running_agent(context, tmp_path, Waiting):
        await settled(context)
    assert Witness.told == [(1, None), (1, None)]


async def test_an_attempt_that_catches_its_cancellation_is_what_keeps_the_agent(context: Context, tmp_path: Path):
    class Catching(Witness):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            await release.wait()
            return await super().receive(envelope)

    release = asyncio.Event()
    await context.publish(["order-1"], order(0))
    async with running_agent(context, tmp_path, Catching, settings=AgentSettings(receive_seconds=0.05)) as running:
        await until(lambda: running.runtime.trouble is not None)
        assert running.runtime.trouble == (
            "`receive` has taken longer than 0.05 s, and catches its cancellation: restart the agent"
        )
        release.set()
        await settled(context)
        assert running.runtime.trouble is None


async def ignore(delivery: Delivery, outcome: Outcome) -> None:
    del delivery, outcome
