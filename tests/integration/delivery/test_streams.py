"""Streams and consumers are brought to what a config declares, or it is said why not."""

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest
import structlog
from nats.js.api import RetentionPolicy, StreamSource
from nats.js.errors import NotFoundError
from support.jetstream import Context, Script
from support.waiting import until_so

from postroom.chassis.config import load
from postroom.chassis.exits import Fatal
from postroom.delivery.settings import (
    DAY,
    ConsumerSettings,
    KindDefaults,
    StreamDefaults,
    StreamSettings,
)
from postroom.delivery.streams import default_changes, default_streams, ensure_consumer, ensure_stream
from postroom.errors import Conflict, NotFound, TryAgain
from postroom.worker.config import WorkerConfig


@pytest.fixture
def stream(context: Context) -> StreamSettings:
    return context.streams[0]


def like(settings, **changes):
    return type(settings)(**{name: getattr(settings, name) for name in settings.__struct_fields__} | changes)


async def test_what_is_declared_is_created_and_a_second_time_nothing_changes(context: Context, stream: StreamSettings):
    wanted = context.settings(filter_subjects=stream.subjects)
    assert {(await ensure_stream(context.js, each)).action for each in context.streams} == {"unchanged"}
    assert (await ensure_consumer(context.js, wanted)).action == "created"
    assert (await ensure_consumer(context.js, wanted)).action == "unchanged"


async def test_a_stream_is_as_declared(context: Context):
    events, commands, _, dlq = [
        (await context.js.stream_info(each.name)).config for each in default_streams(context.name)
    ]
    assert (events.retention, events.max_age, events.duplicate_window) == (RetentionPolicy.LIMITS, 7 * DAY, 120)
    assert commands.retention == RetentionPolicy.WORK_QUEUE
    assert (dlq.max_age, dlq.duplicate_window) == (30 * DAY, DAY)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_age_seconds": 8 * DAY},
        {"max_age_seconds": 0},
        {"duplicate_window_seconds": 60},
        {"duplicate_window_seconds": 600},
    ],
    ids=str,
)
async def test_a_change_that_loses_nothing_is_made(context: Context, stream: StreamSettings, changes: dict):
    done = await ensure_stream(context.js, like(stream, **changes))
    assert done.action == "changed"
    assert next(iter(changes)) in done.changes[0]
    assert (await ensure_stream(context.js, like(stream, **changes))).action == "unchanged"


async def test_a_duplicate_window_is_no_longer_than_the_age_at_which_messages_go(context: Context):
    hour = KindDefaults(max_age_seconds=3600)
    for kept in (hour, KindDefaults(max_age_seconds=60)):
        made = default_streams(
            f"{context.name}_of_{kept.max_age_seconds}", StreamDefaults(events=kept, dead_letters=kept)
        )
        for each in made:
            assert (await ensure_stream(context.js, each)).action == "created"
            assert (await ensure_stream(context.js, each)).action == "unchanged"
            config = (await context.js.stream_info(each.name)).config
            age = each.max_age_seconds
            assert (config.max_age, config.duplicate_window) == (age, min(each.duplicate_window_seconds, age or DAY))


async def test_the_duplicate_window_that_an_operator_sets_is_cut_to_the_age_that_a_stream_has(context: Context):
    inbox = context.streams[2]
    await context.js.update_stream(name=inbox.name, subjects=inbox.subjects, max_age=300, duplicate_window=60)
    longer = like(inbox, duplicate_window_seconds=600)
    done = await ensure_stream(context.js, longer, only={"duplicate_window_seconds"})
    assert done.changes == ("duplicate_window_seconds 60.0 → 300.0",)
    assert (await ensure_stream(context.js, longer, only={"duplicate_window_seconds"})).action == "unchanged"


async def test_subjects_can_be_added(context: Context, stream: StreamSettings):
    wider = like(stream, subjects=[*stream.subjects, f"{context.name}.other.>"])
    assert (await ensure_stream(context.js, wider)).action == "changed"
    await context.js.publish(f"{context.name}.other.x", b"")


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"retention": "workqueue"}, "retention limits → workqueue"),
        ({"max_age_seconds": DAY}, "max_age_seconds 604800.0 → 86400.0"),
        ({"max_bytes": 1000}, "max_bytes inf → 1000"),
        ({"subjects": ["elsewhere.event.>"]}, "subjects"),
    ],
    ids=["retention", "max_age", "max_bytes", "subjects"],
)
async def test_a_change_that_could_lose_messages_is_refused_with_the_difference(
    context: Context, stream: StreamSettings, changes: dict, difference: str
):
    await context.publish(["a"])
    before = (await context.js.stream_info(stream.name)).config
    with pytest.raises(Conflict, match=difference) as refused:
        await ensure_stream(context.js, like(stream, **changes, duplicate_window_seconds=60))
    assert refused.value.code == "stream_differs"
    assert (await context.js.stream_info(stream.name)).config == before


