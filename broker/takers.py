"""The takers of what was published: durable consumers, about which NATS is asked, and agents, which answer themselves.

Their answers are added to a story while that is put together (docs/contract/operate.md#operate-51).
"""

import asyncio
import re
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple

from msgspec.structs import replace
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, DeliverPolicy
from nats.js.errors import NotFoundError

from postroom._wire.ids import context_of
from postroom._wire.trace import Outcome, Step, Story, StoryDraft
from postroom._wire.unpublished import resuming
from postroom._wire.words import counted
from postroom.delivery.agents.replay import ask_story
from postroom.delivery.durables import each_durable, find_consumers, pause_of
from postroom.delivery.errors import mapped
from postroom.delivery.nats import connection_of
from postroom.delivery.streams import covers, filters_of

MOST: Final = 500  # rows of one table in one round
ROUNDS: Final = 10  # of causes, and of effects
_AGENTS: Final = "_consumer"  # how the durable consumers of agents end, as a rule
_PLACE: Final = re.compile(r"(?P<stream>\S+) #(?P<number>[0-9]+)")  # of what an agent published


class Published(NamedTuple):
    """The place of a message in a stream; `step` is the step of its publishing."""

    step: str
    message: str
    stream: str
    sequence: int
    subject: str
    at: datetime


class Taker(NamedTuple):
    """A consumer that has yet to take a message of a mesh."""

    mesh: str
    consumer: str


class Draft(StoryDraft):
    """One story while it is put together, with what its takers are asked about."""

    def __init__(self) -> None:
        super().__init__()
        self.published: list[Published] = []
        self.more = False
        self.contexts: list[str] = []  # that its reader may see
        self.takers: dict[str, Taker] = {}  # consumers that have yet to take something, by the step that waits for each

    def unplaced(self) -> list[Step]:
        """Return the steps of agents that took messages of unknown origin, so far."""
        return [step for step in self.steps.values() if step.id.startswith("taken:") and step.parent is None]

    def place_of(self, message: str) -> str | None:
        """Return the last known step by which a message came to its takers."""
        return next((one for kind in ("event", "message") if (one := f"{kind}:{message}") in self.steps), None)

    def wait_for(self, taker: Taker, step: Step, why: str) -> None:
        """Record why a step waits for a consumer, which may be paused."""
        self.takers[step.id] = taker
        self.wait(step, why, f"postroom consumer show {taker.consumer} --mesh {taker.mesh}")

    def limited(self, rows: list[Any]) -> list[Any]:
        """Return as many rows as are shown, and remember where there are more."""
        self.more |= len(rows) > MOST
        return rows[:MOST]


class _Taken(NamedTuple):
    """A message that an agent has taken, and its durable consumer."""

    context: str
    consumer: str
    message: str


