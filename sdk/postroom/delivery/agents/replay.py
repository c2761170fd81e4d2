"""An agent's store read from its beginning: its state rebuilt, its hashes verified, what it published published again.

`postroom agent replay`, `verify` and `trace` only read, also while the agent runs: nothing is published and nothing is
handled. `republish` marks messages, and the agent's process publishes them: at its next comparison with the streams, or
when it starts.

A running agent answers a broker that puts the story of a message together (docs/contract/operate.md#operate-51). Its
event store is on its host, and what it takes and emits may be in no database. So it is asked over NATS, under the name
of its durable consumer: `postroom.story.<mesh>.<durable>`, with an id as the body. The answer is a `Story`, or empty
for an id that it does not know.
"""

import sqlite3
from collections.abc import Callable, Iterable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from postroom._wire.dead_letters import DeadLetter
from postroom._wire.ids import now_ms
from postroom._wire.moment import from_milliseconds
from postroom._wire.trace import Story, StoryDraft, compose
from postroom.agent import Agent
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.handlers import located
from postroom.chassis.ownership import is_there, this_user
from postroom.chassis.sqlite import Damaged, exit_after, in_snapshot, open_reader
from postroom.chassis.store import Connection
from postroom.delivery.agents.envelopes import to_microseconds
from postroom.delivery.agents.store import (
    NO_HASH,
    QUERIES,
    Event,
    Head,
    Owner,
    Record,
    Store,
    decode_record,
    next_hash,
    read_events,
    read_head,
    read_owner,
)
from postroom.delivery.agents.turns import Turns
from postroom.delivery.errors import NATS_ERRORS

T = TypeVar("T")
_PER_MILLISECOND: Final = 1000  # µs
_MOST: Final = 1000  # events that one story reads
_STORY_SECONDS: Final = 0.5  # longest wait for an agent's answer
_decode_story: Final = msgspec.json.Decoder(Story).decode


class Memory(NamedTuple):
    """An agent's state, and its position in the store."""

    position: int
    state_hash: bytes
    logical_clock: int  # µs since the epoch: the latest time that any event had
    state: Any


class Differs(Exception):
    """The store is not as it was written: `position` is the first event that differs."""

    def __init__(self, position: int, why: str) -> None:
        super().__init__(f"position {position}: {why}")
        self.position = position


def begin(agent_class: type[Agent[Any]], owner: Owner) -> tuple[Agent[Any], Memory]:
    """Create an agent that has handled nothing; raises `Fatal` (78) where its class does."""
    try:
        agent = agent_class()
        agent.tenant, agent.workspace = owner.tenant, owner.workspace
        return agent, Memory(0, NO_HASH, 0, agent.initial_state())
    except (Exception, SystemExit) as error:
        detail = f"{agent_class.__name__} cannot be created: it raised {located(error)}"
        raise Fatal(Exit.CONFIG, detail) from error


def rebuild(agent: Agent[Any], memory: Memory, events: Iterable[Event]) -> Memory:
    """Go on from `memory` with the events that follow it; raises `Differs`, or `Fatal` (78) where `apply` raises."""
    position, state_hash, clock, state = memory
    for event in events:
        record = check(event, position + 1, state_hash)
        position, state_hash = event.position, event.state_hash
        clock = max(clock, to_microseconds(record.envelope.ts))
        if record.changes_state:
            try:
                state = agent.apply(state, record.envelope)
            except (Exception, SystemExit) as error:
                detail = f"{type(agent).__name__}.apply raised at the event of position {position}: {located(error)}"
                rule = "the store is unchanged: let `apply` accept that event, and start again"
                raise Fatal(Exit.CONFIG, f"{detail}; {rule}") from error
    return Memory(position, state_hash, clock, state)


def check(event: Event, position: int, previous: bytes) -> Record:
    """Return the record of the event that should be at `position`, after the state hash `previous`."""
    if event.position != position:
        raise Differs(position, f"there is no such event; the next is {event.position}")
    if next_hash(previous, event.record) != event.state_hash:
        raise Differs(position, "the record does not match the state hash that was stored with it")
    try:
        return decode_record(event.record)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise Differs(position, f"the record cannot be read: {error}") from error


class Verified(NamedTuple):
    """The result of verifying a store: `first_difference` is the first position that is not as it was written."""

    owner: Owner
    head: Head
    first_difference: int | None
    why: str | None


async def owner_of(database: Path) -> Owner:
    """Return whose store it is; raises `Fatal` where there is none, or one without an owner."""
    return await _read(database, lambda owner, _: owner)


async def replay(agent_class: type[Agent[Any]], database: Path) -> tuple[Owner, Memory]:
    """Build the agent's state from its store alone; raises `Differs` where the store was altered."""

    def read(owner: Owner, db: sqlite3.Connection) -> tuple[Owner, Memory]:
        return owner, rebuild(*begin(agent_class, owner), read_events(db))

    return await _read(database, read)


async def verify(database: Path) -> Verified:
    """Recompute the chain of hashes and compare it with the one that was stored."""
    return await _read(database, _verify)


async def trace(database: Path, id_: str) -> Story:
    """Return the story of a message that the agent handled or emitted; raises `Fatal` (3) for an unknown id."""
    story = await _read(database, partial(_trace, id_))
    if not story.steps:
        raise Fatal(Exit.NOT_FOUND, f"the agent's store {database} has nothing under the id {id_!r}")
    return story