async def test_a_limit_that_somebody_else_set_is_kept(context: Context, stream: StreamSettings):
    found = (await context.js.stream_info(stream.name)).config
    await context.js.update_stream(found.evolve(max_msg_size=12_345))
    await ensure_stream(context.js, like(stream, duplicate_window_seconds=60))
    assert (await context.js.stream_info(stream.name)).config.max_msg_size == 12_345


async def test_a_consumer_counts_attempts_itself_and_leaves_room_for_those_that_wait(context: Context):
    await ensure_consumer(context.js, context.settings(max_deliver=5, max_ack_pending=50, max_waiting=100))
    config = (await context.info()).config
    assert (config.max_deliver, config.max_ack_pending, config.backoff) == (-1, 150, None)


async def test_a_consumer_is_changed_where_that_loses_nothing(context: Context):
    await ensure_consumer(context.js, context.settings(filter_subjects=[context.subject]))
    wider = context.settings(ack_wait_seconds=77, filter_subjects=[f"{context.name}.event.>"])
    assert (await ensure_consumer(context.js, wider)).action == "changed"
    assert (await context.info()).config.ack_wait == 77
    assert (await ensure_consumer(context.js, wider)).action == "unchanged"


async def test_a_consumer_with_a_servers_own_limit_of_deliveries_is_freed_of_it(context: Context):
    await context.js.add_consumer(context.events, durable_name="sea__from_us", name="sea__from_us", max_deliver=3)
    done = await ensure_consumer(context.js, context.settings())
    assert any("max_deliver 3 → -1" in change for change in done.changes)


async def test_a_narrower_filter_is_refused(context: Context):
    await ensure_consumer(context.js, context.settings())
    with pytest.raises(Conflict, match="filter_subjects") as refused:
        await ensure_consumer(context.js, context.settings(filter_subjects=[context.subject]))
    assert f"`postroom consumer delete {context.events}/sea__from_us`" in str(refused.value)


async def test_a_consumer_that_somebody_made_otherwise_is_refused(context: Context):
    await context.js.add_consumer(
        context.events, durable_name="sea__from_us", name="sea__from_us", deliver_subject="somewhere"
    )
    with pytest.raises(Conflict, match="pull consumer"):
        await ensure_consumer(context.js, context.settings())


async def test_a_consumer_of_no_stream_says_so(context: Context):
    with pytest.raises(NotFound, match="no such stream"):
        await ensure_consumer(context.js, ConsumerSettings(stream="NOBODYS", durable="x"))


async def test_a_new_consumer_with_a_filter_that_no_message_of_its_stream_has_is_told_so(context: Context):
    filters = [context.subject, "orders", f"{context.name}.event"]
    with pytest.raises(NotFound, match=rf"has no subject that orders, {context.name}.event could be, only ") as caught:
        await ensure_consumer(context.js, context.settings(filter_subjects=filters))
    assert caught.value.code == "subject_not_found"
    with pytest.raises(NotFoundError):
        await context.js.consumer_info(context.events, context.settings().durable)


async def test_a_consumer_of_a_mirror_may_filter_for_any_subject(context: Context):
    mirror = f"{context.events}_MIRROR"
    await context.js.add_stream(name=mirror, mirror=StreamSource(name=context.events))
    try:
        wanted = context.settings(stream=mirror, filter_subjects=[context.subject])
        assert (await ensure_consumer(context.js, wanted)).action == "created"
    finally:
        await context.js.delete_stream(mirror)


async def test_a_stream_larger_than_the_disk_says_what_to_do(context: Context, stream: StreamSettings):
    with pytest.raises(TryAgain, match="lower max_bytes"):
        await ensure_stream(context.js, like(stream, name="HUGE", subjects=["huge.>"], max_bytes=10**17))


@pytest.mark.parametrize(
    "text",
    ['[[streams]]\nname = "a.b"\nsubjects = ["x"]', '[[streams]]\nname = "A"\nsubjects = []', "[[streams]]\nnam = 1"],
    ids=["name", "subjects", "unknown key"],
)
def test_a_config_that_makes_no_sense_is_refused_with_the_path(tmp_path: Path, text: str):
    file = tmp_path / "streams.toml"
    file.write_text(text)
    with pytest.raises(Fatal, match=r"streams\[0\]"):
        load(WorkerConfig, file, prefix="POSTROOM_TEST_", environ={"POSTROOM_TEST_DATABASE_URL": "x"})


