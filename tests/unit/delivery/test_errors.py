"""What a loop says while it waits: which server failed it, and how."""

from __future__ import annotations

import nats.errors
import pytest

from postroom.delivery.errors import why_passing
from postroom.errors import Unavailable


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (TimeoutError(), "Postgres failed: no answer in time"),
        (nats.errors.TimeoutError(), "looking: JetStream does not answer in time"),
        (Unavailable.of("nats_unavailable", "it is away"), "it is away"),
    ],
)
def test_what_a_loop_waits_for_is_named(error: Exception, sentence: str) -> None:
    assert why_passing(error, "looking") == sentence
