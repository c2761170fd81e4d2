"""In which state a job or an activity is, as a word for people (docs/jobs.md draws both).

A job's state is a column. An activity's is read off its ledger and its messages, here and nowhere else.
"""

from __future__ import annotations

from typing import Final, NamedTuple, get_args

from postroom._wire.jobs import JobState
from postroom.ledger.digits import decode_activity

JOB_STATES: Final = get_args(JobState)
ENDED: Final = ("completed", "failed", "cancelled")
ACTIVITY_STATES: Final = (
    "waiting",
    "asking",
    "asked",
    "working",
    "completing",
    "done",
    "failed",
    "stopped",
    "unknown",
)


class Progress(NamedTuple):
    """How far an activity is: its ledger, what it is owed and was given, and which of its messages are under way."""

    ledger: int
    answers_due: int = 1
    answers_taken: int = 0
    undone: int = 0  # messages that were entered, and whose step 2 is not done
    closing: bool = False  # one of them closed the job, and its completion tasks are not done
    failed: bool = False
    unknown: bool = False  # a message of it was set aside, by a worker that does not have it


def state_of(progress: Progress, job_state: str) -> str:
    """Name the state of an activity of a job that is in `job_state`.

    Whatever is not done when its job ends is `stopped`; the one that failed is `failed`. What waits for a worker that
    has the activity is `unknown`.
    """
    if progress.failed:
        return "failed"
    state = _under_way(progress)
    if job_state in ENDED:
        return "done" if state == "done" else "stopped"
    return "unknown" if progress.unknown else state


def _under_way(progress: Progress) -> str:
    read = decode_activity(progress.ledger)
    if not read.leg1_complete:
        return "asking" if read.leg1_attempts else "waiting"
    if progress.closing:
        return "completing"
    if progress.undone:
        return "working"
    return "done" if progress.answers_taken >= progress.answers_due else "asked"
