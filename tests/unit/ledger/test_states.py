"""The word for an activity's state is read off its ledger, its messages, and its job."""

from __future__ import annotations

from typing import get_args

import pytest

from postroom._wire.jobs import JobState
from postroom._wire.sql import read_sql
from postroom.ledger.operations import ENDED, Progress, state_of

WORDS = {
    "waiting": Progress(0),
    "asking": Progress(3_000_000_000_000),
    "asked": Progress(1_100_000_000_000),
    "working": Progress(1_100_000_000_001, answers_taken=1, undone=1),
    "completing": Progress(1_111_000_000_001, answers_taken=1, closing=True),
    "done": Progress(1_111_000_000_001, answers_taken=1),
    "failed": Progress(1_100_000_000_001, answers_taken=1, undone=1, failed=True),
}


@pytest.mark.parametrize("word", WORDS)
def test_an_activity_of_a_running_job_has_the_word_of_its_ledger(word: str) -> None:
    assert state_of(WORDS[word], "running") == word


def test_an_activity_that_owes_another_cycle_is_asked_and_not_done() -> None:
    assert state_of(Progress(1_111_000_000_001, answers_due=2, answers_taken=1), "running") == "asked"


@pytest.mark.parametrize("ended", ENDED)
@pytest.mark.parametrize("word", WORDS)
def test_what_is_not_done_when_its_job_ends_is_stopped(word: str, ended: str) -> None:
    assert state_of(WORDS[word], ended) == (word if word in {"done", "failed"} else "stopped")


def test_what_waits_for_a_worker_that_has_the_activity_is_unknown_until_its_job_ends() -> None:
    progress = Progress(1_100_000_000_000, unknown=True)
    assert state_of(progress, "running") == "unknown"
    assert {state_of(progress, ended) for ended in ENDED} == {"stopped"}


def test_the_states_of_a_job_are_those_of_its_table() -> None:
    listed = ", ".join(f"'{state}'" for state in get_args(JobState))
    assert f"CHECK (state IN ({listed}))" in read_sql("postroom.ledger", "migrations/0001_jobs.sql")