async def test_a_filter_that_got_wider_is_consumed_after_a_restart(context: Context):
    other = f"{context.name}.event.order_paid.v1"
    script = Script()
    async with context.consuming(script, filter_subjects=[context.subject]):
        await context.publish(["a"])
        await script.saw(1)
    with structlog.testing.capture_logs() as logged:
        async with context.consuming(script, filter_subjects=[context.subject, other], ack_wait_seconds=77):
            await until_so(lambda: _changed(context, 77), "the consumer is brought to its settings")
            await context.publish(["b"], subject=other)
            await script.saw(2)
    assert script.ids() == ["a", "b"]
    (changed,) = [line for line in logged if line["event"] == "consumer_changed"]
    assert any("filter_subjects" in change and other in change for change in changed["changes"])


async def _changed(context: Context, ack_wait: float) -> bool:
    return (await context.info()).config.ack_wait == ack_wait


async def test_another_filter_is_refused_while_somebody_consumes_under_the_name(context: Context):
    wider = context.settings(filter_subjects=[f"{context.name}.event.>"])
    async with context.consuming(Script(), filter_subjects=[context.subject]):
        await until_so(lambda: _is_waiting(context), "the first asks for messages")
        with pytest.raises(Conflict, match=r"filter_subjects.*another program") as refused:
            await ensure_consumer(context.js, wider)
        assert refused.value.retryable
        same = context.settings(filter_subjects=[context.subject], ack_wait_seconds=60)
        assert (await ensure_consumer(context.js, same)).action == "changed"
    await until_so(lambda: _is_idle(context), "the first has gone")
    assert (await ensure_consumer(context.js, wider)).action == "changed"


async def _is_waiting(context: Context) -> bool:
    with suppress(NotFoundError):  # not made yet
        return bool((await context.info()).num_waiting)
    return False


async def _is_idle(context: Context) -> bool:
    return not (await context.info()).num_waiting


async def test_where_a_consumer_began_is_no_reason_to_refuse_it(context: Context):
    moments = [datetime.now(UTC) - timedelta(hours=hours) for hours in (1, 2)]
    await ensure_consumer(context.js, context.settings(since=moments[0]))
    changed = await ensure_consumer(context.js, context.settings(since=moments[1], ack_wait_seconds=77))
    assert changed.action == "changed"


async def test_a_consumer_that_may_not_be_changed_ends_what_runs_it(context: Context):
    await ensure_consumer(context.js, context.settings())
    consumer = context.consumer(Script(), filter_subjects=[context.subject])
    with pytest.raises(Conflict, match="filter_subjects"):
        await consumer.run()


async def test_a_second_name_for_the_subjects_of_a_work_queue_is_told_who_has_them(context: Context):
    commands = f"{context.name}_COMMANDS".upper()
    mine = ConsumerSettings(stream=commands, durable="pricing_consumer", filter_subjects=[f"cmd.{context.name}.a.b.>"])
    await ensure_consumer(context.js, mine)
    renamed = msgspec.structs.replace(mine, durable="prices_consumer")
    with pytest.raises(Conflict, match=r"prices_consumer cannot .*pricing_consumer has cmd\..*consumer delete"):
        await ensure_consumer(context.js, renamed)


async def test_a_consumer_whose_own_subjects_overlap_is_told_so_and_not_who_else_has_them(context: Context):
    await ensure_consumer(context.js, context.settings())
    both = [f"{context.name}.event.>", f"{context.name}.event.orders.v1"]
    with pytest.raises(
        Conflict, match=r"double would get a message by more than one of .*: omit what another"
    ) as refused:
        await ensure_consumer(context.js, context.settings(durable="double", filter_subjects=both))
    assert not refused.value.retryable


async def test_an_existing_stream_is_brought_to_what_the_operator_set_and_to_nothing_else(context: Context):
    inbox = context.streams[2]
    await context.js.update_stream(name=inbox.name, subjects=inbox.subjects, max_age=5 * DAY, max_msg_size=77)
    defaults = StreamDefaults(duplicate_window_seconds=60, inbox=KindDefaults(max_bytes=10**9))
    settings = default_streams(context.name, defaults)[2]
    only = default_changes(settings, defaults)
    assert only == {"duplicate_window_seconds", "max_bytes"}
    with pytest.raises(Conflict, match="max_bytes"):  # it had no limit
        await ensure_stream(context.js, settings, only=only)
    done = await ensure_stream(context.js, settings, only=only - {"max_bytes"})
    assert done.changes == ("duplicate_window_seconds 120.0 → 60",)
    config = (await context.js.stream_info(inbox.name)).config
    assert (config.max_age, config.max_msg_size, config.duplicate_window) == (5 * DAY, 77, 60)
