"""The runtime on a real JetStream and a real store: each message once, with what it causes; what is wrong is told."""

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, get_current_span
from support.agents import SETTINGS, Counting, Tally, emitted, kept, opened, place_orders, running_agent, settled
from support.jetstream import Context
from support.traces import attributes, links_of, parent_of
from support.waiting import until, until_so

from postroom.agent import Agent, Command, Emit, Envelope
from postroom.chassis.exits import Exit, Fatal
from postroom.claims import DONE, Outcome
from postroom.delivery.agents.replay import replay, trace
from postroom.delivery.agents.runtime import open_consumers
from postroom.delivery.agents.store import Key, TurnInput
from postroom.delivery.message import Delivery
from postroom.delivery.streams import ensure_stream
from postroom.delivery.subjects import stream_name
from postroom.errors import Conflict

ORDERS = [f"order-{number}" for number in range(20)]
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"


async def test_each_message_is_handled_once_and_what_it_emits_is_published_once(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        assert running.runtime.state == Tally(20, 40)
        assert (running.runtime.counters.handled, running.runtime.counters.published) == (20, 40)
    assert set(Counting.runs.values()) == {1}
    counts = await emitted(context)
    assert (len(counts), set(counts.values())) == (40, {1})
    assert all(event.published for event in kept(tmp_path) if event.role == "emitted")


async def test_messages_are_handled_in_the_order_they_were_published(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS)
    async with running_agent(context, tmp_path, batch=3):
        await settled(context)
    assert [event.envelope.id for event in kept(tmp_path) if event.role == "handled"] == ORDERS


async def test_a_restart_builds_the_state_from_the_store_and_goes_on(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS[:10])
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        before = running.runtime.state_hash
    async with running_agent(context, tmp_path) as running:
        assert (running.runtime.state, running.runtime.state_hash) == (Tally(10, 20), before)
        await place_orders(context, ORDERS[10:])
        await settled(context)
        assert running.runtime.state == Tally(20, 40)


async def test_a_second_message_with_the_same_key_is_not_handled(context: Context, tmp_path: Path):
    await place_orders(context, ["first", "second"], **{"Idempotency-Key": "the-order"})
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        assert (running.runtime.state, running.runtime.counters.found) == (Tally(1, 2), 1)
    assert sum(Counting.runs.values()) == 1


async def test_a_message_that_is_published_again_after_the_duplicate_window_is_not_handled(
    context: Context, tmp_path: Path
):
    await place_orders(context, ["order-1"])
    await place_orders(context, ["order-1/2"])  # what a redrive publishes: the same event, another epoch
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)


async def test_a_replayed_dead_letter_is_handled_once_under_the_id_it_had(context: Context, tmp_path: Path):
    await place_orders(context, ["replay-1", "replay-2"], **{"Postroom-Replay-Of": "order-1"})
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)


async def test_an_emitted_message_carries_correlation_causation_and_a_span_of_its_own(context: Context, tmp_path: Path):
    headers = {"X-Correlation-Id": "c-1", "traceparent": TRACE, "X-Occurred-At": "2026-11-21T10:00:00+02:00"}
    await place_orders(context, ["order-1"], **headers)
    async with running_agent(context, tmp_path):
        await settled(context)
    received, first, second = (event.envelope for event in kept(tmp_path))
    assert (received.trace_id, received.span_id) == ("a" * 32, "b" * 16)
    assert received.ts == datetime(2026, 11, 21, 8, tzinfo=UTC)
    for each in (first, second):
        assert (each.correlation_id, each.causation_id, each.trace_id) == ("c-1", "order-1", "a" * 32)
        assert each.ts > received.ts
    assert len({received.span_id, first.span_id, second.span_id}) == 3
    message = (await context.stored(context.events))[1]
    assert message.headers is not None
    assert message.headers["traceparent"] == f"00-{'a' * 32}-{first.span_id}-01"
    assert message.headers["X-Causation-Id"] == "order-1"
    assert message.data == b'{"order":"order-1","part":1}'


