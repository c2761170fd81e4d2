"""Every rule for subjects, and every refusal."""

import pytest

from postroom.delivery.streams import covers, default_streams
from postroom.delivery.subjects import (
    CommandSubject,
    DeadLetterSubject,
    EventSubject,
    InboxSubject,
    command_subject,
    dead_letter_subject,
    event_subject,
    inbox_subject,
    parse_subject,
    stream_name,
)
from postroom.errors import InvalidMessage


def test_an_event_is_named_after_what_happened() -> None:
    assert event_subject("sea", "order_placed") == "sea.event.order_placed.v1"
    assert event_subject("sea", "order_placed", 12) == "sea.event.order_placed.v12"
    assert event_subject("s" * 64, "o" * 64) == f"{'s' * 64}.event.{'o' * 64}.v1"


@pytest.mark.parametrize(
    "name", ["", "OrderPlaced", "1st", "order-placed", "order.placed", "o" * 65, "é", "a\n", "*", ">"]
)
def test_a_name_that_is_not_snake_case_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(InvalidMessage, match="snake_case") as refused:
        event_subject("sea", name)
    assert refused.value.code == "invalid_subject"


@pytest.mark.parametrize("context", ["", "Sea", "sea.x", "sea-x", "_sea", "s" * 65, "sea "])
def test_a_context_that_is_no_slug_is_refused(context: str) -> None:
    for build in (
        lambda: event_subject(context, "x"),
        lambda: command_subject(context, "x"),
        lambda: inbox_subject(context, "x"),
    ):
        with pytest.raises(InvalidMessage, match="context"):
            build()


def test_a_context_named_cmd_is_refused_since_commands_begin_so() -> None:
    with pytest.raises(InvalidMessage, match="cmd"):
        event_subject("cmd", "x")


@pytest.mark.parametrize("version", [0, -1, 1_000_000_000])
def test_a_version_below_one_or_beyond_reason_is_refused(version: int) -> None:
    with pytest.raises(InvalidMessage, match="version"):
        event_subject("sea", "x", version)


@pytest.mark.parametrize(
    ("queue", "subject"),
    [
        ("work", "cmd.demo.default.work.run"),
        ("scribe.write", "cmd.demo.default.scribe.write"),
        ("lab.scribe.write", "cmd.demo.lab.scribe.write"),
        ("lab.scribe.write.down", "cmd.demo.lab.scribe.write.down"),
        ("my-lab.a_b.c-d", "cmd.demo.my-lab.a_b.c-d"),
    ],
)
def test_a_queue_names_workspace_agent_and_verb(queue: str, subject: str) -> None:
    assert command_subject("demo", queue) == subject


@pytest.mark.parametrize("queue", ["", "a.b.c.d.e", "a..b", ".a", "A", "a.*", "a.>", "1a", "a b"])
def test_a_queue_that_makes_no_command_is_refused(queue: str) -> None:
    with pytest.raises(InvalidMessage):
        command_subject("demo", queue)


def test_an_inbox_belongs_to_a_member() -> None:
    assert inbox_subject("demo", "alice-2") == "demo.inbox.alice-2"
    with pytest.raises(InvalidMessage, match="member"):
        inbox_subject("demo", "Alice")


@pytest.mark.parametrize(
    ("subject", "parsed"),
    [
        ("sea.event.order_placed.v2", EventSubject("sea", "order_placed", 2)),
        ("sea.dlq.order_placed.v2", DeadLetterSubject("sea", "order_placed", 2)),
        ("sea.inbox.alice-2", InboxSubject("sea", "alice-2")),
        ("cmd.sea.default.work.run", CommandSubject("sea", "default", "work", "run")),
        ("cmd.sea.lab.scribe.write.down", CommandSubject("sea", "lab", "scribe", "write.down")),
    ],
)
def test_a_subject_is_taken_apart_again(subject: str, parsed: object) -> None:
    assert parse_subject(subject) == parsed


@pytest.mark.parametrize(
    "subject",
    [
        "",
        "sea",
        "sea.event.order_placed",
        "sea.event.order_placed.2",
        "sea.event.order_placed.v0",
        "sea.event.order_placed.v02",
        "sea.event.order_placed.v1.x",
        "sea.events.order_placed.v1",
        "Sea.event.x.v1",
        "sea.event.*.v1",
        "sea.event.>",
        "cmd.sea.default.work",
        "cmd.sea.default.work.",
        "cmd.Sea.default.work.run",
        "sea.inbox.alice.x",
        "evt.something",
    ],
)
def test_what_is_no_subject_of_ours_is_refused(subject: str) -> None:
    with pytest.raises(InvalidMessage, match="is not one of"):
        parse_subject(subject)


@pytest.mark.parametrize(
    ("subject", "dead"),
    [
        ("vibespro.event.vibe_created.v3", "sea.dlq.vibe_created.v3"),
        ("cmd.sea.lab.the-scribe.write.down", "sea.dlq.the_scribe_write_down.v1"),
        (f"cmd.sea.lab.{'a' * 64}.run", f"sea.dlq.{'a' * 64}.v1"),
        ("sea.inbox.alice-2", "sea.dlq.inbox.v1"),
        ("evt.order.placed", "sea.dlq.placed.v1"),
        ("evt.order.placed.v2", "sea.dlq.placed.v1"),
        ("EVT.1", "sea.dlq.other.v1"),
    ],
)
def test_the_dead_are_named_after_what_they_were(subject: str, dead: str) -> None:
    assert dead_letter_subject("sea", subject) == dead
    assert parse_subject(dead)


def test_the_default_streams_of_a_context_take_all_its_subjects_and_no_others() -> None:
    streams = {stream.name: stream for stream in default_streams("sea")}
    assert sorted(streams) == ["SEA_COMMANDS", "SEA_DLQ", "SEA_EVENTS", "SEA_INBOX"]
    subjects = {
        "SEA_EVENTS": event_subject("sea", "x"),
        "SEA_COMMANDS": command_subject("sea", "x"),
        "SEA_INBOX": inbox_subject("sea", "x"),
        "SEA_DLQ": dead_letter_subject("sea", "sea.inbox.x"),
    }
    for name, subject in subjects.items():
        takers = [each for each in streams.values() if any(covers(pattern, subject) for pattern in each.subjects)]
        assert [taker.name for taker in takers] == [name]
    assert stream_name("sea", "events") == "SEA_EVENTS"


@pytest.mark.parametrize(
    ("pattern", "subject", "taken"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a.b", True),
        ("a.>", "a.>", True),
        ("a.*", "a.>", False),
        ("a.b", "a.*", False),
        ("a.*", "a.*", True),
        ("a.b.c", "a.b", False),
    ],
)
def test_a_pattern_takes_what_it_says(pattern: str, subject: str, *, taken: bool) -> None:
    assert covers(pattern, subject) is taken
