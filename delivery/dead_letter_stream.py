"""What an operator does with dead letters: look at them, send them again, drop them (spec delivery.md).

A replay goes to the original subject under a message id that is derived from the old one, so that a replay that was cut
short and repeated is still one message; it names the consumer that buried it, and every other one lets it pass, so that
consumer has to be there. Then a note of what was done is kept in the same stream, and only then is the letter removed:
it cannot be replayed twice.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from datetime import datetime, timedelta
from typing import Final, Literal, NamedTuple

import msgspec
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig
from nats.js.errors import NotFoundError

from delivery.dead_letters import REPLAY_OF, REPLAYED_FOR, DeadLetter, now
from delivery.errors import NATS_ERRORS, consumer_gone, from_nats, letter_not_found, no_payload, no_streams
from delivery.message import EPOCH, MESSAGE_ID
from delivery.nats_client import UNREADABLE, UNREADABLE_SUBJECT
from delivery.streams import all_streams, covers
from delivery.subjects import dead_letter_subject, stream_name

_PAGE: Final = 500  # letters asked for at once
_SECONDS: Final = 5.0  # longest wait for a page of them
_NOTE_TYPE: Final = "DeadLetterSettled"
_EVENT_TYPE: Final = "Postroom-Event-Type"
_REPLAY_ID: Final = re.compile(r"(?P<original>.+)~[A-Za-z0-9_-]+\.(?P<number>[0-9]+)")

Act = Literal["replayed", "dropped"]


class LetterNote(msgspec.Struct, kw_only=True, omit_defaults=True, frozen=True):
    """What an operator did to a dead letter, kept for as long as the letter would have been."""

    act: Act
    at: datetime
    actor: str
    why: str
    message_id: str | None
    original_subject: str
    reason: str  # why the letter was dead
    consumer: str
    new_message_id: str | None = None


class StoredLetter(NamedTuple):
    """A dead letter in its stream; `letter` is None where something else lies there."""

    id: str  # its sequence in the stream
    letter: DeadLetter | None


class LetterFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Which letters are meant; what is not set matches everything."""

    ids: frozenset[str] | None = None  # of letters, or message ids
    subject: str | None = None  # of the original message; `*` and `>` as in NATS
    reason: str | None = None
    consumer: str | None = None
    older_than_seconds: float | None = None

    def matches(self, stored: StoredLetter, moment: datetime) -> bool:
        """Tell whether `stored` is meant, at `moment`."""
        letter = stored.letter
        if self.ids is not None:
            return stored.id in self.ids or (letter is not None and letter.message_id in self.ids)
        if letter is None:
            return self == LetterFilter()
        old_enough = self.older_than_seconds is None or letter.died_at <= moment - timedelta(
            seconds=self.older_than_seconds
        )
        return (
            old_enough
            and self.reason in (None, letter.reason)
            and self.consumer in (None, letter.consumer)
            and (self.subject is None or covers(self.subject, letter.original_subject))
        )