class Takers:
    """Asks consumers and agents, and adds their answers to a story."""

    def __init__(self, js: JetStreamContext, draft: Draft) -> None:
        self.silent: set[str] = set()  # agents that were asked, and do not run or answer
        self._js = js
        self._draft = draft
        self._unasked: list[_Taken] = []  # by agents that have yet to be asked

    async def ask_consumers(self) -> None:
        """Add how far the durable consumers of the streams are with what was published, where no record has it.

        Agents that took some of it are asked what became of it, and then the takers of what they emitted.
        """
        streams: dict[str, list[ConsumerInfo]] = {}
        with mapped("asking for the consumers of a message"):
            for _ in range(ROUNDS):
                places, self._draft.published = self._draft.published, []
                for place in places:
                    if place.stream not in streams:
                        streams[place.stream] = await find_consumers(self._js, place.stream)
                    await self._add_takers(place, streams[place.stream])
                asked, self._unasked = self._unasked, []
                stories = await asyncio.gather(*(ask_story(connection_of(self._js), *taken) for taken in asked))
                for taken, story in zip(asked, stories, strict=True):
                    if story is None:
                        name = f"taken:{taken.message} {taken.consumer}"
                        why = f"it does not run, or does not answer; {_shown_on_host(taken.message)}"
                        self._draft.steps[name] = replace(self._draft.steps[name], reason=why)
                    elif story.steps:
                        self._add_agent(taken.consumer, story)
            self._draft.more |= bool(self._draft.published)
            await self._explain_waits({info.name: info for infos in streams.values() for info in infos})

    async def _explain_waits(self, durables: dict[str, ConsumerInfo]) -> None:
        """Say of what waits for a consumer that it is paused, or deleted; `durables` are known already."""
        others = {taker.mesh for taker in self._draft.takers.values() if taker.consumer not in durables}
        if others:  # in streams that nothing of the story is known to be in, or nowhere
            durables |= {info.name: info async for _, info in each_durable(self._js, others)}
        for step, taker in self._draft.takers.items():
            info = durables.get(taker.consumer)
            if info is None:
                why = f"the consumer {taker.consumer} was deleted before it had finished this"
                self._draft.wait(self._draft.steps[step], why, f"postroom consumer list --mesh {taker.mesh}")
            elif (pause := pause_of(info)) is not None:
                why = f"{self._draft.waits[step].why}; paused by {pause.by} because: {pause.reason}"
                self._draft.wait(
                    self._draft.steps[step], why, f"{resuming(f'{info.stream_name}/{info.name}')} --mesh {taker.mesh}"
                )

    async def _add_takers(self, place: Published, consumers: Iterable[ConsumerInfo]) -> None:
        wanting = [info for info in consumers if _wants(info, place)]
        for info in wanting:
            name = f"{place.message} {info.name}"
            if not self._draft.steps.keys() & {f"handled:{name}", f"taken:{name}"}:
                await self._add_taken(place, info)
        if not wanting and place.subject.startswith("cmd.") and await self._is_kept(place):
            why = f"no consumer takes {place.subject}: start the agent or the worker that does"
            self._draft.wait(self._draft.steps[place.step], why, "postroom consumer list")

    async def _add_taken(self, place: Published, info: ConsumerInfo) -> None:
        acked, delivered = (0 if at is None else at.stream_seq for at in (info.ack_floor, info.delivered))
        outcome: Outcome = "running" if delivered >= place.sequence else "waiting"
        if acked >= place.sequence or (outcome == "running" and not await self._is_kept(place)):
            outcome = "done"
        by_agent = outcome != "waiting" and info.name.endswith(_AGENTS)
        step = self._draft.add(
            "taken", f"{place.message} {info.name}", "taken", place.step, thing=place.message, outcome=outcome,
            place=info.name, reason=_shown_on_host(place.message) if by_agent and outcome == "done" else None,
        )  # fmt: skip
        if by_agent:
            self._unasked.append(_Taken(context_of(place.subject), info.name, place.message))
        taker = Taker(context_of(place.subject), info.name)
        if outcome == "running":
            self._draft.wait_for(taker, step, f"{info.name} has it in hand, or tries it again later")
        elif outcome == "waiting":
            stopped = "" if info.num_waiting else ", and does not ask for them: it is stopped, or paused"
            waiting = counted(info.num_pending or 0, "message")
            self._draft.wait_for(taker, step, f"{info.name} has {waiting} yet to take{stopped}")

    async def _is_kept(self, place: Published) -> bool:
        """Return whether the stream still has a message: a work queue forgets what was acknowledged."""
        try:
            await self._js.get_msg(place.stream, place.sequence)
        except NotFoundError:
            return False
        return True

    async def ask_agents(self, id_: str) -> set[str]:
        """Ask all running agents for a message that no database knows, and then for what caused it.

        Return the messages that agents took and that no agent emitted.
        """
        with mapped("asking for the agents of a message"):
            durables = {
                (context_of(filters_of(info.config)[0]), info.name)
                async for _, info in each_durable(self._js, self._draft.contexts)
            }
        agents = [durable for durable in durables if durable[1].endswith(_AGENTS)]
        fresh, known = {id_}, set[str]()
        for _ in range(ROUNDS):
            known |= fresh
            questions = [_Taken(*agent, name) for agent in agents for name in fresh]
            stories = await asyncio.gather(*(ask_story(connection_of(self._js), *taken) for taken in questions))
            answers = list(zip(questions, stories, strict=True))
            self.silent |= {taken.consumer for taken, story in answers if story is None}
            found = [(taken, story) for taken, story in answers if story is not None and story.steps]
            fresh = {self._add_agent(taken.consumer, story) for taken, story in found} - known
            if not fresh:
                break
        taken_first = {step.thing for step in self._draft.steps.values() if step.id.startswith("taken:")}
        return {name for name in taken_first if f"message:{name}" not in self._draft.steps}

    def _add_agent(self, consumer: str, story: Story) -> str:
        """Add what an agent did with a message that it took, and where what it emitted is; return that message."""
        first = next(step for step in story.steps if step.parent is None)
        taken = f"taken:{first.thing} {consumer}"
        before = self._draft.steps.get(taken)
        parent = self._draft.place_of(first.thing) if before is None else before.parent
        self._draft.steps[taken] = replace(first, id=taken, parent=parent, place=consumer)
        subjects: dict[str, str] = {}
        for step in story.steps:
            if step.id == first.id or f"answer:{step.thing}" in self._draft.steps:
                continue
            under = taken if step.parent in (None, first.id) else step.parent
            self._draft.steps[step.id] = replace(step, parent=under)
            if step.id.startswith("message:"):
                subjects[step.thing] = step.place or ""
            elif step.what == "published" and step.at is not None and (at := _PLACE.fullmatch(step.place or "")):
                place = step.thing, at["stream"], int(at["number"]), subjects[step.thing], step.at
                self._draft.published.append(Published(step.id, *place))
        for wait in story.waits:
            step_id = taken if wait.step == first.id else wait.step
            self._draft.waits[step_id] = replace(wait, step=step_id)
        for step in self._draft.unplaced():
            self._draft.steps[step.id] = replace(step, parent=self._draft.place_of(step.thing))
        return first.thing


def _wants(info: ConsumerInfo, place: Published) -> bool:
    config = info.config
    since = config.opt_start_time if config.deliver_policy == DeliverPolicy.BY_START_TIME else None
    return (since is None or since <= place.at) and any(covers(one, place.subject) for one in filters_of(config))


def _shown_on_host(message: str) -> str:
    return f"its host shows what it emitted: `postroom agent trace --message {message}`"