async def test_a_message_with_a_trace_is_handled_in_a_span_that_the_authors_own_are_children_of(
    context: Context, tmp_path: Path, recorded: InMemorySpanExporter
):
    current: list[SpanContext] = []

    class Looking(Counting):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            current.append(get_current_span().get_span_context())
            return await super().receive(envelope)

    await place_orders(context, ["order-1"], traceparent=TRACE)
    await context.publish(["order-2"], b'{"poison":true}')
    await place_orders(context, ["order-3"], traceparent=TRACE, **{"Postroom-Replay-Of": "order-0"})
    async with running_agent(context, tmp_path, Looking, max_deliver=1):
        await settled(context)

    spans = [span for span in recorded.get_finished_spans() if span.name.startswith("process")]
    assert [(parent_of(span), links_of(span)) for span in spans] == [(TRACE, []), (None, [TRACE])]
    assert [span.get_span_context() for span in spans] == [current[0], current[2]]
    assert not current[1].is_valid
    emitted = [span for span in recorded.get_finished_spans() if span.name.startswith("publish")]
    assert {span.parent.trace_id for span in emitted[:2]} == {int("a" * 32, 16)}


async def test_what_receive_raises_is_the_spans_error(context: Context, tmp_path: Path, recorded: InMemorySpanExporter):
    await context.js.publish(
        f"{context.name}.event.order_placed.v1",
        b'{"poison":true}',
        headers={"Nats-Msg-Id": "m-1", "traceparent": TRACE},
    )
    async with running_agent(context, tmp_path, max_deliver=2):
        await settled(context)
    spans = [span for span in recorded.get_finished_spans() if span.name.startswith("process")]
    assert [attributes(span)["postroom.attempt"] for span in spans] == [1, 2]
    assert {attributes(span)["error.type"] for span in spans} == {"ValueError"}
    assert spans[0].status.description == "the order is poisonous"


async def test_a_message_without_a_time_gets_the_logical_clocks(context: Context, tmp_path: Path):
    await place_orders(context, ["order-1"], **{"X-Occurred-At": "2026-11-21T10:00:00Z"})
    await place_orders(context, ["order-2"])
    async with running_agent(context, tmp_path):
        await settled(context)
    times = [event.envelope.ts for event in kept(tmp_path)]
    assert times == sorted(set(times))
    assert times[3] == datetime(2026, 11, 21, 10, 0, 0, 3, tzinfo=UTC)


async def test_poison_is_dead_lettered_and_the_others_go_on(context: Context, tmp_path: Path):
    await place_orders(context, ORDERS[:5])
    await context.publish(["poison"], b'{"poison":true}')
    await context.publish(["no json"], b"{")
    await context.publish(["too large a number"], b'{"total":9007199254740993}')
    await context.js.publish(context.subject, b'{"total":1}')  # without an id
    await place_orders(context, ORDERS[5:])
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        assert running.runtime.state == Tally(20, 40)
    letters = {letter.message_id: letter for letter in await context.letters()}
    assert {message_id: (letter.reason, letter.attempts) for message_id, letter in letters.items()} == {
        "poison": ("max_deliver", 5),
        "no json": ("max_deliver", 5),
        "too large a number": ("max_deliver", 5),
        None: ("no_message_id", 1),
    }
    assert letters["poison"].last_error == "ValueError: the order is poisonous"
    assert "is not JSON" in letters["no json"].last_error


async def test_a_story_tells_of_the_letters_of_that_very_message(context: Context, tmp_path: Path):
    ids = ["order_1", "order-1", "ORDER_1", "an:order_1"]
    await context.publish(ids, b'{"poison":true}')
    async with running_agent(context, tmp_path, max_deliver=1):
        await settled(context)
    for message_id in ids:
        story = await trace(tmp_path / "events.db", message_id)
        assert [step.thing for step in story.steps if step.what == "buried"] == [f"dead:counting_consumer:{message_id}"]


async def test_a_message_whose_first_run_failed_is_handled_at_its_next_attempt(context: Context, tmp_path: Path):
    class Moody(Counting):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            effects = await super().receive(envelope)
            if self.runs[envelope.id] == 1:
                raise OSError("the database is away")
            return effects

    await place_orders(context, ["order-1"])
    async with running_agent(context, tmp_path, Moody) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)
    assert Counting.runs["order-1"] == 2
    assert sorted((await emitted(context)).values()) == [1, 1]
    assert await context.letters() == []


