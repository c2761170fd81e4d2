"""Which stream takes a subject, and what a stream's state says about what is missing from it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from nats.js.api import RetentionPolicy, StreamConfig, StreamInfo, StreamState

from postroom.delivery.publication.link import MOST_HOLES, Streams, _picture


def info(*subjects: str, messages: int = 5, size: int = 500, holes: int = 0, **config: Any) -> StreamInfo:
    return StreamInfo(
        config=StreamConfig(name="S", subjects=list(subjects), **config),
        state=StreamState(
            messages=messages, bytes=size, first_seq=1, last_seq=messages + holes, consumer_count=0, num_deleted=holes
        ),
        created=datetime(2026, 1, 1, tzinfo=UTC),
    )


@pytest.mark.parametrize(
    ("pattern", "subject", "taken"),
    [
        ("sea.event.>", "sea.event.order.v1", True),
        ("sea.event.>", "sea.event", False),
        ("sea.event.>", "seaXevent.order.v1", False),
        ("*.event.*.v1", "sea.event.order.v1", True),
        ("*.event.*.v1", "sea.event.order.v2", False),
        ("*.event.*.v1", "sea.event.order.placed.v1", False),
        ("sea.event.order.v1", "sea.event.order.v1", True),
        ("sea.event.order.v1", "sea.event.order.v10", False),
    ],
)
def test_a_stream_takes_what_one_of_its_subjects_covers(pattern: str, subject: str, taken: bool) -> None:  # noqa: FBT001
    streams = Streams()
    streams.pictures = [_picture(info("other.>", pattern))]
    assert (streams.of(subject) is not None) == taken


@pytest.mark.parametrize(
    ("config", "keeps_all"),
    [
        ({}, True),
        ({"max_age": 60, "max_bytes": 1000, "max_msgs": 10}, True),
        ({"max_bytes": 550}, False),
        ({"max_msgs": 5}, False),
        ({"max_msgs_per_subject": 1}, False),
        ({"retention": RetentionPolicy.WORK_QUEUE}, True),
        ({"retention": RetentionPolicy.WORK_QUEUE, "holes": MOST_HOLES + 1}, True),
        ({"retention": RetentionPolicy.INTEREST, "holes": MOST_HOLES}, True),
        ({"retention": RetentionPolicy.INTEREST, "holes": MOST_HOLES + 1}, False),
    ],
)
def test_a_stream_keeps_all_where_no_limit_but_age_takes_messages_out_and_what_is_missing_can_be_noted(
    config: dict[str, Any],
    keeps_all: bool,  # noqa: FBT001
) -> None:
    assert _picture(info("s.>", **config)).keeps_all == keeps_all
