"""How an activity's ledger moves, where it must stop, and the state read off it (docs/contract/jobs.md#jobs-8).

Every function here is pure: the database moves the same digits by the same weights (`queries.sql`), and the tests hold
one against the other. Whatever has no room for one more raises `Overflow` and changes nothing. docs/jobs.md draws the
states.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from postroom._wire.digits import (
    ENTRIES,
    LEG1_ATTEMPT,
    LEG2_ENTRY,
    MOST_LEG1_ATTEMPTS,
    MOST_LEG2_ENTRIES,
    decode_activity,
    render,
)
from postroom.ledger.errors import Overflow

ENDED: Final = ("completed", "failed", "cancelled")  # states of a job


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
    read = decode_activity(progress.ledger)
    if not read.leg1_complete:
        state = "asking" if read.leg1_attempts else "waiting"
    elif progress.closing:
        state = "completing"
    elif progress.undone:
        state = "working"
    else:
        state = "done" if progress.answers_taken >= progress.answers_due else "asked"
    if job_state in ENDED:
        return "done" if state == "done" else "stopped"
    return "unknown" if progress.unknown else state


def enter_leg1(activity: int) -> int:
    """Count an attempt of leg 1; the thousandth raises `Overflow`."""
    if activity // LEG1_ATTEMPT >= MOST_LEG1_ATTEMPTS:
        raise Overflow.of_leg1(render(activity))
    return activity + LEG1_ATTEMPT


def enter_leg2(activity: int) -> int:
    """Count an entry into leg 2; one more than 99,999,999 raises `Overflow`."""
    if activity % ENTRIES >= MOST_LEG2_ENTRIES:
        raise Overflow.of_leg2(render(activity))
    return activity + LEG2_ENTRY
