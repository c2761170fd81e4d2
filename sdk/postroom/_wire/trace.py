"""The story of one message, step by step, and where it waits now (docs/contract/operate.md#operate-51).

    GET /v1/trace/{id}   of the broker                → Story: what is in Postgres, and what consumers still wait for
    GET /v1/trace/{id}   of a daemon,    TraceQuery   → Story: its own rows, and its inbox

Each answers for what it keeps; `follow_trace` asks both and puts the parts together.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal

import msgspec

from postroom._wire.moment import EPOCH
from postroom._wire.names import MESSAGE_ID
from postroom._wire.sends import FailedPosts, OperatorAction, OutboxRow, RowStatus
from postroom._wire.spark import SPARK_ID, SparkTask
from postroom._wire.words import when
from postroom.errors import NotFound, PostroomError, Problem

Outcome = Literal["done", "running", "waiting", "dead", "ended"]
"""The outcome of a step.

`waiting` goes on, by itself or with help; `dead` does not; `ended` was ended by an operator, or by another attempt.
"""

_MOST: Final = 20  # ids to ask one for because the other's answer has them
NAME: Final = "client_message_id"
TRACEPARENT: Final = "traceparent"
REPAIRED: Final = "its cause is repaired"  # the reason in suggested commands
_OUTCOMES: Final[Mapping[RowStatus, Outcome]] = {
    "pending": "waiting",
    "inflight": "running",
    "done": "done",
    "dead": "dead",
    "aborted": "ended",
}
_PHASES: Final = {  # in which the broker refuses a message (docs/contract/accept.md#accept-9)
    "idempotency_key_reused": "B0",
    "fingerprint_mismatch": "B1",
    "payload_too_large": "B1",
    "rate_limited": "B1",
    "member_not_found": "B2",
    "not_subscribed": "B2",
    "queue_not_found": "B2",
    "topic_not_found": "B2",
}


class Step(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """One thing that happened to a message: `what`, to which `thing`, where, when, and its outcome.

    `id` names it within the story, and `parent` the step that it follows from; `by` is the operator who did it.
    Where several attempts were made, `attempt` is how many, and the rest is about the last.
    """

    id: str
    what: str
    thing: str
    outcome: Outcome
    parent: str | None = None
    at: datetime | None = None
    place: str | None = None
    attempt: int | None = None
    by: str | None = None
    reason: str | None = None
    ids: dict[str, str] = {}


class Wait(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """Where the story stops for now: at which step, why, and the command that helps, if there is one."""

    step: str
    why: str
    help: str | None = None


class Story(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What became of a message, a row, an event, a dead letter or a job, with what it caused and what caused it.

    Steps are in the order of time, a parent before its children. `more` says that there are more than are shown,
    `unread` what could not be read.
    """

    waits: list[Wait]
    steps: list[Step]
    more: bool = False
    unread: list[Problem] = []


class TraceQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The query string of the daemon's `GET /v1/trace/{id}`: the message's sender, to find it in the inbox too."""

    sender: str | None = None


Ask = Callable[[str, str | None], Awaitable[Story]]
"""Asks the broker or the daemon for its part: by an id, with the sender where that is known; raises `NotFound`."""


async def follow_trace(id_: str, *, broker: Ask | None, daemon: Ask | None) -> Story:
    """Ask both for an id and for the ids in the other's answer, and put the parts together.

    One that cannot be asked is `unread`. Without any part it raises why: `NotFound` where neither knows the id.
    """
    parts: dict[Ask, tuple[dict[str, Step], dict[str, Wait]]] = {}
    unread: list[Problem] = []
    more = False
    errors: list[PostroomError] = []
    away: list[Ask] = []

    async def add_part(keeper: Ask | None, one: str, sender: str | None = None) -> dict[str, str | None]:
        """Ask for one part; return the ids of the messages in it, with their senders."""
        nonlocal more
        if keeper is None or keeper in away:
            return {}
        try:
            part = await keeper(one, sender)
        except PostroomError as error:
            errors.append(error)
            if not isinstance(error, NotFound):
                unread.append(error.problem)
                away.append(keeper)
            return {}
        steps, waits = parts.setdefault(keeper, ({}, {}))
        steps.update((step.id, step) for step in part.steps)
        waits.update((wait.step, wait) for wait in part.waits)
        unread.extend(part.unread)
        more |= part.more
        return {step.ids[NAME]: step.ids.get("sender") for step in part.steps if NAME in step.ids}

    sent = await add_part(broker, id_)
    rows = await add_part(daemon if broker is None or MESSAGE_ID.allows(id_) else None, id_, sent.get(id_))
    for name in list(rows.keys() - sent.keys())[:_MOST]:  # it was a row's id, or the row was requeued
        sent |= await add_part(broker, name)
    for name, sender in list(sent.items())[:_MOST]:
        if name != id_:
            await add_part(daemon, name, sender)
    if not parts:
        raise next((error for error in errors if not isinstance(error, NotFound)), *errors[:1])
    known, waits = parts.get(broker, ({}, {})) if broker is not None else ({}, {})
    here, waits_here = parts.get(daemon, ({}, {})) if daemon is not None else ({}, {})
    waits = {id_: wait for id_, wait in waits.items() if id_ not in here} | waits_here  # it knows its rows best
    return compose(known | here, waits, more=more, unread={problem.code: problem for problem in unread}.values())


def _of_spark(step: Step) -> Step | None:
    """Return the first step of a message that Spark's writer made of a row, by its id and its traceparent."""
    found = SPARK_ID.fullmatch(step.ids.get(NAME, "")) if step.what in ("kept", "accepted") else None
    if found is None:
        return None
    name, namespace, key = found.group(0, 1, 2)
    row = "a row whose key is hashed" if key.startswith("~") else f"the row {key}"
    reason, task, parent = f"{row} of the writes with the namespace's hash {namespace}", None, None
    if (task := SparkTask.read(step.ids.get(TRACEPARENT))) is not None:
        reason = f"{row}, by the partition {task.partition} of {task.write}"
        parent = None if task.job is None else f"job:{task.job}"
    return Step(
        id=f"spark:{name}", what="written", thing=name, outcome="done", parent=parent, place="Spark", reason=reason
    )


def compose(
    steps: dict[str, Step], waits: Mapping[str, Wait], *, more: bool = False, unread: Iterable[Problem] = ()
) -> Story:
    """Make a story of steps and waits, each by the id of its step.

    A step without a time comes with its parent, and what the broker accepted follows from its row's last post; of waits
    that follow from each other only the last is kept.
    """
    for step in list(steps.values()):
        if step.parent is None and (written := _of_spark(step)) is not None:
            steps[written.id] = written
            steps[step.id] = msgspec.structs.replace(step, parent=written.id)
    sent = {step.ids[NAME]: step.id for step in steps.values() if step.what == "kept"}
    sent |= {step.thing: step.id for step in steps.values() if step.what == "posted"}
    for step in [step for step in steps.values() if step.what == "accepted" and step.ids[NAME] in sent]:
        steps[step.id] = msgspec.structs.replace(step, parent=sent[step.ids[NAME]])

    def line_of(step: Step) -> list[Step]:
        """Return a step and those that it follows from, the nearest first."""
        line = [step]
        while (parent := steps.get(line[-1].parent or "")) is not None and parent not in line:
            line.append(parent)
        return line

    lines = {step.id: line_of(step) for step in steps.values()}
    times = {id_: max((one.at for one in line if one.at is not None), default=EPOCH) for id_, line in lines.items()}
    order = {one.id: one for id_ in sorted(times, key=times.__getitem__) for one in reversed(lines[id_])}
    above = {one.id for id_ in waits for one in lines[id_][1:]}
    last = [wait for id_, wait in waits.items() if id_ not in above]
    return Story(waits=last, steps=list(order.values()), more=more, unread=list(unread))