class Editor(Agent[tuple[str, ...]]):
    """Edits documents, each of which has a version."""

    subjects = ("{tenant}.event.order_placed.v1",)

    def initial_state(self) -> tuple[str, ...]:
        return ()

    async def receive(self, envelope: Envelope) -> None:
        del envelope

    def apply(self, state: tuple[str, ...], event: Envelope) -> tuple[str, ...]:
        return (*state, event.id)


async def test_a_wrong_expected_version_is_a_conflict_and_changes_nothing(context: Context, tmp_path: Path):
    for message_id, version in (("a", "0"), ("b", "1"), ("stale", "1"), ("c", "2")):
        headers = {"Postroom-Entity-Id": "document-1", "Postroom-Expected-Version": version}
        await place_orders(context, [message_id], **headers)
    async with running_agent(context, tmp_path, Editor) as running:
        await settled(context, "editor_consumer")
        assert running.runtime.state == ("a", "b", "c")
        assert running.runtime.counters.conflicts == 1
    (conflict,) = [event.envelope for event in kept(tmp_path) if event.role == "reported"]
    assert (conflict.type, conflict.causation_id) == ("editor_conflict", "stale")
    assert conflict.payload == {
        "actual_version": 2, "entity_id": "document-1", "expected_version": 1, "id": "stale", "type": "order_placed"
    }  # fmt: skip
    assert set((await emitted(context, "editor_conflict")).values()) == {1}
    assert await context.letters() == []


@pytest.mark.parametrize(
    "foreign",
    [
        {"Postroom-Tenant": "somebody"},
        {"Postroom-Workspace": "theirs"},
        {"Postroom-Tenant": "somebody", "X-Occurred-At": "soon"},
        {"Postroom-Tenant": "somebody", "X-Event-Version": "two", "Postroom-Expected-Version": "-1"},
    ],
)
async def test_a_message_of_somebody_else_is_refused_with_one_security_event(
    context: Context, tmp_path: Path, foreign: dict[str, str]
):
    await place_orders(context, ["theirs", "theirs/2"], **foreign)
    await place_orders(context, ["ours"])
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)
        assert running.runtime.counters.refused == 1
    (event,) = [event.envelope for event in kept(tmp_path) if event.role == "reported"]
    assert (event.type, event.payload["id"]) == ("counting_security", "theirs")
    (refused,) = [event.envelope for event in kept(tmp_path) if event.role == "refused"]
    assert refused.payload is None
    assert set((await emitted(context, "counting_security")).values()) == {1}
    assert {letter.reason for letter in await context.letters()} == {"refused"}


class Wrong(Agent):
    """Returns what is no effect, or cannot be one."""

    subjects = ("{tenant}.event.order_placed.v1",)
    returns: object = None

    async def receive(self, envelope: Envelope) -> object:  # type: ignore[override]
        del envelope
        return self.returns


@pytest.mark.parametrize(
    ("returns", "sentence"),
    [
        ("order_counted", "return None, an Emit, a Command, or a list of them"),
        ([Emit("order_counted"), 7], "of type int"),
        (Emit("OrderCounted"), "snake_case"),
        (Emit("order_counted", {"at": object()}), "is not JSON"),
        (Emit("order_counted", {"share": float("nan")}), "is not JSON"),
        (Command("Billing"), "Expected a name: a lower-case letter"),
        (Command("billing.run"), "cannot have: agent: Expected"),
        (Command("billing", workspace="a.b"), "cannot have: workspace: Expected"),
        (Emit("order_counted", entity_id="o-1\r\nNats-Rollup: all"), "no control characters"),
        (Command("billing", entity_id="\0"), "no control characters"),
        (Emit("order_counted", entity_id=" o-1"), "no white space at its ends"),
        (Emit("order_counted", expected_version=-1), "Expected `int` >= 0"),
    ],
)
async def test_a_wrong_effect_is_a_sentence_for_its_author_and_stores_nothing(
    context: Context, tmp_path: Path, returns: object, sentence: str
):
    Wrong.returns = returns
    await place_orders(context, ["order-1"])
    async with running_agent(context, tmp_path, Wrong, max_deliver=1):
        await settled(context, "wrong_consumer")
    (letter,) = await context.letters()
    assert sentence in letter.last_error
    assert kept(tmp_path) == []


