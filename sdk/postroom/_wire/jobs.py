"""Jobs: what an operator sees of them, and asks of a broker (docs/contract/jobs.md#jobs-30).

    POST /v1/jobs                StartJob        → StartedJob: 201, or 200 where the same job was started before
    GET  /v1/jobs/messages/{id}                  → MessagePage: what became of one message

The rest is that of every noun (`_wire/nouns.py`). A job is started by names alone: the caller needs none of its code.
"""

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Annotated, Any, Final, Literal
from uuid import UUID

import msgspec

from postroom._wire.administration import Slug
from postroom._wire.names import TRACE, WORD
from postroom._wire.nouns import CHANGES, Change, Noun, Result, Verb
from postroom._wire.operations import Aged
from postroom._wire.programs import Program, Trouble
from postroom._wire.words import counted

JobState = Literal["running", "closed", "completed", "failed", "cancelled"]

Name = Annotated[str, msgspec.Meta(pattern=WORD.schema, description="lower-case letters, digits, `_` and `-`")]
Trace = Annotated[str, msgspec.Meta(pattern=TRACE.schema)]


class StartJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The body of `POST /v1/jobs`: a flow by its name, and the activity that it begins with.

    A start that is repeated under its `id` starts one job. It is closed by the answer that leaves no more than
    `threshold` open.
    """

    mesh: Slug
    flow: Name
    first: Name
    id: UUID
    request: msgspec.Raw
    threshold: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    traceparent: Trace | None = None


class StartedJob(msgspec.Struct, kw_only=True):
    """The answer to a start; `started` is false where the same job was started before."""

    id: UUID
    mesh: str
    flow: str
    started: bool


class JobFilter(Aged, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which jobs a verb means: by `ids`, else all that match the rest; their age is that of `started_at`."""

    ids: Annotated[list[UUID], msgspec.Meta(max_length=CHANGES)] | None = None
    flow: str | None = None
    state: JobState | None = None


class JobsQuery(Aged, kw_only=True, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of `GET /v1/jobs`; a token of one mesh implies it, and without a mesh the query means all."""

    mesh: str | None = None
    flow: str | None = None
    state: JobState | None = None
    cursor: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=CHANGES)] = CHANGES


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """A job; `open` is its semaphore, `error` why it failed or was cancelled.

    `unknown` are the activities for which it waits for a worker that has them.
    """

    id: UUID
    mesh: str
    flow: str
    state: str
    open: int
    started_at: datetime
    ended_at: datetime | None
    error: str | None
    unknown: list[str] = []


class JobPage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Jobs, newest first."""

    jobs: list[Job]
    next_cursor: str | None = None


class Activity(msgspec.Struct, kw_only=True, frozen=True):
    """An activity of a job; `ledger` is its 15 digits, `cycle` the one of its parent that spawned it, from 0.

    `request` is what it was spawned with. `attempts` counts those of leg 1, `deliveries` how often the message that
    came most often was delivered. `error` is why it failed, why the attempt before failed, or what it waits for.
    """

    id: UUID
    parent: UUID | None
    name: str
    cycle: int | None
    request: msgspec.Raw
    state: str
    attempts: int
    deliveries: int
    ledger: str
    spawned_at: datetime
    error: str | None


class JobNote(msgspec.Struct, kw_only=True, frozen=True):
    """What an operator did to a job."""

    at: datetime
    verb: str
    actor: str
    reason: str


class JobTree(msgspec.Struct, kw_only=True, frozen=True):
    """A job whole: its activities, of which children come in their order, and what operators did to it."""

    job: Job
    activities: list[Activity]
    log: list[JobNote]


class JobCounts(msgspec.Struct, kw_only=True, frozen=True):
    """How many jobs have not ended, how many have failed, and how many steps wait for a worker that has them.

    `flows` says which have jobs that have not ended, and how many.
    """

    running: int
    failed: int
    unknown: int
    flows: dict[str, int] = {}

    def troubles(self) -> Iterator[Trouble]:
        """Yield what is wrong with jobs."""
        for count, thing, what, help_ in (
            (self.failed, "job", "failed", "postroom jobs list --state failed"),
            (self.unknown, "step", "that no worker knows", "postroom jobs list"),
        ):
            if count:
                yield Trouble("jobs", f"{counted(count, thing)} {what}", help_, "look")

    def unattended(self, programs: Iterable[Program]) -> Iterator[Trouble]:
        """Yield the flows whose jobs cannot go on, since no worker among `programs` has them.

        That one which has them is away is its own trouble.
        """
        present = {flow for one in programs for part in one.parts for flow in part.flows}
        for flow in sorted(self.flows.keys() - present):
            has = counted(self.flows[flow], "job has", "jobs have")
            lack = f"{has} not ended, and no worker that reports has the flow"
            yield Trouble(f"flow {flow}", lack, f"postroom jobs list --flow {flow}", "wrong")


class JobMessage(msgspec.Struct, kw_only=True, frozen=True):
    """What a message was to one activity: a sentence; where leg 2 ran for it, its ledger and how often it came.

    `said` is its body where that is known, else null; of an activity, what it was spawned with.
    """

    id: str
    what: str
    sentence: str
    mesh: str
    flow: str
    job: UUID
    job_state: str
    activity: UUID
    name: str
    ledger: str | None
    deliveries: int | None
    said: msgspec.Raw
    error: str | None


class MessagePage(msgspec.Struct, kw_only=True):
    """What a message was to each activity that it concerned."""

    messages: list[JobMessage]


class JobStarted(msgspec.Struct, kw_only=True):
    """The body of the event `job_started`."""

    job: UUID
    flow: str


class JobCompleted(JobStarted, kw_only=True):
    """The body of the event `job_completed`: with what the completion returned."""

    result: Any


class JobFailed(JobStarted, kw_only=True):
    """The body of the event `job_failed`: which activity failed, and why."""

    activity: UUID
    name: str
    ledger: str
    error: str


class JobOperated(JobStarted, kw_only=True):
    """The body of the events `job_retried` and `job_cancelled`: who did it, and why."""

    by: str
    reason: str


JOBS: Final[Noun[JobsQuery, JobPage, JobTree, Any, JobCounts, JobFilter, Job]] = Noun(
    "job",
    "jobs, newest first",
    "/v1/jobs",
    JobsQuery,
    JobPage,
    Change[JobFilter],
    Result[Job],
    {
        "retry": Verb(
            "Continue failed jobs where they stopped: what is done stays done, and the rest is sent again.",
            "retried",
            frozenset({"failed"}),
        ),
        "cancel": Verb(
            "End running, closed or failed jobs permanently: no step commits any more, and later messages are ignored.",
            "cancelled",
            frozenset({"running", "closed", "failed"}),
            grave=True,
        ),
    },
    whole=JobTree,
    counts=JobCounts,
)
