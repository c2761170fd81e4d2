"""The flows of a worker: in every mesh where jobs of a flow run, a durable consumer `jobs__<flow>` moves them on.

Every worker with the flow shares it. It reads the mesh's events: those of the engine itself, and those that answer a
request; any other is acknowledged. A consumer begins with what was published since the oldest job that has not ended.

activity_spawned                leg 1, in its body the activity, and the message where one is to come again
activity_cycled                 leg 2, in its body the activity and what it works on again
activity_retried                leg 2, in its body the activity and the message that is to come again
any event that names a request  leg 2: in `X-Causation-Id`, or in its body as `answers`, the request's message id
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec
import structlog
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom._wire.words import json_fault
from postroom.chassis.postgres import POSTGRES_ERRORS, REFUSED, Pool, uuid_of
from postroom.claims import DONE, Dead, Later, Outcome
from postroom.delivery.consumer import ACK_TIMEOUT, MAX_DELIVER, Consumer, Settle
from postroom.delivery.consumers import Consumers
from postroom.delivery.dead_letters import REPLAY_OF, RecordedLetters
from postroom.delivery.durables import find_oldest
from postroom.delivery.message import CAUSATION_ID, Delivery
from postroom.delivery.nats import CLOCK_SKEW, most_payload
from postroom.delivery.settings import BackoffSettings, ConsumerSettings, NatsSettings
from postroom.delivery.subjects import EventSubject, event_subject, parse_subject
from postroom.errors import InvalidMessage
from postroom.flow import Flow
from postroom.ledger.engine import Asker, Engine, Place, TryLater, find_places
from postroom.ledger.primitives import Answer
from postroom.worker.config import JobSettings

_log = structlog.get_logger(__name__)

PREFIX: Final = "jobs__"  # of a durable's name; the flow's name follows

_MOST_DELIVERIES: Final = 1000  # the flow's own policy ends it before, unless no delivery became an attempt
_PAUSES: Final = BackoffSettings().schedule  # before the next delivery, unless the flow or the ledger sets one
_IN_HAND: Final = 500  # messages of one flow in one mesh
_BEFORE_ALL: Final = datetime.min.replace(tzinfo=UTC)

SPAWNED: Final = "activity_spawned"
CYCLED: Final = "activity_cycled"
RETRIED: Final = "activity_retried"

_PRESENT: Final = b'"answers"'


class _Body(msgspec.Struct):
    activity: UUID
    flow: str
    name: str
    request: Any = None
    guid: str | None = None
    answer: Any = None
    event: str | None = None


class _Answering(msgspec.Struct):
    answers: str | None = None


class _Sent(msgspec.Struct):
    body: str | None = None


class _Send(msgspec.Struct):
    """The body of an event that came from a send."""

    broker_message_id: str
    message: _Sent


class Due(NamedTuple):
    """A leg is due: leg 2 with its answer, leg 1 without."""

    activity: UUID
    name: str
    flow: str
    guid: str
    answer: Answer | None = None


class Answering(NamedTuple):
    """An event of a mesh that names a request, which may be one of the flow's there."""

    request: UUID
    mesh: str
    event: str
    guid: str


Meaning = Due | Answering | None

_decode_body: Final = msgspec.json.Decoder(_Body).decode
_decode_answering: Final = msgspec.json.Decoder(_Answering).decode
_decode_send: Final = msgspec.json.Decoder(_Send).decode


def read(delivery: Delivery) -> Meaning:
    """Return what a message means to a flow; None where it means nothing to any.

    Raises `InvalidMessage` for an engine's event whose content is not what an engine writes.
    """
    guid = delivery.headers.get(REPLAY_OF) or delivery.message_id
    try:
        subject = parse_subject(delivery.subject)
    except InvalidMessage:  # it is another program's
        return None
    if guid is None or not isinstance(subject, EventSubject):
        return None
    event = subject.name
    if event in {SPAWNED, CYCLED, RETRIED}:
        return _own(event, guid, delivery)
    request = _uuid(delivery.headers.get(CAUSATION_ID))
    if request is None and _PRESENT in delivery.data:  # most events do not have the member, and need no decoding
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            request = _uuid(_decode_answering(delivery.data).answers)
    return None if request is None else Answering(request, subject.context, event, guid)