async def test_what_jetstream_would_never_take_is_refused_before_it_is_stored(context: Context, tmp_path: Path):
    Wrong.returns = Emit("order_counted", "x" * context.connection.max_payload)
    await place_orders(context, ["order-1"])
    async with running_agent(context, tmp_path, Wrong, max_deliver=1):
        await settled(context, "wrong_consumer")
    (letter,) = await context.letters()
    assert "JetStream allows" in letter.last_error
    assert kept(tmp_path) == []


async def test_what_cannot_be_published_now_is_published_later_and_holds_up_nobody_else(
    context: Context, tmp_path: Path
):
    class Loud(Counting):
        subjects = ("{tenant}.event.order_placed.v1",)

        async def receive(self, envelope: Envelope) -> list[Emit]:  # type: ignore[override]
            return [Emit("order_counted", {})] if envelope.id != "stuck" else [Command("billing")]  # type: ignore[list-item]

    commands = next(stream for stream in context.streams if stream.name.endswith("_COMMANDS"))
    await context.js.delete_stream(commands.name)
    await place_orders(context, ["stuck", *ORDERS])
    async with running_agent(context, tmp_path, Loud) as running:

        async def only_stuck_is_left() -> bool:
            return running.consumers[0].counters.done == len(ORDERS)

        await until_so(only_stuck_is_left, "the others are done")
        assert [event.envelope.type for event in kept(tmp_path) if event.role == "emitted" and not event.published] == [
            "run"
        ]
        await ensure_stream(context.js, commands)
        await settled(context)
    assert all(event.published for event in kept(tmp_path) if event.role == "emitted")


async def test_what_a_receive_takes_too_long_for_is_tried_again(context: Context, tmp_path: Path):
    class Slow(Counting):
        async def receive(self, envelope: Envelope) -> list[Emit]:
            if not self.runs[envelope.id]:
                self.runs[envelope.id] += 1
                await asyncio.Event().wait()
            return []

    await place_orders(context, ["order-1"])
    settings = msgspec.structs.replace(SETTINGS, receive_seconds=0.01)
    async with running_agent(context, tmp_path, Slow, settings=settings) as running:
        await settled(context)
        assert running.runtime.state == Tally(1, 2)


async def test_a_message_that_was_delivered_too_often_is_done_where_the_store_holds_it(
    context: Context, tmp_path: Path
):
    outcomes: list[Outcome] = []

    async def settle(delivery: Delivery, outcome: Outcome) -> None:
        del delivery
        outcomes.append(outcome)

    await place_orders(context, ["order-1"])
    async with running_agent(context, tmp_path) as running:
        await settled(context)
        now = datetime.now(UTC)
        known = Delivery(context.subject, b"", {}, "order-1", context.events, 1, 6, published_at=now)
        await running.runtime.handle([known], settle)
    assert outcomes == [DONE]


async def test_an_agent_that_cannot_go_on_gives_back_what_it_has_in_hand(context: Context, tmp_path: Path):
    """A stop waits for what is in hand, up to its `stop_seconds`."""

    class Forgetful(Counting):
        def apply(self, state: Tally, event: Envelope) -> Tally:
            raise KeyError("currency", state, event)

    outcomes: list[Outcome] = []

    async def settle(delivery: Delivery, outcome: Outcome) -> None:
        del delivery
        outcomes.append(outcome)

    runtime = await opened(context, tmp_path, Forgetful)
    await place_orders(context, ["order-1"])
    async with running_agent(context, tmp_path):
        await settled(context)
    message = Delivery(context.subject, b"", {}, "order-2", context.events, 2, 1, published_at=datetime.now(UTC))
    handling = asyncio.create_task(runtime.handle([message], settle))
    with pytest.raises(Fatal, match=r"Forgetful\.apply raised"):
        await runtime.run()
    await until(handling.done)
    await runtime.handle([message], settle)
    assert outcomes == []
    await runtime.close()