def _trace(id_: str, owner: Owner, db: sqlite3.Connection) -> Story:
    draft = StoryDraft(owner.agent)
    (position,) = db.execute(QUERIES["find_cause"], {"id": id_}).fetchone()
    events = [] if position is None else db.execute(QUERIES["story"], (position, _MOST)).fetchall()
    names, cause = [id_], None
    for number, (encoded, goes_out, epoch, published_at, stream, sequence) in enumerate(events):
        record = decode_record(encoded)
        if number and record.cause != position:
            break
        envelope = record.envelope
        waits = bool(number and goes_out and published_at is None)
        step = draft.add(
            "message", envelope.id, record.role, cause, outcome="waiting" if waits else None, at=envelope.ts,
            place=record.subject if number else None,
            ids={"causation_id": envelope.causation_id} if envelope.causation_id else None,
        )  # fmt: skip
        if not number:
            cause = step.id
            names.append(envelope.id)
        elif waits:
            draft.wait(step, f"{envelope.id} waits for {owner.agent} to publish it", "postroom agent run")
        else:
            draft.add(
                "event", envelope.id, "published", step.id, at=from_milliseconds(published_at),
                place="JetStream" if stream is None else f"{stream} #{sequence}", ids={"epoch": str(epoch or 0)},
            )  # fmt: skip
    for name in dict.fromkeys(names):
        for attempts, error, failed_at in db.execute(QUERIES["attempt_of"], (name,)):
            step = draft.add(
                "handled", f"{name} {owner.agent}", "tried", thing=name, outcome="waiting",
                at=from_milliseconds(failed_at), attempt=attempts, reason=error,
            )  # fmt: skip
            draft.wait(step, f"{owner.agent} tries it again: {error}", f"postroom trace {name}")
        for letter_id, encoded, published_at in db.execute(QUERIES["letters_of"], {"id": name}):
            letter = msgspec.json.decode(encoded, type=DeadLetter)
            reason = f"{letter.reason}: {letter.last_error}"
            step = draft.add(
                "letter", letter_id, "buried", cause, outcome="dead", at=from_milliseconds(published_at),
                attempt=letter.attempts, reason=reason,
            )  # fmt: skip
            list_it = f"postroom dlq list --mesh {owner.tenant} --consumer {letter.consumer}"
            draft.wait(step, f"{owner.agent} could not handle it: {reason}", list_it)
    return compose(draft.steps, draft.waits, more=len(events) == _MOST)


async def answer_stories(nats: Client, context: str, durable: str, database: Path) -> None:
    """Answer for the store of an agent until the connection is closed; of processes that share it one answers."""

    async def answer(question: Msg) -> None:
        try:
            story = msgspec.json.encode(await trace(database, question.data.decode(errors="replace")))
        except Fatal:  # it has nothing under that id
            story = b""
        await question.respond(story)

    await nats.subscribe(_story_subject(context, durable), queue=durable, cb=answer)


async def ask_story(nats: Client, context: str, durable: str, id_: str) -> Story | None:
    """Return an agent's story of an id, without steps where it is unknown; None where the agent does not answer."""
    try:
        answer = await nats.request(_story_subject(context, durable), id_.encode(), timeout=_STORY_SECONDS)
        return _decode_story(answer.data) if answer.data else Story(waits=[], steps=[])
    except (*NATS_ERRORS, msgspec.MsgspecError):
        return None


def _story_subject(context: str, durable: str) -> str:
    return f"postroom.story.{context}.{durable}"


def _verify(owner: Owner, db: sqlite3.Connection) -> Verified:
    head, difference = read_head(db), None
    position, state_hash = 0, NO_HASH
    try:
        for event in read_events(db):
            check(event, position + 1, state_hash)
            position, state_hash = event.position, event.state_hash
    except Differs as found:
        difference = found
    else:
        if position != head.position:
            why = f"the state is at position {head.position}, but the events end at {position}"
            difference = Differs(position + 1, why)
        elif state_hash != head.state_hash:
            difference = Differs(position, "the hash of the state is not that of the event")
    if difference is None:
        return Verified(owner, head, None, None)
    return Verified(owner, head, difference.position, str(difference))


async def _read(database: Path, read: Callable[[Owner, sqlite3.Connection], T]) -> T:
    if not (is_there(database) and database.is_file()):  # noqa: ASYNC240 - before anything else runs; a pipe would hold it up
        raise Fatal(Exit.NOT_FOUND, f"there is no event store {database}")

    def owned(db: sqlite3.Connection) -> T:
        owner = read_owner(db)
        if owner is None:
            raise Fatal(Exit.NOT_FOUND, f"{database} has not been used by an agent yet")
        return read(owner, db)

    try:
        connection = await Connection.open(partial(open_reader, database))
        try:
            return await connection.run(lambda db: in_snapshot(db, lambda: owned(db)))
        finally:
            await connection.close()
    except (sqlite3.Error, Damaged) as error:
        raise Fatal(Exit.FAILED, f"cannot read {database}: {error}") from error


async def republish(database: Path, since: datetime, *, reason: str, dry_run: bool = False) -> int:
    """Have everything published again that was published from `since` on; return how many messages that are.

    The store's operator log keeps who did it, and why. The agent's process does the publishing: at its next comparison
    with the streams, or when it starts. Raises `Fatal`: 3 where there is no store, 78 where it cannot be used, 75 or 74
    where the disk is full or fails.
    """
    owner = await owner_of(database)
    moment = to_microseconds(since) // _PER_MILLISECOND
    turns = Turns(database.parent)
    try:
        async with turns.turn():
            store = await Store.open(database, owner)
            try:
                if dry_run:
                    return len(await store.published_since(moment))
                return await store.requeue_since(moment, now=now_ms(), actor=this_user(), reason=reason)
            except sqlite3.Error as error:
                detail = f"nothing is published again, since {database} cannot be written: {error}; check its disk"
                raise Fatal(exit_after(error), detail) from error
            finally:
                await store.close()
    finally:
        turns.close()
