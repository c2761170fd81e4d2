"""The story of a message, as far as the broker can tell it (docs/contract/operate.md#operate-51).

All of it is looked up in Postgres by indexes, at one moment. Which consumers have yet to take what was published, NATS
is asked, and agents that run what they made of what they took. Nobody's files are: of rows that died on a daemon, and
may never have come here, the daemon has reported.

A member is told of the messages that it may read: that they were accepted, and where they were published; and of the
rows of its mesh that died, where and why. What consumers and jobs made of messages, what they caused, and who repaired
it is for an admin of the mesh.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

import asyncpg
import msgspec
from aiohttp import web
from msgspec.structs import replace
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from broker.authentication import PRINCIPAL, Member, Principal, member_of
from broker.database import Database
from broker.nats import BRIEFLY, Nats, wants
from broker.requests import decode_body
from postroom._wire.dead_letters import DeadLetter
from postroom._wire.ids import context_of
from postroom._wire.jobs import Activity, JobMessage, JobTree
from postroom._wire.sends import EndedRow, EndedRows
from postroom._wire.spark import SparkTask, partition_id
from postroom._wire.sql import load_queries
from postroom._wire.trace import NAME, REPAIRED, TRACEPARENT, Outcome, Step, Story, Wait, compose, help_for, steps_of
from postroom._wire.unpublished import resuming
from postroom._wire.words import counted
from postroom.chassis.postgres import Connection
from postroom.chassis.routes import json_response
from postroom.delivery.agents.stories import ask_story
from postroom.delivery.dead_letters.operations import replay_id
from postroom.delivery.durables import each_durable, find_consumers, pause_of
from postroom.delivery.errors import NATS_ERRORS, from_nats
from postroom.delivery.nats import connection_of
from postroom.delivery.streams import filters_of
from postroom.delivery.subjects import parse_subject
from postroom.errors import NotFound, Unavailable
from postroom.ledger.operating import find_message, show_job

QUERIES: Final = load_queries("broker", "trace.sql")

_MOST: Final = 500  # rows of one table in one round
_ROUNDS: Final = 10  # of causes, and of effects
_MOST_ENDED: Final = 10_000  # rows of one member whose reports are kept
_AGENTS: Final = "_consumer"  # how the durable consumers of agents end, as a rule
_OTHER_NAMES: Final = re.compile(  # of a message: for a recipient, in a letter's id, of a replay, published again
    r"(?P<delivered>[0-9a-f]{8}-[0-9a-f-]{27})\.[a-z][a-z0-9_-]*(?:/[0-9]+)?"
    r"|(?:dead:[^:]*:)?(?P<id>.+?)(?:~[A-Za-z0-9_-]+\.[0-9]+)?(?:/[0-9]+)?"
)
_PLACE: Final = re.compile(r"(?P<stream>\S+) #(?P<number>[0-9]+)")  # of what an agent published
_OF_JOB: Final[Mapping[str, Outcome]] = {"completed": "done", "failed": "dead", "cancelled": "ended"}
_OF_ACTIVITY: Final[Mapping[str, Outcome]] = {
    "waiting": "waiting",
    "asked": "waiting",
    "unknown": "waiting",
    "done": "done",
    "failed": "dead",
    "stopped": "ended",
}


class Traces:
    """The handlers of the routes."""

    def __init__(self, database: Database, nats: Nats) -> None:
        self._database = database
        self._nats = nats

    async def trace(self, request: web.Request) -> web.Response:
        """`GET /v1/trace/{id}`."""
        id_, principal = request.match_info["id"], request[PRINCIPAL]
        async with (
            self._database.read(principal.whose) as connection,
            connection.transaction(isolation="repeatable_read", readonly=True),
        ):
            telling = _Telling(connection, principal)
            await telling.tell(id_)
        problem = None
        if telling.operates and (telling.published or not telling.steps):
            async with self._nats.opened(BRIEFLY) as (js, problem):
                if js is not None and not telling.steps:  # it may be between two agents, which no database knows
                    causes = await telling.ask_agents(js, id_)
                    async with (
                        self._database.read(principal.whose) as connection,
                        connection.transaction(readonly=True),
                    ):
                        await telling.tell_causes(connection, causes)
                if js is not None:
                    await telling.ask_consumers(js)
        unread = [] if problem is None else [problem.problem]
        others = ", or you may not see it: try the token of an admin"
        if telling.silent and (not telling.steps or telling.unplaced()):
            agents, where = " or ".join(sorted(telling.silent)), f"`postroom agent trace --message {id_[:128]}`"
            others = f"; the store of an agent that does not run ({agents}) may know more: try {where} on its host"
            unread.append(Unavailable.of("agents_stopped", f"the broker does not know all of it{others}").problem)
        if not telling.steps:
            raise NotFound.of("trace_not_found", f"the broker knows nothing under the id {id_[:128]!r}{others}")
        return json_response(compose(telling.steps, telling.waits, more=telling.more, unread=unread))

    async def report(self, request: web.Request) -> web.Response:
        """`POST /v1/ended_rows`: from a daemon, of rows of its own; a report that comes twice is as one."""
        member, body = member_of(request), await decode_body(request, EndedRows)
        latest = {ended.row.id: ended for ended in body.rows}
        kept = [ended for ended in latest.values() if ended.row.status != "done"]
        columns = (
            [ended.row.id for ended in kept],
            [ended.row.client_message_id for ended in kept],
            [ended.successor for ended in kept],
            [msgspec.json.encode(ended).decode() for ended in kept],
        )
        async with self._database.read(member.whose) as connection, connection.transaction():
            done = list(latest.keys() - set(columns[0]))
            await connection.execute(QUERIES["forget_ended_rows"], member.member_id, done)
            await connection.execute(QUERIES["keep_ended_rows"], member.mesh_id, member.member_id, body.host, *columns)
            await connection.execute(QUERIES["limit_ended_rows"], member.member_id, _MOST_ENDED)
        return web.Response(status=204)


class _Published(NamedTuple):
    """Where a message lies in a stream; `step` is the one that says so."""

    step: str
    message: str
    stream: str
    sequence: int
    subject: str
    at: datetime


class _Taken(NamedTuple):
    """A message that an agent has taken, and its durable consumer."""

    context: str
    consumer: str
    message: str


class _Telling:
    """One story while it is put together."""

    def __init__(self, connection: Connection, principal: Principal) -> None:
        self.steps: dict[str, Step] = {}
        self.waits: dict[str, Wait] = {}
        self.published: list[_Published] = []
        self.operates = principal.role != "member"
        self.more = False
        self.silent: set[str] = set()  # agents that were asked, and do not run or answer
        self._connection = connection
        self._mesh = principal.mesh_id
        self._reader = principal.member_id if isinstance(principal, Member) and not self.operates else None
        self._meshes: list[int] = []
        self._contexts: list[str] = []
        self._told: set[str] = set()  # the messages that were asked for
        self._sent_after: dict[tuple[str, str], str] = {}  # of messages, by mesh: the requeue that each is from
        self._causes: dict[str, str] = {}  # of messages: the step that each follows from
        self._unasked: list[_Taken] = []  # by agents that have yet to be asked
        self._takers: dict[str, str] = {}  # consumers that have yet to take something, by the step that waits for each

    async def tell(self, id_: str) -> None:
        """Tell all that is known of a message, under whichever of its names."""
        reach = await self._connection.fetchrow(QUERIES["find_reach"], self._mesh)
        assert reach is not None  # noqa: S101 - it aggregates
        self._meshes, self._contexts = reach["ids"] or [], reach["slugs"] or []
        names = {id_}
        if (other := _OTHER_NAMES.fullmatch(id_)) is not None:
            names |= set(filter(None, other.groups()))
        if self.operates and id_.isascii() and id_.isdigit() and len(id_) < len(str(2**63)):
            found = await self._connection.fetchval(QUERIES["find_letter"], int(id_), self._contexts)
            names |= {found} - {None}
        fresh: dict[str, str | None] = dict.fromkeys(names)
        if self.operates:
            for name in names:
                fresh |= await self._tell_job(name)
        fresh |= dict.fromkeys(await self._tell_ended_rows(names))
        above = await self._follow(fresh, effects=self.operates)
        await self._follow({name: context for name, context in above.items() if name not in self._told}, effects=False)
        for step in [step for step in self.steps.values() if step.what == "accepted"]:
            task = SparkTask.read(step.ids.get(TRACEPARENT)) if self.operates else None
            if task is not None and task.job is not None:
                await self._tell_write(task.job, task.partition)
            if (requeue := self._sent_after.get((step.ids["mesh"], step.ids[NAME]))) is not None:
                self.steps[step.id] = replace(step, parent=requeue)
        for name, parent in self._causes.items():
            if parent in self.steps and (caused := self.steps.get(f"message:{name}")) is not None:
                self.steps[caused.id] = replace(caused, parent=parent)

    async def tell_causes(self, connection: Connection, causes: Iterable[str]) -> None:
        """Tell of messages that agents named as the first causes of what they told."""
        self._connection = connection
        await self._follow(dict.fromkeys(causes), effects=False)
        for step in self.unplaced():
            self.steps[step.id] = replace(step, parent=self._place_of(step.thing))

    async def _tell_ended_rows(self, names: set[str]) -> set[str]:
        """Tell of rows that ended on their daemons, with those before and after; return what else to look for."""
        found: dict[str, tuple[asyncpg.Record, EndedRow]] = {}
        wanted, told = names, set[str]()
        for _ in range(_ROUNDS):
            told |= wanted
            rows = await self._connection.fetch(QUERIES["find_ended_rows"], list(wanted), self._meshes, _MOST + 1)
            pairs = [(row, msgspec.json.decode(row["report"], type=EndedRow)) for row in self._limited(rows)]
            found |= {row["row_id"]: (row, one) for row, one in pairs}
            wanted = {name for _, one in pairs for name in (one.row.client_message_id, one.successor) if name}
            if not (wanted := wanted - told):
                break
        for row, ended in (found[id_] for id_ in sorted(found)):  # ids of rows are in the order of time
            one, log = ended.row, ended.log if self.operates else []
            steps = steps_of([one], log, ended.failed_posts, f"postroomd on {row['host']}")
            parent = next((step.id for step in reversed(steps) if step.what == "requeue"), steps[0].id)
            if row["successor"] is not None:
                self._sent_after[row["mesh"], row["successor"]] = parent
            earlier = self._sent_after.get((row["mesh"], one.client_message_id))
            ids = {**steps[0].ids, "mesh": row["mesh"], "sender": row["member"]}
            steps[0] = replace(steps[0], parent=earlier, ids=ids)
            self.steps |= {step.id: step for step in steps}
            if one.status == "dead":
                why = f"it died on {row['host']}, and is not posted again: {one.last_error}"
                self._wait(steps[0], why, f"{help_for(one, row['mesh'])}  # on {row['host']}")
        return told

    async def _follow(self, fresh: dict[str, str | None], *, effects: bool) -> dict[str, str | None]:
        """Tell of messages and on from there: of those that they caused (`effects`), or else that caused them.

        Return those that caused the first ones.
        """
        first: dict[str, str | None] | None = None
        for _ in range(_ROUNDS):
            if not fresh:
                return first or {}
            self._told |= fresh.keys()
            caused, causes = await self._tell_messages(fresh, effects=effects)
            first = causes if first is None else first
            found = caused if effects else causes
            fresh = {name: context for name, context in found.items() if name not in self._told}
        self.more = True
        return first or {}

    async def _tell_messages(
        self, wanted: Mapping[str, str | None], *, effects: bool
    ) -> tuple[dict[str, str | None], dict[str, str | None]]:
        """Tell of messages by their ids, each with its context where that is known.

        Return the messages that they caused, and those that caused them.
        """
        contexts = dict(wanted)
        uuids = list(filter(None, map(_uuid, wanted)))
        found = await self._connection.fetch(QUERIES["find_messages"], list(wanted), uuids, self._meshes, self._reader)
        for row in found:
            contexts.pop(row["client_message_id"], None)
            contexts[str(row["broker_message_id"])] = row["mesh"]
            self._tell_accepted(row)
        accepted = [row["broker_message_id"] for row in found]
        uuids = [*{*uuids, *accepted}] if self.operates else accepted
        caused: dict[str, str | None] = {}
        causes: dict[str, str | None] = {}
        for row in self._limited(
            await self._connection.fetch(QUERIES["find_events"], uuids, self._contexts, effects, _MOST + 1)
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
                self._add(
                    "message", name, "emitted", at=row["occurred_at"], place=row["subject"], ids={"mesh": context}
                )
            self._tell_published(row, "event", name, row["subject"])
        for row in self._limited(await self._connection.fetch(QUERIES["find_deliveries"], accepted, _MOST + 1)):
            self._tell_published(row, "delivery", f"{row['broker_message_id']}.{row['recipient']}", row["subject"])
        if self.operates and contexts:
            known = [
                (context, name)
                for name, one in contexts.items()
                for context in (self._contexts if one is None else [one])
            ]
            causes |= await self._tell_handled(*map(list, zip(*known, strict=True)))
            if effects:  # what an agent emitted, of which a consumer's record says that it was caused
                found = await self._connection.fetch(QUERIES["find_caused"], list(contexts), self._contexts, _MOST + 1)
                for row in self._limited(found):
                    caused.setdefault(row["message_id"], row["source_context"])
                    self._causes.setdefault(row["message_id"], f"message:{row['causation_id']}")
        return caused, causes

    def _tell_accepted(self, row: asyncpg.Record) -> None:
        step = self._add(
            "message",
            str(row["broker_message_id"]),
            "accepted",
            at=row["first_seen_at"],
            place="broker",
            ids={
                NAME: row["client_message_id"],
                "mesh": row["mesh"],
                "sender": row["sender"],
                "to": row["destination"],
                "history_id": str(row["history_id"]),
                **({} if row["traceparent"] is None else {TRACEPARENT: row["traceparent"]}),
            },
        )
        if not row["history_available"]:
            self.steps[step.id] = replace(step, reason="retention has deleted the message; its id stays used")

    def _tell_published(self, row: asyncpg.Record, kind: str, name: str, subject: str) -> None:
        """Tell where an event or a delivery is: in its stream, still to go there, or dropped."""
        parent = f"message:{name.partition('.')[0]}"
        source = "events" if kind == "event" else "deliveries"
        if row["dropped_at"] is not None:
            self._add(
                kind, name, "dropped", parent, outcome="ended", at=row["dropped_at"], by=row["dropped_by"],
                attempt=row["publish_attempts"], reason=f"{row['reason']} ({row['publish_error']})",
            )  # fmt: skip
        elif row["published_at"] is not None:
            step = self._add(
                kind, name, "published", parent, at=row["published_at"], attempt=row["publish_attempts"],
                place=f"{row['stream']} #{row['stream_sequence']}",
                reason=f"again ({row['epoch']}): its stream had lost it" if row["epoch"] else None,
                ids={"subject": subject, "epoch": str(row["epoch"])},
            )  # fmt: skip
            place = row["stream"], row["stream_sequence"], subject, row["published_at"]
            self.published.append(_Published(step.id, name, *place))
        else:
            step = self._add(
                kind, name, "published", parent, outcome="waiting", place=subject,
                attempt=row["publish_attempts"], reason=row["publish_error"], ids={"epoch": str(row["epoch"])},
            )  # fmt: skip
            first = row.get("first_of_aggregate")
            if row["publish_error"] is not None:
                due = f"{row['next_attempt_at']:%H:%M:%SZ}"
                why = f"JetStream refused it, and is asked again at {due}: {row['publish_error']}"
                key, never = row.get("id") or name, "it can never be published"
                self._wait(step, why, f"postroom worker {source} drop {key} --reason '{never}'")
            elif first is not None and str(first) != name:
                self._wait(step, f"it waits behind {first}, which is not published", f"postroom trace {first}")
            else:
                self._wait(step, "it waits for a worker to publish it", "postroom worker backlog")

    async def _tell_handled(self, contexts: list[str], names: list[str]) -> dict[str, str | None]:
        """Tell what consumers did with messages, which of them are dead, and what operators did about that.

        Return the messages that caused them, as they say.
        """
        causes: dict[str, str | None] = {}
        handled = await self._connection.fetch(QUERIES["find_handled"], contexts, names, _MOST + 1)
        letters = await self._connection.fetch(QUERIES["find_letters"], contexts, names, _MOST + 1)
        for row in sorted(self._limited(handled), key=lambda row: row["message_id"] != row["original"]):
            name, consumer = row["message_id"], row["consumer"]
            parents = [f"{kind}:{row['original']}" for kind in ("event", "message", "answer")]
            if (cause := row["causation_id"]) is not None:
                causes[cause] = None
                self._causes.setdefault(row["original"], f"message:{cause}")
                if not self.steps.keys() & set(parents):
                    more = f"`postroom agent trace --message {row['original']}` on the host of its agent says more"
                    self._add(
                        "message", row["original"], "emitted", place=row["subject"], reason=more,
                        ids={"mesh": row["source_context"], "causation_id": cause},
                    )  # fmt: skip
            parent = next((one for one in parents if one in self.steps), None)
            if name != row["original"]:
                parent = f"replayed:{name}"
            dead_at, done_at = row["dead_at"], row["processed_at"]
            error = row["last_error"] if dead_at is None else f"{row['dead_reason']}: {row['last_error']}"
            outcome: Outcome = "done" if done_at else "dead" if dead_at else "running" if row["owner"] else "waiting"
            step = self._add(
                "handled", f"{name} {consumer}", "handled", parent, thing=name, outcome=outcome,
                at=done_at or dead_at or row["received_at"], place=consumer, attempt=row["attempts"],
                reason=None if done_at else error, ids={"received_at": row["received_at"].isoformat()},
            )  # fmt: skip
            if outcome == "waiting":
                why = f"{consumer} tries it again: {error}" if error else f"{consumer} was stopped before it called"
                self._wait_for(consumer, step, why)
            elif outcome == "running":
                self._wait(step, f"{consumer} is handling it")
        for row in self._limited(letters):
            letter, act = msgspec.json.decode(row["letter"], type=DeadLetter), row["act"]
            outcome = "dead" if act is None else "done" if act == "replayed" else "ended"
            known = f"handled:{letter.message_id} {letter.consumer}"
            dead = self._add(
                "letter", str(row["id"]), "buried", known if known in self.steps else f"event:{row['original']}",
                outcome=outcome, at=row["died_at"], place=letter.consumer, attempt=letter.attempts,
                reason=f"{letter.reason}: {letter.last_error}", ids={"mesh": row["context"]},
            )  # fmt: skip
            if act is None:
                why = f"{letter.consumer} could not handle it: {dead.reason}"
                replay = f"postroom dlq replay {row['id']} --mesh {row['context']} --reason '{REPAIRED}'"
                self._wait(dead, why, replay)
                continue
            name = replay_id(letter) if act == "replayed" else str(row["id"])
            step = self._add(
                act, name, act, dead.id, outcome=outcome, at=row["settled_at"], by=row["settled_by"], reason=row["why"]
            )
            if act == "replayed" and f"handled:{name} {letter.consumer}" not in self.steps:
                self._wait_for(letter.consumer, step, f"{letter.consumer} has yet to take it")
        return causes

    async def _tell_job(self, name: str) -> dict[str, str | None]:
        """Tell of the job that an id is of, whole, or where it is a message, of its activity alone.

        Return the messages that belong to what was told, each with its context.
        """
        uuid = _uuid(name)
        job = None if uuid is None else await self._connection.fetchval(QUERIES["find_job"], uuid)
        if job is not None:
            return await self._tell_activities(job, None, [])
        try:
            found = await find_message(self._connection, name)
        except NotFound:
            return {}
        messages: dict[str, str | None] = {}
        for job in {one.job for one in found}:
            concerned = [one for one in found if one.job == job]
            messages |= await self._tell_activities(job, {one.activity for one in concerned}, concerned)
        return messages

    async def _tell_write(self, job: UUID, partition: int) -> None:
        """Tell of the job that a message was written for by Spark, with its partition once that is committed."""
        if await self._connection.fetchval(QUERIES["find_job"], job) is not None:
            activities = (await show_job(self._connection, job)).activities
            wanted = {partition_id(one.id, partition) for one in activities if one.parent is None}
            await self._tell_activities(job, wanted & {one.id for one in activities}, [])

    async def _tell_activities(
        self, job: UUID, concerned: set[UUID] | None, said: list[JobMessage]
    ) -> dict[str, str | None]:
        """Tell of a job, and of its activities: all, or those that are concerned and what they grew out of."""
        tree = await show_job(self._connection, job)
        context = tree.job.mesh
        if context not in self._contexts:
            return {}
        by_id = {one.id: one for one in tree.activities}
        wanted = list(tree.activities) if concerned is None else list(_branch(by_id, concerned))
        shown = self._add(
            "job", str(job), "job", outcome=_OF_JOB.get(tree.job.state, "running"), at=tree.job.started_at,
            place=tree.job.flow, reason=tree.job.error, ids={"mesh": context, "state": tree.job.state},
        )  # fmt: skip
        if tree.job.state == "failed":
            self._wait(shown, f"the job failed: {tree.job.error}", f"postroom jobs retry {job} --reason '{REPAIRED}'")
        for number, note in enumerate(tree.log):
            outcome: Outcome = "ended" if note.verb == "cancel" else "done"
            self._add(
                "log", f"{job} {number}", note.verb, shown.id, thing=str(job), outcome=outcome,
                at=note.at, by=note.actor, reason=note.reason,
            )  # fmt: skip
        for activity in self._limited(wanted):
            parent = shown.id if activity.parent is None else f"activity:{activity.parent}"
            step = self._add(
                "activity", str(activity.id), "activity", parent,
                outcome=_OF_ACTIVITY.get(activity.state, "running"), at=activity.spawned_at, place=activity.name,
                attempt=activity.attempts, reason=activity.error,
                ids={"job": str(job), "state": activity.state, "ledger": activity.ledger},
            )  # fmt: skip
            if step.outcome == "waiting":
                self._wait(step, activity.error or _WAITS[activity.state], f"postroom jobs show {job}")
        chosen = {one.id for one in wanted} if concerned is None else concerned
        messages = await self._tell_requests(tree, chosen, {one.id for one in said})
        for one in said:
            messages[one.id] = context
            self._causes.setdefault(one.id, f"activity:{one.activity}")
            if one.what in ("answer", "set_aside", "missed") and f"answer:{one.id}" not in self.steps:
                parent, waits = f"activity:{one.activity}", one.what != "answer"
                step = self._add(
                    "answer", one.id, "answered", parent, outcome="waiting" if waits else "done", place="job",
                    attempt=one.deliveries, reason=one.error, ids={"job": str(job)},
                )  # fmt: skip
                if waits:
                    self._wait(step, one.sentence, f"postroom jobs show {job}")
        return messages

    async def _tell_requests(self, tree: JobTree, chosen: set[UUID], named: set[str]) -> dict[str, str | None]:
        """Tell what the chosen activities asked for, and who answered; where messages are `named`, of these alone."""
        job, context = tree.job.id, tree.job.mesh
        messages: dict[str, str | None] = {}
        for row in self._limited(await self._connection.fetch(QUERIES["find_requests"], job, _MOST + 1)):
            name, answer = str(row["id"]), row["answered_by"]
            if row["activity_id"] not in chosen or (named and not named & {name, answer}):
                continue
            messages[name] = context
            waits = answer is None and tree.job.state == "running"
            step = self._add(
                "message", name, "asked", f"activity:{row['activity_id']}",
                outcome="waiting" if waits else "done" if answer else "ended", place="job", attempt=row["asked"],
                ids={"job": str(job)},
            )  # fmt: skip
            if waits:
                due = "" if row["due_at"] is None else f"; it is due at {row['due_at']:%Y-%m-%d %H:%M:%SZ}"
                self._wait(step, f"nobody has answered it yet{due}")
            if answer is not None:
                messages[answer] = context
                self._add("answer", answer, "answered", step.id, place="job", ids={"job": str(job)})
        return messages

    async def ask_consumers(self, js: JetStreamContext) -> None:
        """Add how far the durable consumers of the streams are with what was published, where no record says so.

        Agents that took some of it are asked what they made of it, and so on with what they emitted.
        """
        streams: dict[str, list[ConsumerInfo]] = {}
        try:
            for _ in range(_ROUNDS):
                places, self.published = self.published, []
                for place in places:
                    if place.stream not in streams:
                        streams[place.stream] = await find_consumers(js, place.stream)
                    await self._tell_takers(js, place, streams[place.stream])
                asked, self._unasked = self._unasked, []
                stories = await asyncio.gather(*(ask_story(connection_of(js), *taken) for taken in asked))
                for taken, story in zip(asked, stories, strict=True):
                    if story is None:
                        name = f"taken:{taken.message} {taken.consumer}"
                        why = f"it does not run, or does not answer; {_told_on_host(taken.message)}"
                        self.steps[name] = replace(self.steps[name], reason=why)
                    elif story.steps:
                        self._tell_of_agent(taken.consumer, story)
            self.more |= bool(self.published)
        except NATS_ERRORS as error:
            raise from_nats(error, "asking for the consumers of a message") from error
        durables = {info.name: info for infos in streams.values() for info in infos}
        for step, consumer in self._takers.items():
            info = durables.get(consumer)
            if info is not None and (pause := pause_of(info)) is not None:
                why = f"{self.waits[step].why}; paused by {pause.by} because: {pause.reason}"
                self._wait(self.steps[step], why, resuming(f"{info.stream_name}/{consumer}"))

    async def _tell_takers(self, js: JetStreamContext, place: _Published, consumers: Iterable[ConsumerInfo]) -> None:
        wanting = [info for info in consumers if wants(info, place.subject, place.at)]
        for info in wanting:
            name = f"{place.message} {info.name}"
            if not self.steps.keys() & {f"handled:{name}", f"taken:{name}"}:
                await self._tell_taken(js, place, info)
        if not wanting and place.subject.startswith("cmd.") and await _is_kept(js, place):
            why = f"no consumer takes {place.subject}: start the agent or the worker that does"
            self._wait(self.steps[place.step], why, "postroom consumer list")

    async def _tell_taken(self, js: JetStreamContext, place: _Published, info: ConsumerInfo) -> None:
        acked, delivered = (0 if at is None else at.stream_seq for at in (info.ack_floor, info.delivered))
        outcome: Outcome = "running" if delivered >= place.sequence else "waiting"
        if acked >= place.sequence or (outcome == "running" and not await _is_kept(js, place)):
            outcome = "done"
        by_agent = outcome != "waiting" and info.name.endswith(_AGENTS)
        step = self._add(
            "taken", f"{place.message} {info.name}", "taken", place.step, thing=place.message, outcome=outcome,
            place=info.name, reason=_told_on_host(place.message) if by_agent and outcome == "done" else None,
        )  # fmt: skip
        if by_agent:
            self._unasked.append(_Taken(context_of(place.subject), info.name, place.message))
        if outcome == "running":
            self._wait_for(info.name, step, f"{info.name} has it in hand, or tries it again later")
        elif outcome == "waiting":
            stopped = "" if info.num_waiting else ", and nobody asks for them: it is stopped, or pauses"
            waiting = counted(info.num_pending or 0, "message")
            self._wait_for(info.name, step, f"{info.name} has {waiting} yet to take{stopped}")

    async def ask_agents(self, js: JetStreamContext, id_: str) -> set[str]:
        """Ask all agents that run for a message that no database knows, and on from there for what caused it.

        Return the messages that agents took and that no agent emitted.
        """
        try:
            durables = {
                (context_of(filters_of(info.config)[0]), info.name) async for info in each_durable(js, self._contexts)
            }
        except NATS_ERRORS as error:
            raise from_nats(error, "asking for the agents of a message") from error
        agents = [durable for durable in durables if durable[1].endswith(_AGENTS)]
        fresh, known = {id_}, set[str]()
        for _ in range(_ROUNDS):
            known |= fresh
            questions = [_Taken(*agent, name) for agent in agents for name in fresh]
            stories = await asyncio.gather(*(ask_story(connection_of(js), *taken) for taken in questions))
            answers = list(zip(questions, stories, strict=True))
            self.silent |= {taken.consumer for taken, story in answers if story is None}
            found = [(taken, story) for taken, story in answers if story is not None and story.steps]
            fresh = {self._tell_of_agent(taken.consumer, story) for taken, story in found} - known
            if not fresh:
                break
        taken_first = {step.thing for step in self.steps.values() if step.id.startswith("taken:")}
        return {name for name in taken_first if f"message:{name}" not in self.steps}

    def _tell_of_agent(self, consumer: str, story: Story) -> str:
        """Tell what an agent made of a message that it took, and where what it emitted is; return that message."""
        first = next(step for step in story.steps if step.parent is None)
        taken = f"taken:{first.thing} {consumer}"
        before = self.steps.get(taken)
        parent = self._place_of(first.thing) if before is None else before.parent
        self.steps[taken] = replace(first, id=taken, parent=parent, place=consumer)
        subjects: dict[str, str] = {}
        for step in story.steps:
            if step.id == first.id or f"answer:{step.thing}" in self.steps:
                continue
            under = taken if step.parent in (None, first.id) else step.parent
            self.steps[step.id] = replace(step, parent=under)
            if step.id.startswith("message:"):
                subjects[step.thing] = step.place or ""
            elif step.what == "published" and step.at is not None and (at := _PLACE.fullmatch(step.place or "")):
                place = step.thing, at["stream"], int(at["number"]), subjects[step.thing], step.at
                self.published.append(_Published(step.id, *place))
        for wait in story.waits:
            step_id = taken if wait.step == first.id else wait.step
            self.waits[step_id] = replace(wait, step=step_id)
        for step in self.unplaced():
            self.steps[step.id] = replace(step, parent=self._place_of(step.thing))
        return first.thing

    def unplaced(self) -> list[Step]:
        """Return what agents have taken of which nobody knows, so far, where it came from."""
        return [step for step in self.steps.values() if step.id.startswith("taken:") and step.parent is None]

    def _place_of(self, message: str) -> str | None:
        """Return the step by which a message came to those who take it, the last that is known."""
        return next((one for kind in ("event", "message") if (one := f"{kind}:{message}") in self.steps), None)

    def _add(self, kind: str, name: str, what: str, parent: str | None = None, **rest: Any) -> Step:
        """Add a step; its `thing` is what has the name, and it is done, unless `rest` says otherwise."""
        said = {"thing": name, "outcome": "done", **{key: value for key, value in rest.items() if value is not None}}
        step = Step(id=f"{kind}:{name}", what=what, parent=parent, **said)
        self.steps[step.id] = step
        return step

    def _wait(self, step: Step, why: str, help_: str | None = None) -> None:
        self.waits[step.id] = Wait(step=step.id, why=why, help=help_)

    def _wait_for(self, consumer: str, step: Step, why: str) -> None:
        self._takers[step.id] = consumer
        self._wait(step, why, f"postroom consumer show {consumer}")

    def _limited(self, rows: list[Any]) -> list[Any]:
        self.more |= len(rows) > _MOST
        return rows[:_MOST]


async def sweep_ended_rows(connection: Connection, rows: int, kept: timedelta) -> int:
    """Forget up to `rows` reports of rows that ended, each older than it is `kept`; return how many."""
    swept: int = await connection.fetchval(QUERIES["sweep_ended_rows"], rows, kept)
    return swept


_WAITS: Final = {
    "waiting": "no worker has begun it yet",
    "asked": "it waits for what it asked for, or spawned",
    "unknown": "no worker has it",
}


def _branch(by_id: Mapping[UUID, Activity], concerned: Iterable[UUID]) -> Iterator[Activity]:
    """Yield activities and those that they grew out of, each once."""
    seen: set[UUID] = set()
    for id_ in concerned:
        above: UUID | None = id_
        while above is not None and above not in seen:
            seen.add(above)
            yield by_id[above]
            above = by_id[above].parent


async def _is_kept(js: JetStreamContext, place: _Published) -> bool:
    """Tell whether the stream still has a message: a work queue forgets what was acknowledged."""
    try:
        await js.get_msg(place.stream, place.sequence)
    except NotFoundError:
        return False
    return True


def _told_on_host(message: str) -> str:
    return f"what it emitted is told on its host: `postroom agent trace --message {message}`"


def _uuid(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
