"""The story of a message, as far as the broker knows it (docs/contract/operate.md#operate-51).

All of it is looked up in Postgres by indexes, at one moment. The takers of what was published are asked as well
(`broker.takers`), but no host's files are read: daemons report the rows that died there, and may never have come here.

A member sees only that the messages that it may read were accepted, and where they were published, and the rows of its
mesh that died: the rest is for an admin.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final
from uuid import UUID

import asyncpg
import msgspec
from aiohttp import web
from msgspec.structs import replace

from broker.authentication import PRINCIPAL, Member, Principal, member_of
from broker.operator import BRIEFLY, Handlers, Nats
from broker.requests import decode_body
from broker.takers import MOST, ROUNDS, Draft, Published, Taker, Takers
from postroom._wire.dead_letters import DeadLetter
from postroom._wire.jobs import JOBS, Activity, JobMessage, JobTree
from postroom._wire.sends import EndedRow, EndedRows
from postroom._wire.spark import SparkTask, partition_id
from postroom._wire.sql import load_queries
from postroom._wire.trace import NAME, REPAIRED, TRACEPARENT, Outcome, compose, help_for, steps_of
from postroom._wire.words import when
from postroom.chassis.postgres import Connection, count_changed, uuid_of
from postroom.chassis.routes import json_response
from postroom.delivery.dead_letters.operations import SENT_AGAIN, replay_id
from postroom.delivery.subjects import mesh_named_by, parse_subject
from postroom.errors import NotFound, Problem, Unavailable
from postroom.ledger.operations import find_message, show_job

QUERIES: Final = load_queries("broker", "trace.sql")

_MOST_ENDED: Final = 10_000  # rows of one member whose reports are kept
_OTHER_NAMES: Final = re.compile(  # of a message: for a recipient, in a letter's id, of a replay, published again
    r"(?P<delivered>[0-9a-f]{8}-[0-9a-f-]{27})\.[a-z][a-z0-9_-]*(?:/[0-9]+)?"
    r"|(?:dead:[^:]*:)?(?P<id>.+?)(?:~[A-Za-z0-9_-]+\.[0-9]+)?(?:/[0-9]+)?"
)
_ENDS_JOB: Final = {name for name, verb in JOBS.verbs.items() if verb.grave}
_OF_JOB: Final[Mapping[str, Outcome]] = {"completed": "done", "failed": "dead", "cancelled": "ended"}
_OF_ACTIVITY: Final[Mapping[str, Outcome]] = {
    "waiting": "waiting",
    "asked": "waiting",
    "unknown": "waiting",
    "done": "done",
    "failed": "dead",
    "stopped": "ended",
}


@dataclass(frozen=True, eq=False)
class Traces(Handlers):
    """The handlers of the routes."""

    _nats: Nats

    async def trace(self, request: web.Request) -> web.Response:
        """`GET /v1/trace/{id}`."""
        id_, principal = request.match_info["id"], request[PRINCIPAL]
        async with (
            self.reading(request) as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            draft = _PostgresDraft(connection, principal)
            await draft.find(id_)
        unread: list[Problem] = []
        silent: set[str] = set()
        if draft.operates and (draft.published or not draft.steps):
            async with self._nats.opened(BRIEFLY) as (js, problem):
                unread += [] if problem is None else [problem]
                if js is not None:
                    takers = Takers(js, draft)
                    if not draft.steps:  # it may be between two agents, which no database knows
                        causes = await takers.ask_agents(id_)
                        async with self.reading(request) as connection, connection.transaction(readonly=True):
                            await draft.add_causes(connection, causes)
                    await takers.ask_consumers()
                    silent = takers.silent
        others = ", or you may not see it: try the token of an admin"
        if silent and (not draft.steps or draft.unplaced()):
            agents, where = " or ".join(sorted(silent)), f"`postroom agent trace --message {id_[:128]}`"
            others = f"; the store of an agent that does not run ({agents}) may know more: try {where} on its host"
            unread.append(Unavailable.of("agents_stopped", f"the broker does not know all of it{others}").problem)
        if not draft.steps:
            raise NotFound.of("trace_not_found", f"the broker knows nothing under the id {id_[:128]!r}{others}")
        return json_response(compose(draft.steps, draft.waits, more=draft.more, unread=unread))

    async def report(self, request: web.Request) -> web.Response:
        """`POST /v1/ended_rows`: from a daemon, about its own rows; it is idempotent."""
        member, body = member_of(request), await decode_body(request, EndedRows)
        latest = {ended.row.id: ended for ended in body.rows}
        kept = [ended for ended in latest.values() if ended.row.status != "done"]
        columns = (
            [ended.row.id for ended in kept],
            [ended.row.client_message_id for ended in kept],
            [ended.successor for ended in kept],
            [msgspec.json.encode(ended).decode() for ended in kept],
        )
        async with self.reading(request) as connection, connection.transaction():
            done = list(latest.keys() - set(columns[0]))
            await connection.execute(QUERIES["forget_ended_rows"], member.member_id, done)
            await connection.execute(QUERIES["keep_ended_rows"], member.mesh_id, member.member_id, body.host, *columns)
            await connection.execute(QUERIES["limit_ended_rows"], member.member_id, _MOST_ENDED)
        return web.Response(status=204)


class _PostgresDraft(Draft):
    """A story from what Postgres knows."""

    def __init__(self, connection: Connection, principal: Principal) -> None:
        super().__init__()
        self.operates = principal.role != "member"
        self._connection = connection
        self._mesh = principal.mesh_id
        self._reader = principal.member_id if isinstance(principal, Member) and not self.operates else None
        self._meshes: list[int] = []
        self._covered: set[str] = set()  # the messages that were looked up
        self._sent_after: dict[tuple[str, str], str] = {}  # of messages, by mesh: the requeue that each is from
        self._causes: dict[str, str] = {}  # of messages: the step that each follows from

    async def find(self, id_: str) -> None:
        """Add all that is known of a message, by any of its names."""
        reach = await self._connection.fetchrow(QUERIES["find_reach"], self._mesh)
        assert reach is not None  # noqa: S101 - it aggregates
        self._meshes, self.contexts = reach["ids"] or [], reach["slugs"] or []
        names = {id_}
        if (other := _OTHER_NAMES.fullmatch(id_)) is not None:
            names |= set(filter(None, other.groups()))
        if self.operates and id_.isascii() and id_.isdigit() and len(id_) < len(str(2**63)):
            found = await self._connection.fetchval(QUERIES["find_letter"], int(id_), self.contexts)
            names |= {found} - {None}
        fresh: dict[str, str | None] = dict.fromkeys(names)
        if self.operates:
            for name in names:
                fresh |= await self._add_job(name)
        fresh |= dict.fromkeys(await self._add_ended_rows(names))
        above = await self._follow(fresh, effects=self.operates)
        unseen = {name: context for name, context in above.items() if name not in self._covered}
        await self._follow(unseen, effects=False)
        for step in [step for step in self.steps.values() if step.what == "accepted"]:
            task = SparkTask.read(step.ids.get(TRACEPARENT)) if self.operates else None
            if task is not None and task.job is not None:
                await self._add_write(task.job, task.partition)
            if (requeue := self._sent_after.get((step.ids["mesh"], step.ids[NAME]))) is not None:
                self.steps[step.id] = replace(step, parent=requeue)
        for name, parent in self._causes.items():
            if parent in self.steps and (caused := self.steps.get(f"message:{name}")) is not None:
                self.steps[caused.id] = replace(caused, parent=parent)

    async def add_causes(self, connection: Connection, causes: Iterable[str]) -> None:
        """Add the messages that agents named as the first causes of theirs."""
        self._connection = connection
        await self._follow(dict.fromkeys(causes), effects=False)
        for step in self.unplaced():
            self.steps[step.id] = replace(step, parent=self.place_of(step.thing))

    async def _add_ended_rows(self, names: set[str]) -> set[str]:
        """Add rows that ended on their daemons, with those before and after; return what else to look for."""
        found: dict[str, tuple[asyncpg.Record, EndedRow]] = {}
        wanted, covered = names, set[str]()
        for _ in range(ROUNDS):
            covered |= wanted
            rows = await self._connection.fetch(QUERIES["find_ended_rows"], list(wanted), self._meshes, MOST + 1)
            pairs = [(row, msgspec.json.decode(row["report"], type=EndedRow)) for row in self.limited(rows)]
            found |= {row["row_id"]: (row, one) for row, one in pairs}
            wanted = {name for _, one in pairs for name in (one.row.client_message_id, one.successor) if name}
            if not (wanted := wanted - covered):
                break
        for row, ended in (found[id_] for id_ in sorted(found)):  # ids of rows are in the order of time
            one, log = ended.row, ended.log if self.operates else []
            steps = list(steps_of([one], log, ended.failed_posts, f"postroomd on {row['host']}").values())
            parent = next((step.id for step in reversed(steps) if step.what == "requeue"), steps[0].id)
            if row["successor"] is not None:
                self._sent_after[row["mesh"], row["successor"]] = parent
            earlier = self._sent_after.get((row["mesh"], one.client_message_id))
            ids = {**steps[0].ids, "mesh": row["mesh"], "sender": row["member"]}
            steps[0] = replace(steps[0], parent=earlier, ids=ids)
            self.steps |= {step.id: step for step in steps}
            if one.status == "dead":
                why = f"it died on {row['host']}, and is not posted again: {one.last_error}"
                self.wait(steps[0], why, f"{help_for(one, row['mesh'])}  # on {row['host']}")
        return covered

    async def _follow(self, fresh: dict[str, str | None], *, effects: bool) -> dict[str, str | None]:
        """Add messages, and step by step those that they caused (`effects`), or else those that caused them.

        Return those that caused the first ones.
        """
        first: dict[str, str | None] | None = None
        for _ in range(ROUNDS):
            if not fresh:
                return first or {}
            self._covered |= fresh.keys()
            caused, causes = await self._add_messages(fresh, effects=effects)
            first = causes if first is None else first
            found = caused if effects else causes
            fresh = {name: context for name, context in found.items() if name not in self._covered}
        self.more = True
        return first or {}

    async def _add_messages(
        self, wanted: Mapping[str, str | None], *, effects: bool
    ) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """Add messages by their ids, each with its context where that is known.

        Return the messages that they caused, and those that caused them.
        """
        contexts = dict(wanted)
        uuids = list(filter(None, map(uuid_of, wanted)))
        found = await self._connection.fetch(QUERIES["find_messages"], list(wanted), uuids, self._meshes, self._reader)
        for row in found:
            contexts.pop(row["client_message_id"], None)
            contexts[str(row["broker_message_id"])] = row["mesh"]
            self._add_accepted(row)
        accepted = [row["broker_message_id"] for row in found]
        uuids = [*{*uuids, *accepted}] if self.operates else accepted
        caused: dict[str, str | None] = {}
        causes: dict[str, str | None] = {}
        for row in self.limited(
            await self._connection.fetch(QUERIES["find_events"], uuids, self.contexts, effects, MOST + 1)
        ):
            name, context = str(row["id"]), parse_subject(row["subject"]).context
            if name not in contexts:
                caused[name] = context
                self._causes[name] = f"message:{row['causation_id']}"
                continue
            contexts[name] = context
            if row["causation_id"] is not None and self.operates:
                causes[str(row["causation_id"])] = None
                self._causes.setdefault(name, f"message:{row['causation_id']}")
            if f"message:{name}" not in self.steps:
                self.add("message", name, "emitted", at=row["occurred_at"], place=row["subject"], ids={"mesh": context})
            self._add_published(row, "event", name, row["subject"])
        for row in self.limited(await self._connection.fetch(QUERIES["find_deliveries"], accepted, MOST + 1)):
            self._add_published(row, "delivery", f"{row['broker_message_id']}.{row['recipient']}", row["subject"])
        if self.operates and contexts:
            known = [
                (context, name)
                for name, one in contexts.items()
                for context in (self.contexts if one is None else [one])
            ]
            causes |= await self._add_handled(*map(list, zip(*known, strict=True)))
            if effects:  # what an agent emitted, of which a consumer's record says that it was caused
                found = await self._connection.fetch(QUERIES["find_caused"], list(contexts), self.contexts, MOST + 1)
                for row in self.limited(found):
                    caused.setdefault(row["message_id"], row["source_context"])
                    self._causes.setdefault(row["message_id"], f"message:{row['causation_id']}")
        return caused, causes

    def _add_accepted(self, row: asyncpg.Record) -> None:
        ids = {NAME: row["client_message_id"], "mesh": row["mesh"], "sender": row["sender"], "to": row["destination"]}
        ids["history_id"] = str(row["history_id"])
        ids |= {} if row["traceparent"] is None else {TRACEPARENT: row["traceparent"]}
        name, at = str(row["broker_message_id"]), row["first_seen_at"]
        step = self.add("message", name, "accepted", at=at, place="broker", ids=ids)
        if not row["history_available"]:
            self.steps[step.id] = replace(step, reason="retention has deleted the message; its id stays used")

    def _add_published(self, row: asyncpg.Record, kind: str, name: str, subject: str) -> None:
        """Add where an event or a delivery is: in its stream, on its way there, or dropped."""
        parent = f"message:{name.partition('.')[0]}"
        source = "events" if kind == "event" else "deliveries"
        if row["dropped_at"] is not None:
            self.add(
                kind, name, "dropped", parent, outcome="ended", at=row["dropped_at"], by=row["dropped_by"],
                attempt=row["publish_attempts"], reason=f"{row['reason']} ({row['publish_error']})",
            )  # fmt: skip
        elif row["published_at"] is not None:
            step = self.add(
                kind, name, "published", parent, at=row["published_at"], attempt=row["publish_attempts"],
                place=f"{row['stream']} #{row['stream_sequence']}",
                reason=f"again ({row['epoch']}): its stream had lost it" if row["epoch"] else None,
                ids={"subject": subject, "epoch": str(row["epoch"])},
            )  # fmt: skip
            place = row["stream"], row["stream_sequence"], subject, row["published_at"]
            self.published.append(Published(step.id, name, *place))
        else:
            step = self.add(
                kind, name, "published", parent, outcome="waiting", place=subject,
                attempt=row["publish_attempts"], reason=row["publish_error"], ids={"epoch": str(row["epoch"])},
            )  # fmt: skip
            first = row.get("first_of_aggregate")
            if row["publish_error"] is not None:
                due = f"{row['next_attempt_at']:%H:%M:%SZ}"
                why = f"JetStream refused it, and is asked again at {due}: {row['publish_error']}"
                key, never = row.get("id") or name, "it can never be published"
                self.wait(step, why, f"postroom worker {source} drop {key} --reason '{never}'")
            elif first is not None and str(first) != name:
                self.wait(step, f"it waits behind {first}, which is not published", f"postroom trace {first}")
            else:
                self.wait(step, "it waits for a worker to publish it", "postroom worker backlog")

    async def _add_handled(self, contexts: list[str], names: list[str]) -> dict[str, str | None]:
        """Add what consumers did with messages, which of them are dead, and what operators did about that.

        Return the messages that they name as their causes.
        """
        causes: dict[str, str | None] = {}
        handled = await self._connection.fetch(QUERIES["find_handled"], contexts, names, MOST + 1)
        letters = await self._connection.fetch(QUERIES["find_letters"], contexts, names, MOST + 1)
        for row in sorted(self.limited(handled), key=lambda row: row["message_id"] != row["original"]):
            name, consumer = row["message_id"], row["consumer"]
            parents = [f"{kind}:{row['original']}" for kind in ("event", "message", "answer")]
            if (cause := row["causation_id"]) is not None:
                causes[cause] = None
                self._causes.setdefault(row["original"], f"message:{cause}")
                if not self.steps.keys() & set(parents):
                    more = f"`postroom agent trace --message {row['original']}` on the host of its agent says more"
                    self.add(
                        "message", row["original"], "emitted", place=row["subject"], reason=more,
                        ids={"mesh": row["source_context"], "causation_id": cause},
                    )  # fmt: skip
            parent = next((one for one in parents if one in self.steps), None)
            if name != row["original"]:
                parent = f"replayed:{name}"
            dead_at, done_at = row["dead_at"], row["processed_at"]
            error = row["last_error"] if dead_at is None else f"{row['dead_reason']}: {row['last_error']}"
            outcome: Outcome = "done" if done_at else "dead" if dead_at else "running" if row["owner"] else "waiting"
            step = self.add(
                "handled", f"{name} {consumer}", "handled", parent, thing=name, outcome=outcome,
                at=done_at or dead_at or row["received_at"], place=consumer, attempt=row["attempts"],
                reason=None if done_at else error, ids={"received_at": row["received_at"].isoformat()},
            )  # fmt: skip
            if outcome == "waiting":
                why = f"{consumer} tries it again: {error}" if error else f"{consumer} was stopped before it called"
                self.wait_for(Taker(row["source_context"], consumer), step, why)
            elif outcome == "running":
                self.wait(step, f"{consumer} is handling it")
        for row in self.limited(letters):
            letter, act = msgspec.json.decode(row["letter"], type=DeadLetter), row["act"]
            again = act in SENT_AGAIN
            outcome = "dead" if act is None else "done" if again else "ended"
            known = f"handled:{letter.message_id} {letter.consumer}"
            dead = self.add(
                "letter", str(row["id"]), "buried", known if known in self.steps else f"event:{row['original']}",
                outcome=outcome, at=row["died_at"], place=letter.consumer, attempt=letter.attempts,
                reason=f"{letter.reason}: {letter.last_error}", ids={"mesh": row["context"]},
            )  # fmt: skip
            if act is None:
                why = f"{letter.consumer} could not handle it: {dead.reason}"
                self.wait(dead, why, f"postroom dlq replay {row['id']} --mesh {row['context']} --reason '{REPAIRED}'")
                continue
            name = replay_id(letter) if again else str(row["id"])
            step = self.add(
                act, name, act, dead.id, outcome=outcome, at=row["settled_at"], by=row["settled_by"], reason=row["why"]
            )
            if again and f"handled:{name} {letter.consumer}" not in self.steps:
                mesh = mesh_named_by(letter.original_subject) or row["context"]
                self.wait_for(Taker(mesh, letter.consumer), step, f"{letter.consumer} has yet to take it")
        return causes

    async def _add_job(self, name: str) -> dict[str, str | None]:
        """Add the whole job that an id names, or where it is a message, its activity alone.

        Return the messages that belong to what was added, each with its context.
        """
        uuid = uuid_of(name)
        job = None if uuid is None else await self._connection.fetchval(QUERIES["find_job"], uuid)
        if job is not None:
            return await self._add_activities(job, None, [])
        try:
            found = await find_message(self._connection, name)
        except NotFound:
            return {}
        messages: dict[str, str | None] = {}
        for job in {one.job for one in found}:
            concerned = [one for one in found if one.job == job]
            messages |= await self._add_activities(job, {one.activity for one in concerned}, concerned)
        return messages

    async def _add_write(self, job: UUID, partition: int) -> None:
        """Add the job that Spark wrote a message for, with its partition once that is committed."""
        if await self._connection.fetchval(QUERIES["find_job"], job) is not None:
            activities = (await show_job(self._connection, job)).activities
            wanted = {partition_id(one.id, partition) for one in activities if one.parent is None}
            await self._add_activities(job, wanted & {one.id for one in activities}, [])

    async def _add_activities(
        self, job: UUID, concerned: set[UUID] | None, said: list[JobMessage]
    ) -> dict[str, str | None]:
        """Add a job and its activities: all, or those concerned and their ancestors."""
        tree = await show_job(self._connection, job)
        context = tree.job.mesh
        if context not in self.contexts:
            return {}
        by_id = {one.id: one for one in tree.activities}
        wanted = list(tree.activities) if concerned is None else list(_branch(by_id, concerned))
        shown = self.add(
            "job", str(job), "job", outcome=_OF_JOB.get(tree.job.state, "running"), at=tree.job.started_at,
            place=tree.job.flow, reason=tree.job.error, ids={"mesh": context, "state": tree.job.state},
        )  # fmt: skip
        if tree.job.state == "failed":
            self.wait(shown, f"the job failed: {tree.job.error}", f"postroom jobs retry {job} --reason '{REPAIRED}'")
        for number, note in enumerate(tree.log):
            outcome: Outcome = "ended" if note.verb in _ENDS_JOB else "done"
            self.add(
                "log", f"{job} {number}", note.verb, shown.id, thing=str(job), outcome=outcome,
                at=note.at, by=note.actor, reason=note.reason,
            )  # fmt: skip
        for activity in self.limited(wanted):
            parent = shown.id if activity.parent is None else f"activity:{activity.parent}"
            step = self.add(
                "activity", str(activity.id), "activity", parent,
                outcome=_OF_ACTIVITY.get(activity.state, "running"), at=activity.spawned_at, place=activity.name,
                attempt=activity.attempts, reason=activity.error,
                ids={"job": str(job), "state": activity.state, "ledger": activity.ledger},
            )  # fmt: skip
            if step.outcome == "waiting":
                self.wait(step, activity.error or _WAITS[activity.state], f"postroom jobs show {job}")
        chosen = {one.id for one in wanted} if concerned is None else concerned
        messages = await self._add_requests(tree, chosen, {one.id for one in said})
        for one in said:
            messages[one.id] = context
            self._causes.setdefault(one.id, f"activity:{one.activity}")
            if one.what in ("answer", "set_aside", "missed") and f"answer:{one.id}" not in self.steps:
                parent, waits = f"activity:{one.activity}", one.what != "answer"
                step = self.add(
                    "answer", one.id, "answered", parent, outcome="waiting" if waits else "done", place="job",
                    attempt=one.deliveries, reason=one.error, ids={"job": str(job)},
                )  # fmt: skip
                if waits:
                    self.wait(step, one.sentence, f"postroom jobs show {job}")
        return messages

    async def _add_requests(self, tree: JobTree, chosen: set[UUID], named: set[str]) -> dict[str, str | None]:
        """Add the requests of the chosen activities, and their answers; where messages are `named`, only these."""
        job, context = tree.job.id, tree.job.mesh
        messages: dict[str, str | None] = {}
        for row in self.limited(await self._connection.fetch(QUERIES["find_requests"], job, MOST + 1)):
            name, answer = str(row["id"]), row["answered_by"]
            if row["activity_id"] not in chosen or (named and not named & {name, answer}):
                continue
            messages[name] = context
            waits = answer is None and tree.job.state == "running"
            step = self.add(
                "message", name, "asked", f"activity:{row['activity_id']}",
                outcome="waiting" if waits else "done" if answer else "ended", place="job", attempt=row["asked"],
                ids={"job": str(job)},
            )  # fmt: skip
            if waits:
                due = "" if row["due_at"] is None else f"; it is due at {when(row['due_at'])}"
                self.wait(step, f"it has not been answered yet{due}")
            if answer is not None:
                messages[answer] = context
                self.add("answer", answer, "answered", step.id, place="job", ids={"job": str(job)})
        return messages


async def sweep_ended_rows(connection: Connection, rows: int, kept: timedelta) -> int:
    """Forget up to `rows` reports of ended rows that are older than `kept`; return how many."""
    return await count_changed(connection, QUERIES["sweep_ended_rows"], rows, kept)


_WAITS: Final = {
    "waiting": "no worker has begun it yet",
    "asked": "it waits for what it asked for, or spawned",
    "unknown": "no worker has it",
}


def _branch(by_id: Mapping[UUID, Activity], concerned: Iterable[UUID]) -> Iterator[Activity]:
    """Yield activities and their ancestors, each once."""
    seen: set[UUID] = set()
    for id_ in concerned:
        above: UUID | None = id_
        while above is not None and above not in seen:
            seen.add(above)
            yield by_id[above]
            above = by_id[above].parent
