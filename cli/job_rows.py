"""Jobs for people: as rows, as fields and as a tree, and what became of one message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from cli.output import ago

if TYPE_CHECKING:
    from postroom.ledger.messages import MessageRow
    from postroom.ledger.operating import ActivityRow, JobRow, JobTree

COLUMNS: Final = ("JOB", "MESH", "FLOW", "STATE", "OPEN", "AGE", "ENDED", "ERROR")
STEPS: Final = ("STEP", "STATE", "TRIES", "DELIVERIES", "LEDGER", "AGE", "REQUEST", "ERROR")
_REQUEST_CHARACTERS: Final = 30  # of what a step was spawned with, in a table
_SAID_CHARACTERS: Final = 200  # of what a message says
_MEANINGS: Final = {"closed": "closed (every step is done, and the completion tasks are not)"}


def cells(job: JobRow) -> tuple[Any, ...]:
    """Return a job as a row of `COLUMNS`."""
    error = job.error or _waits_for(job)
    return (job.id, job.mesh, job.flow, job.state, job.open, ago(job.started_at), ago(job.ended_at), error)


def _waits_for(job: JobRow) -> str | None:
    return f"waits for a worker that has {', '.join(job.unknown)}" if job.unknown else None


def described(job: JobRow) -> list[tuple[str, Any]]:
    """Return a job as named fields."""
    return [
        ("job", job.id),
        ("mesh", job.mesh),
        ("flow", job.flow),
        ("state", _MEANINGS.get(job.state, job.state)),
        ("", _waits_for(job)),
        ("open", job.open),
        ("started", job.started_at),
        ("ended", job.ended_at),
        ("reason", job.error),
    ]


def told(found: MessageRow) -> list[tuple[str, Any]]:
    """Return as named fields what the ledgers know of a message."""
    return [
        ("id", found.id),
        ("is", found.sentence),
        ("activity", f"{found.activity} ({found.name})"),
        ("job", f"{found.job} ({found.job_state})"),
        ("mesh", found.mesh),
        ("flow", found.flow),
        ("deliveries", found.deliveries),
        ("ledger", found.ledger),
        ("says", None if found.said is None else _shortened(bytes(found.said).decode(), _SAID_CHARACTERS)),
        ("error", found.error),
    ]


def drawn(found: JobTree) -> Iterator[tuple[str, ActivityRow]]:
    """Draw the tree: what stands before each step, and the step."""
    from postroom.ledger.drawing import draw  # noqa: PLC0415

    return draw(found.activities, key=lambda activity: activity.id, parent=lambda activity: activity.parent)


def folded(found: JobTree) -> Iterator[tuple[str, ActivityRow, int]]:
    """Draw the tree with leaves that look the same as one line, and their number."""
    from postroom.ledger.drawing import draw, fold  # noqa: PLC0415

    folded = fold(
        found.activities,
        key=lambda activity: activity.id,
        parent=lambda activity: activity.parent,
        alike=lambda activity: (step_name(activity), activity.state),
    )
    for lead, (activity, count) in draw(folded, key=lambda each: each[0].id, parent=lambda each: each[0].parent):
        yield lead, activity, count


def step_name(activity: ActivityRow) -> str:
    """Name a step, and the cycle of its parent that spawned it, where that is not the first."""
    return f"{activity.name} (cycle {activity.cycle})" if activity.cycle else activity.name


def _shortened(said: str, most: int) -> str | None:
    """Cut a request or an answer so that it stays a line; none is nothing."""
    if said == "null":
        return None
    return said if len(said) <= most else said[: most - 1] + "…"


def step_cells(lead: str, activity: ActivityRow) -> tuple[Any, ...]:
    """Return a step as a row of `STEPS`, behind what is drawn before it."""
    return (
        lead + step_name(activity),
        activity.state,
        activity.attempts,
        activity.deliveries,
        activity.ledger,
        ago(activity.spawned_at),
        _shortened(bytes(activity.request).decode(), _REQUEST_CHARACTERS),
        activity.error,
    )