class StoryDraft:
    """A story while it is put together: its steps, and why some of them wait, by the ids of the steps."""

    def __init__(self, place: str | None = None) -> None:
        """`place` is where steps happened, unless one says otherwise."""
        self.steps: dict[str, Step] = {}
        self.waits: dict[str, Wait] = {}
        self._place = place

    def add(self, kind: str, name: str, what: str, parent: str | None = None, **rest: Any) -> Step:
        """Add a step; its `thing` is the name and its outcome is done, unless `rest` says otherwise."""
        given = {key: value for key, value in rest.items() if value is not None}
        said = {"thing": name, "outcome": "done", "place": self._place, **given}
        step = Step(id=f"{kind}:{name}", what=what, parent=parent, **said)
        self.steps[step.id] = step
        return step

    def wait(self, step: Step, why: str, help_: str | None = None) -> None:
        """Record why a step waits, and the command that helps, if there is one."""
        self.waits[step.id] = Wait(step=step.id, why=why, help=help_)


def steps_of(
    rows: Sequence[OutboxRow], log: Sequence[OperatorAction], failed_posts: Sequence[FailedPosts], place: str
) -> dict[str, Step]:
    """Return the steps of outbox rows by id, each row before its successor: kept, each post, and what operators did."""
    draft = StoryDraft(place)
    successors: dict[str, str] = {}  # the step that each row follows from
    for row in rows:
        ids = {NAME: row.client_message_id, "to": row.destination, "submitted_by": row.submitted_by or ""}
        ids |= {} if row.traceparent is None else {TRACEPARENT: row.traceparent}
        parent, outcome = successors.get(row.id), _OUTCOMES[row.status]
        kept = draft.add("row", row.id, "kept", parent, outcome=outcome, at=row.enqueued_at, ids=ids)
        failed = [posts for posts in failed_posts if posts.row_id == row.id]
        if row.status == "inflight" or row.attempts or row.delivered_at or row.last_error:
            code = (row.last_error or "").partition(":")[0]
            # of what failed last, the row itself says more
            known = failed and row.status not in ("done", "inflight") and failed[-1].code == code
            latest = failed.pop() if known else None
            phase = _PHASES.get(code, "B1" if code.startswith("invalid_") else None)
            reason = row.last_error if phase is None else f"refused in {phase}: {row.last_error}"
            if row.status == "done":
                reason = "the broker had accepted it before" if row.duplicate else None
            elif row.unanswered_at is not None:
                reason = f"the broker did not answer, and may have accepted it: {reason}"
            what, at = "expired" if code == "expired" else "posted", latest.at if latest else row.unanswered_at
            draft.add(
                "posted", row.id, what, kept.id, thing=row.client_message_id, outcome=outcome,
                at=row.delivered_at or at, attempt=row.attempts, reason=reason, ids=_post_ids(latest),
            )  # fmt: skip
        for number, posts in enumerate(failed):
            draft.add(
                "tried", f"{row.id} {number}", "tried", kept.id, thing=row.client_message_id, outcome="ended",
                at=posts.at, attempt=posts.times, reason=posts.code, ids=_post_ids(posts),
            )  # fmt: skip
        for number, act in enumerate(act for act in log if act.row_id == row.id):
            step = draft.add(
                "act", f"{row.id} {number}", act.verb, kept.id, thing=row.id,
                outcome="ended" if act.verb == "abort" else "done", at=act.at, by=act.actor,
                reason="; ".join(filter(None, (act.reason, act.detail))),
            )  # fmt: skip
            if act.verb == "requeue" and row.superseded_by is not None:
                successors[row.superseded_by] = step.id
    return draft.steps


def help_for(row: OutboxRow, mesh: str) -> str:
    """Return the commands that help a dead row of a mesh: create what was missing, then requeue it."""
    code, (_, _, name) = (row.last_error or "").partition(":")[0], row.destination.partition(":")
    missing = {
        "topic_not_found": f"postroom topic create {name} --mesh {mesh}",
        "queue_not_found": f"postroom queue create {name} --mesh {mesh}",
        "member_not_found": f"postroom member create {name} --mesh {mesh}",
        "not_subscribed": f"postroom topic subscribe {name}",
    }
    again = f"postroom outbox requeue {row.id} --reason '{REPAIRED}'"
    return " && ".join(filter(None, (missing.get(code), again)))


def _post_ids(posts: FailedPosts | None) -> dict[str, str]:
    """Return where posts went, how long the last took, and when the first of several began."""
    if posts is None:
        return {}
    since = {"since": when(posts.since)} if posts.times > 1 else {}
    return {"broker": posts.broker, "seconds": f"{posts.seconds:g}", **since}