class DeadLetterStream:
    """The dead letters of one context, for an operator; whatever reads them raises `NotFound` for an unknown one."""

    def __init__(self, js: JetStreamContext, context: str, *, actor: str, clock: Callable[[], datetime] = now) -> None:
        self._js = js
        self._context = context
        self._name = stream_name(context, "dlq")
        self._actor = actor
        self._clock = clock

    async def find(self, wanted: LetterFilter) -> list[StoredLetter]:
        """Return the letters that are meant, oldest first; raises `NotFound` for an id that is none."""
        moment = self._clock()
        found = [stored async for stored in self._letters() if wanted.matches(stored, moment)]
        known = {stored.id for stored in found} | {stored.letter.message_id for stored in found if stored.letter}
        for missing in sorted((wanted.ids or frozenset()) - known):
            raise letter_not_found(missing)
        return found

    async def count(self) -> int:
        """Return how many letters there are, without reading them."""
        letters = 0
        async for message in self._messages(headers_only=True):
            letters += (message.headers or {}).get(_EVENT_TYPE) != _NOTE_TYPE
        return letters

    async def notes(self) -> list[LetterNote]:
        """Return what operators did, oldest first."""
        return [
            msgspec.json.decode(message.data, type=LetterNote)
            async for message in self._messages()
            if (message.headers or {}).get(_EVENT_TYPE) == _NOTE_TYPE
        ]

    async def replay(self, stored: StoredLetter, *, why: str) -> str:
        """Send a letter's message again, then remove the letter; returns the new message id.

        Raises `Conflict` where the letter holds no message, or the consumer that it is meant for is gone.
        """
        letter = stored.letter
        if letter is None or (letter.payload is None and letter.payload_base64 is None):
            raise no_payload(stored.id)
        new_id = replay_id(letter)
        try:
            await self._check_consumer(stored.id, letter)
            await self._js.publish(letter.original_subject, letter.data(), headers=_replay_headers(letter, new_id))
        except NATS_ERRORS as error:
            raise from_nats(error, f"replaying the dead letter {stored.id}") from error
        await self._note("replayed", letter, stored.id, why=why, new_message_id=new_id)
        await self._remove(stored.id)
        return new_id

    async def drop(self, stored: StoredLetter, *, why: str) -> None:
        """Remove a letter for good."""
        if stored.letter is not None:
            await self._note("dropped", stored.letter, stored.id, why=why)
        await self._remove(stored.id)

    async def _letters(self) -> AsyncIterator[StoredLetter]:
        async for message in self._messages():
            if (message.headers or {}).get(_EVENT_TYPE) != _NOTE_TYPE:
                yield StoredLetter(str(message.metadata.sequence.stream), _decode(message.data))

    async def _messages(self, *, headers_only: bool = False) -> AsyncIterator[Msg]:
        """Yield what the stream holds now, through a consumer that the server forgets by itself."""
        config = ConsumerConfig(
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            inactive_threshold=2 * _SECONDS,
            headers_only=headers_only or None,
        )
        try:
            left = (await self._js.stream_info(self._name)).state.messages
            pull = await self._js.pull_subscribe(f"{self._context}.dlq.>", stream=self._name, config=config)
            while left:
                for message in await pull.fetch(min(_PAGE, left), timeout=_SECONDS):
                    left = message.metadata.num_pending
                    yield message
            await pull.unsubscribe()
        except NotFoundError:
            await self._check_context()  # no stream, no letters: it is made with the first one
        except NATS_ERRORS as error:
            raise from_nats(error, f"reading the dead letters of {self._context}") from error

    async def _check_context(self) -> None:
        """Raise `NotFound` where no stream takes any subject of the context: nobody may read that as good news."""
        for subjects in (f"{self._context}.>", f"cmd.{self._context}.>"):
            try:
                await self._js.find_stream_name_by_subject(subjects)
            except NotFoundError:
                continue
            except NATS_ERRORS as error:
                raise from_nats(error, f"looking for the streams of {self._context}") from error
            return
        raise no_streams(self._context)

    async def _check_consumer(self, id_: str, letter: DeadLetter) -> None:
        if not letter.consumer:  # another program's: it is meant for all
            return
        try:
            stream = await self._js.find_stream_name_by_subject(letter.original_subject)
            await self._js.consumer_info(stream, letter.consumer)
        except NotFoundError:
            raise consumer_gone(id_, letter.consumer, letter.original_subject) from None

    async def _note(
        self, act: Act, letter: DeadLetter, id_: str, *, why: str, new_message_id: str | None = None
    ) -> None:
        note = LetterNote(
            act=act,
            at=self._clock(),
            actor=self._actor,
            why=why,
            message_id=letter.message_id,
            original_subject=letter.original_subject,
            reason=letter.reason,
            consumer=letter.consumer,
            new_message_id=new_message_id,
        )
        subject = dead_letter_subject(self._context, letter.original_subject)
        headers = {_EVENT_TYPE: _NOTE_TYPE, MESSAGE_ID: f"note:{act}:{letter.died_at.isoformat()}:{id_}"}
        try:
            await self._js.publish(subject, msgspec.json.encode(note), headers=headers)
        except NATS_ERRORS as error:
            raise from_nats(error, f"noting what was done to the dead letter {id_}") from error

    async def _remove(self, id_: str) -> None:
        try:
            await self._js.delete_msg(self._name, int(id_))
        except NATS_ERRORS as error:
            raise from_nats(error, f"removing the dead letter {id_}") from error


def replay_id(letter: DeadLetter) -> str:
    """Derive the message id of a letter's replay: the same each time, another for each further death."""
    message_id = letter.message_id or f"{letter.stream}.{letter.sequence}"
    before = _REPLAY_ID.fullmatch(message_id)
    original, number = (before["original"], int(before["number"])) if before else (message_id, 0)
    return f"{original}~{letter.consumer}.{number + 1}"


def _replay_headers(letter: DeadLetter, new_id: str) -> dict[str, str]:
    """Return a letter's own headers, and those that say what the replay is and whose."""
    ours = {EPOCH, UNREADABLE, UNREADABLE_SUBJECT}
    own = {name: text for name, text in letter.headers.items() if not name.startswith("Nats-") and name not in ours}
    first_id = letter.headers.get(REPLAY_OF) or letter.message_id
    said = {MESSAGE_ID: new_id, REPLAY_OF: first_id, REPLAYED_FOR: letter.consumer}
    return own | {name: text for name, text in said.items() if text}


async def count_letters(js: JetStreamContext) -> dict[str, int]:
    """Return how many letters each stream of them holds, by its name; raises `PostroomError`."""
    suffix = stream_name("any", "dlq").removeprefix("ANY")
    try:
        names = sorted(info.config.name or "" for info in await all_streams(js))
    except NATS_ERRORS as error:
        raise from_nats(error, "listing the streams of dead letters") from error
    contexts = {name: name.removesuffix(suffix).lower() for name in names if name.endswith(suffix)}
    return {name: await DeadLetterStream(js, context, actor="").count() for name, context in contexts.items()}


def _decode(data: bytes) -> DeadLetter | None:
    try:
        return msgspec.json.decode(data, type=DeadLetter)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