def answer_of(delivery: Delivery, request: UUID, event: str) -> Answer:
    """Return the answer in `event`: its body, or the body of the send that it came from; raises `InvalidMessage`.

    A send's text that is not JSON is passed on as a text.
    """
    try:
        said = msgspec.json.encode(_said(delivery.data)).decode()
        return Answer(said, request, event, delivery.traceparent)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"the answer {delivery.message_id} to the request {request} is not JSON"
        raise InvalidMessage.of("invalid_answer", f"{detail}: {json_fault(error, delivery.data)}") from error


def _own(event: str, guid: str, delivery: Delivery) -> Due:
    try:
        body = _decode_body(delivery.data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        detail = f"{delivery.message_id} is not a valid {event}: {error}"
        raise InvalidMessage.of("invalid_job_message", detail) from error
    if event == SPAWNED:
        return Due(body.activity, body.name, body.flow, body.guid or guid)
    if event == CYCLED:
        return Due(body.activity, body.name, body.flow, guid, _answer(delivery, body.request))
    answer = _answer(delivery, body.answer, _uuid(body.request), body.event)
    return Due(body.activity, body.name, body.flow, body.guid or guid, answer)


def _answer(delivery: Delivery, said: Any, request: UUID | None = None, event: str | None = None) -> Answer:
    return Answer(msgspec.json.encode(said).decode(), request, event, delivery.traceparent)


def _said(data: bytes) -> Any:
    try:
        text = _decode_send(data).message.body
    except msgspec.ValidationError:
        return msgspec.json.decode(data)
    try:
        return None if text is None else msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _uuid(text: Any) -> UUID | None:
    """Return the request that a message id names, also where it was published again or replayed."""
    return uuid_of(text.partition("~")[0].partition("/")[0]) if isinstance(text, str) else None


class JobHandler:
    """Gives the messages of one consumer to the engine of its flow."""

    def __init__(self, engine: Engine, slots: asyncio.Semaphore, emitted: Callable[[], None]) -> None:
        """`slots` limit the steps that run at once in all flows of a worker. `emitted` is called after each step."""
        self._engine = engine
        self._emitted = emitted
        self._slots = slots

    async def handle(self, batch: Sequence[Delivery], settle: Settle) -> None:
        """Settle each delivery of `batch`, as soon as its steps are done."""
        meanings = [_read(delivery) for delivery in batch]
        requests = [meaning.request for meaning in meanings if isinstance(meaning, Answering)]
        brought_back = [meaning.answer.request for meaning in meanings if isinstance(meaning, Due) and meaning.answer]
        with self._engine.holding(requests + [request for request in brought_back if request is not None]):
            try:
                askers = await self._engine.find_askers(requests)
            except POSTGRES_ERRORS as error:
                for delivery in batch:
                    await settle(delivery, _again(error, delivery))
                return
            steps = (self._handle(each, meaning, askers, settle) for each, meaning in zip(batch, meanings, strict=True))
            for ended in await asyncio.gather(*steps, return_exceptions=True):
                if ended is not None:  # after all have ended, so that one message does not fail the others
                    raise ended

    async def _handle(
        self, delivery: Delivery, meaning: Meaning | Dead, askers: Mapping[UUID, Asker], settle: Settle
    ) -> None:
        if isinstance(meaning, Answering):
            meaning = self._answer(delivery, meaning, askers)
        if isinstance(meaning, Dead):
            await settle(delivery, meaning)
        elif (
            meaning is None
            or meaning.flow != self._engine.flow.name
            # an answer may have been set aside by a worker that could not know whether it is awaited
            or (meaning.answer is not None and not self._awaits(meaning.name, meaning.answer.event))
        ):
            self._engine.counters.ignored += 1
            await settle(delivery, DONE)
        else:
            await settle(delivery, await self._move_on(delivery, meaning))

    def _answer(self, delivery: Delivery, answering: Answering, askers: Mapping[UUID, Asker]) -> Due | Dead | None:
        """Return the leg 2 that an answer is for; None where the request is not the flow's."""
        asker = askers.get(answering.request)
        if asker is None or asker.mesh != answering.mesh or not self._awaits(asker.name, answering.event):
            return None
        try:
            answer = answer_of(delivery, answering.request, answering.event)
        except InvalidMessage as error:
            return Dead(error.code, str(error))
        return Due(asker.activity, asker.name, self._engine.flow.name, answering.guid, answer)

    def _awaits(self, name: str, event: str | None) -> bool:
        """Return whether an event may be an activity's answer: any may be, for an activity that this worker lacks."""
        activity = self._engine.flow.activities.get(name)
        return event is None or activity is None or activity.answer in {None, event}

    async def _move_on(self, delivery: Delivery, meaning: Due) -> Outcome:
        """Run the steps that are due; a message that was delivered too often fails its activity: no job waits."""
        try:
            if delivery.attempt > _MOST_DELIVERIES:
                await self._engine.abandon(
                    meaning.activity, f"its message was delivered {_MOST_DELIVERIES} times without success"
                )
                return Dead(MAX_DELIVER, ACK_TIMEOUT)
            async with self._slots:
                if meaning.answer is None:
                    await self._engine.spawned(meaning.activity, meaning.name, meaning.guid)
                else:
                    await self._engine.answered(meaning.activity, meaning.name, meaning.guid, meaning.answer)
        except TryLater as later:
            pause = _PAUSES.seconds(delivery.attempt) if later.seconds is None else later.seconds
            return Later(str(later), pause)
        except REFUSED as error:
            return Dead("refused_by_postgres", f"Postgres cannot store the message: {error}")
        except POSTGRES_ERRORS as error:
            return _again(error, delivery)
        self._emitted()
        return DONE


def _again(error: Exception, delivery: Delivery) -> Later:
    """Return what becomes of a message that Postgres cannot be asked about."""
    return Later(f"{type(error).__name__}: {error}", _PAUSES.seconds(delivery.attempt))


def _read(delivery: Delivery) -> Meaning | Dead:
    try:
        return read(delivery)
    except InvalidMessage as error:
        return Dead(error.code, str(error))
    except (ArithmeticError, ValueError, RecursionError) as error:
        return Dead("invalid_job_message", f"{delivery.message_id} cannot be read: {error}")


async def _find_unread(js: JetStreamContext, consumer: Consumer) -> datetime | None:
    """Return since when, at the earliest, a message waits that no worker was given; None where none does."""
    try:
        info = await js.consumer_info(consumer.stream, consumer.durable)
    except NotFoundError:  # it is just being made
        return _BEFORE_ALL
    first = await find_oldest(js, info, info.delivered) if info.num_pending else None
    return None if first is None else first - CLOCK_SKEW


class Jobs(Consumers[tuple[str, str], Consumer]):
    """The flows of one worker, by flow and mesh: `run` it as a task."""

    def __init__(
        self,
        pool: Pool,
        nats: NatsSettings,
        flows: Sequence[Flow],
        settings: JobSettings,
        *,
        emitted: Callable[[], None],
    ) -> None:
        """Call `emitted` whenever a step may have written an event."""
        super().__init__(nats, name="postroom-worker jobs", check_seconds=settings.check_seconds)
        self.engines = {
            flow.name: Engine(pool, flow, lease=timedelta(seconds=settings.lease_seconds)) for flow in flows
        }
        self._pool = pool
        self._settings = settings
        self._emitted = emitted
        self._slots = asyncio.Semaphore(settings.steps_at_once)

    async def look(self, js: JetStreamContext) -> None:
        """Begin what is missing, bring back what waits for an activity, and ask again for what is overdue."""
        for engine in self.engines.values():
            engine.limit(most_payload(js))
        for place in await find_places(self._pool, list(self.engines)):
            if (place.flow, place.mesh) not in self.running:
                await self._begin(js, place)
        for flow, engine in self.engines.items():
            await engine.bring_back()
            for mesh in await engine.find_late():
                if (consumer := self.running.get((flow, mesh))) is not None:
                    await engine.ask_again(mesh, await _find_unread(js, consumer))

    async def _begin(self, js: JetStreamContext, place: Place) -> None:
        try:
            stream = await js.find_stream_name_by_subject(event_subject(place.mesh, SPAWNED))
        except NotFoundError:
            return  # it is not declared yet: the next look will find it
        settings = ConsumerSettings(
            stream=stream,
            durable=PREFIX + place.flow,
            filter_subjects=[f"{place.mesh}.event.>"],
            ack_wait_seconds=self._settings.lease_seconds,
            max_ack_pending=_IN_HAND,
            batches_at_once=_IN_HAND,  # the steps are limited: a slow one holds up no other
            since=None if place.since is None else place.since - CLOCK_SKEW,
        )
        handler = JobHandler(self.engines[place.flow], self._slots, self._emitted)
        consumer = Consumer(js, settings, handler, RecordedLetters(self._pool, place.mesh))
        self.begin((place.flow, place.mesh), consumer)
        _log.info("flow_begun", flow=place.flow, mesh=place.mesh, stream=stream)