async def test_a_turn_takes_about_as_many_messages_as_it_can_handle(context: Context, tmp_path: Path):
    orders = [f"order-{number}" for number in range(200)]
    await place_orders(context, orders)
    settings = msgspec.structs.replace(SETTINGS, group_seconds=1e-9)  # one message
    asked = 0
    async with running_agent(context, tmp_path, settings=settings, batch=len(orders)) as running:
        store: Any = running.runtime._store
        look = store.read_turn

        async def counted(keys: Sequence[Key], *rest: Any) -> TurnInput:
            nonlocal asked
            asked += len(keys)
            found: TurnInput = await look(keys, *rest)
            return found

        store.read_turn = counted
        await settled(context)
        assert running.runtime.state == Tally(200, 400)
    assert asked < 5 * len(orders)


async def test_two_agents_of_one_name_on_one_host_share_the_work_the_store_and_the_state(
    context: Context, tmp_path: Path
):
    async with (
        running_agent(context, tmp_path, batch=5, max_ack_pending=5) as one,
        running_agent(context, tmp_path, batch=5, max_ack_pending=5) as two,
    ):
        await place_orders(context, [f"order-{number}" for number in range(200)])
        await settled(context)
        shares = one.runtime.counters.handled, two.runtime.counters.handled
    assert sum(shares) == 200
    assert min(shares) > 0
    assert set(Counting.runs.values()) == {1}
    async with running_agent(context, tmp_path) as after:
        assert after.runtime.state == Tally(200, 400)


async def test_an_agent_that_drops_every_subject_of_a_stream_is_refused(context: Context, tmp_path: Path):
    class Wide(Counting):
        subjects = (*Counting.subjects, "cmd.{tenant}.{workspace}.counting.>")

    async with running_agent(context, tmp_path, Wide):
        pass
    commands = stream_name(context.name, "commands")
    dropped = rf"{commands}/counting_consumer: filter_subjects .* → none.*: adapt .*consumer delete {commands}"
    runtime, settings = await opened(context, tmp_path), context.settings(durable="counting_consumer")
    with pytest.raises(Conflict, match=dropped):
        await open_consumers(context.js, runtime, [context.subject], settings)
    await context.js.delete_consumer(commands, "counting_consumer")
    assert len(await open_consumers(context.js, runtime, [context.subject], settings)) == 1
    await runtime.close()


async def test_a_store_stays_with_its_agent(context: Context, tmp_path: Path):
    async with running_agent(context, tmp_path):
        pass
    with pytest.raises(Fatal, match="is the store of the agent counting"):
        async with running_agent(context, tmp_path, Editor):
            pass


async def test_an_apply_that_raises_at_a_start_is_named_with_its_event_and_what_it_raised(
    context: Context, tmp_path: Path
):
    class Forgetful(Counting):
        def apply(self, state: Tally, event: Envelope) -> Tally:
            raise KeyError("currency", state, event)

    await place_orders(context, ["order-1"])
    async with running_agent(context, tmp_path):
        await settled(context)
    with pytest.raises(
        Fatal, match=r"Forgetful\.apply raised at the event of position 1: KeyError.*currency"
    ) as raised:
        async with running_agent(context, tmp_path, Forgetful):
            pass
    assert raised.value.exit_code == Exit.CONFIG


class Unset(Counting):
    def __init__(self) -> None:
        self.key = os.environ["A_KEY_THAT_IS_NOT_SET"]


class Unfilled(Counting):
    def initial_state(self) -> Tally:
        sys.exit("no state")


@pytest.mark.parametrize(("agent", "said"), [(Unset, "KeyError: 'A_KEY_THAT_IS_NOT_SET'"), (Unfilled, "SystemExit")])
async def test_an_agent_that_cannot_be_created_is_named_with_what_it_raised_and_where(
    context: Context, tmp_path: Path, agent: type[Counting], said: str
):
    async with running_agent(context, tmp_path):
        pass
    sentence = rf"{agent.__name__} cannot be created: it raised {said}.* \({__file__}, line \d+\)"
    with pytest.raises(Fatal, match=sentence) as raised:
        async with running_agent(context, tmp_path, agent):
            pass
    assert raised.value.exit_code == Exit.CONFIG
    with pytest.raises(Fatal, match=sentence):
        await replay(agent, tmp_path / "events.db")
