"""The daemon's requests to its broker (accept, features, topics, reports), and the check that an answer makes sense.

An answer that is not JSON, or is about other ids, raises `RequestFailed` like a lost connection does
(docs/contract/send.md#send-65).
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from random import Random
from typing import Final, NamedTuple, Self, TypeVar
from urllib.parse import quote

import msgspec
import structlog

from broker_client.channel import Channel, Failure, Reply, RequestFailed
from broker_client.settings import BrokerClientSettings
from outbox import Accepted, ClaimedRow, DoneRow, Outbox, Unanswered
from postroom._wire import accept as wire
from postroom._wire.administration import Subscribe, Subscription, TopicList
from postroom._wire.ids import now_ms
from postroom._wire.message import parse_destination
from postroom._wire.names import MESSAGE_ID
from postroom._wire.programs import PROGRAMS, Report
from postroom._wire.retry import Backoff, read_date, read_retry_after
from postroom._wire.sends import MAX_ENDED, EndedRows
from postroom.chassis.config import MASK
from postroom.chassis.logs import clean
from postroom.chassis.runtime import in_step
from postroom.errors import PostroomError, Problem, error_for

T = TypeVar("T")

_log = structlog.get_logger(__name__)

_DAY_MS: Final = 86_400_000
_LOOK_SECONDS: Final = 1.0  # between two queries for rows that ended, or two looks at the clock
_PAUSES: Final = Backoff(1.0, 60.0)  # between two tries to report them
_LARGEST_HISTORY_ID: Final = 2**63 - 1  # what a column holds
_ACCEPTED: Final = frozenset({HTTPStatus.OK, HTTPStatus.CREATED})
_LOOKED_UP: Final = frozenset({HTTPStatus.OK, HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT})
_SUCCESS: Final = frozenset({*_ACCEPTED, HTTPStatus.NO_CONTENT})
_CALLERS_FAULT: Final = frozenset({400, 403, 404, 409, 422})  # of a call passed on, not of our token
_encode: Final = msgspec.json.Encoder().encode


class BrokerLink:
    """The client of the broker, as the member whose token the settings name. Close it when done."""

    def __init__(self, settings: BrokerClientSettings, *, clock: Callable[[], int] = now_ms) -> None:
        """Check the settings; raises `Fatal` (78) for what cannot be used, and for a token that others can read."""
        self._channel = Channel(settings)
        self.address = self._channel.base
        self._clock = clock
        self.clock = ConfirmedClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; safe to call twice."""
        await self._channel.close()

    async def confirmed_time(self) -> int:
        """Return the time (ms since the epoch), by which old data may be deleted, once the clock is confirmed.

        That is while the broker's last answer is no older than a day, and agrees with the clock to within a day.
        """
        while not self.clock.is_confirmed(now := self._clock(), _DAY_MS):  # noqa: ASYNC110 - any answer may confirm it
            await asyncio.sleep(_LOOK_SECONDS)
        return now

    def identity(self) -> int:
        """Return a number that changes whenever the token does, since it may then be another member's.

        Raises `RequestFailed` without a usable token.
        """
        return self._channel.token.changes()

    async def accept(self, rows: Sequence[ClaimedRow]) -> list[wire.AcceptAnswer]:
        """Post one batch and return its answers in the order of `rows`; raises `RequestFailed`.

        The broker recognises an id that it has accepted (its dedupe row), so posting a batch twice is harmless.
        """
        items = [
            wire.RawAcceptItem(
                client_message_id=row.client_message_id,
                request_fingerprint=row.fingerprint.hex(),
                message=msgspec.Raw(row.payload),  # the outbox's bytes, never decoded
            )
            for row in rows
        ]
        return await self._answers("/v1/accept", _encode({"messages": items}), rows)

    async def accepted(self, rows: Sequence[Unanswered]) -> list[Accepted | None]:
        """Return what the broker has of each row, in the order of `rows`, None if nothing; raises `RequestFailed`."""
        return [_found(answer) for answer in await self._look_up(rows)]

    async def compared(self, rows: Sequence[DoneRow]) -> tuple[list[tuple[DoneRow, Accepted | None]], list[DoneRow]]:
        """Return the rows that the broker has, each with what it has of it, and those it lacks; raises `RequestFailed`.

        It lacks a row too whose id another message of the member has there: that was accepted after the restore. An id
        that another member has there is not lost: this daemon may have had that member's token before.
        """
        answers = list(zip(rows, await self._look_up(rows), strict=True))
        found = [(row, _found(answer)) for row, answer in answers if not _lacks(answer)]
        return found, [row for row, answer in answers if _lacks(answer)]

    async def _look_up(self, rows: Sequence[Unanswered | DoneRow]) -> list[wire.AcceptAnswer]:
        messages = [
            wire.SentMessage(client_message_id=row.client_message_id, request_fingerprint=row.fingerprint.hex())
            for row in rows
        ]
        answers = await self._answers("/v1/accepted", _encode(wire.AcceptedQuery(messages=messages)), rows)
        if strange := next((each for each in answers if each.status not in _LOOKED_UP), None):
            raise _garbage(f"the broker's answer for {strange.client_message_id} is not valid")
        return answers

    async def _answers(
        self, path: str, body: bytes, rows: Sequence[ClaimedRow | Unanswered | DoneRow]
    ) -> list[wire.AcceptAnswer]:
        """Post something about `rows`, and return an answer that makes sense for each, in their order."""
        answers = _decoded(self._succeeded(await self._request("POST", path, body)), _Answers).answers
        if len(answers) != len(rows):
            raise _garbage(f"the broker gave {len(answers)} answers for {len(rows)} messages")
        for row, answer in zip(rows, answers, strict=True):
            if answer.client_message_id != row.client_message_id:
                raise _garbage(f"the broker answered another id in the place of {row.client_message_id}")
            accepted = answer.status in _ACCEPTED
            ids_are_valid = (
                answer.broker_message_id is not None
                and MESSAGE_ID.allows(answer.broker_message_id)
                and answer.history_id is not None
                and 0 <= answer.history_id <= _LARGEST_HISTORY_ID
            )
            if not (ids_are_valid if accepted else 400 <= answer.status < 600):  # noqa: PLR2004 - 4xx and 5xx
                raise _garbage(f"the broker's answer for {row.client_message_id} is not valid")
        return [*answers]

    async def features(self) -> wire.Features:
        """Ask what the broker supports, and the mesh and member of the token; raises `RequestFailed`."""
        return _decoded(self._succeeded(await self._request("GET", "/v1/features")), wire.Features)

    async def report_ended(self, report: EndedRows) -> None:
        """Report rows that ended here; raises `RequestFailed`."""
        self._succeeded(await self._request("POST", "/v1/ended_rows", _encode(report)))

    async def report(self, report: Report) -> None:
        """Report this daemon's state; raises `RequestFailed`."""
        self._succeeded(await self._request("POST", PROGRAMS.path, _encode(report)))

    async def topics(self) -> TopicList:
        """List the topics of the member's mesh; raises `PostroomError`."""
        return _decoded(await self._pass_on("GET", "/v1/topics"), TopicList)

    async def subscribe(self, topic: str) -> Subscription:
        """Subscribe the member to `topic` of its mesh; raises the broker's `PostroomError`, `NotFound` above all."""
        path = await self._subscriptions(topic)
        return _decoded(await self._pass_on("POST", path, _encode(Subscribe())), Subscription)

    async def unsubscribe(self, topic: str) -> None:
        """End the member's subscription to `topic`; raises the broker's `PostroomError`, `NotFound` above all."""
        path = await self._subscriptions(topic)
        await self._pass_on("DELETE", f"{path}/{quote((await self.features()).member, safe='')}")

    async def _subscriptions(self, topic: str) -> str:
        name = parse_destination(f"topic:{topic}", "topic").ref
        return f"/v1/topics/{quote((await self.features()).mesh, safe='')}/{name}/subscriptions"

    async def _request(self, method: str, path: str, body: bytes | None = None) -> Reply:
        reply = await self._channel.request(method, path, body)
        self.clock.answered(reply.date, self._clock())
        return reply

    async def _pass_on(self, method: str, path: str, body: bytes | None = None) -> Reply:
        reply = await self._request(method, path, body)
        if reply.status in _CALLERS_FAULT:
            problem = _decoded(reply, Problem)
            problem.status = reply.status
            problem.detail = self._without_token(clean(problem.detail))
            raise error_for(problem)
        return self._succeeded(reply)

    def _succeeded(self, reply: Reply) -> Reply:
        if reply.status in _SUCCESS:
            return reply
        try:
            problem = msgspec.json.decode(reply.content, type=_Problem)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            problem = _Problem()  # nothing else of an answer is repeated
        words = f" {clean(f'({problem.code}): {problem.detail}')}" if problem.code else ""  # a log masks `token: …`
        sentence = f"{self._channel.base} answered {reply.status}{self._without_token(words)}"
        retry_after = read_retry_after(reply.retry_after, self._clock())
        failure = failure_of(reply.status, problem.code)
        raise RequestFailed.because(failure, sentence, retry_after, by_proxy=not problem.code)

    def _without_token(self, text: str) -> str:
        return text.replace(self._channel.token.read(), MASK)


def failure_of(status: int, code: str = "") -> Failure:
    """Sort the status, and the problem's code, of a whole request that did not succeed."""
    match status:
        case HTTPStatus.SERVICE_UNAVAILABLE if code == wire.OVERLOADED:
            return Failure.OVERLOADED
        case 401 | 403 | 404:
            return Failure.NOT_PERMITTED
        case 429:
            return Failure.NOT_NOW
        case _ if 400 <= status < 500:  # noqa: PLR2004 - the 4xx
            return Failure.REFUSED
        case _ if 500 <= status < 600:  # noqa: PLR2004 - the 5xx
            return Failure.SERVER_ERROR
        case _:  # a redirect, or a success that answers no request of ours
            return Failure.GARBAGE


def _lacks(answer: wire.AcceptAnswer) -> bool:
    mismatch = answer.problem is not None and answer.problem.conflict == "request_fingerprint_mismatch"
    return answer.status == HTTPStatus.NOT_FOUND or mismatch


def _found(answer: wire.AcceptAnswer) -> Accepted | None:
    if answer.broker_message_id is None or answer.history_id is None:
        return None
    return Accepted(answer.broker_message_id, answer.history_id)


def _decoded(reply: Reply, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(reply.content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _garbage(f"the broker's answer is not the expected JSON: {clean(str(error))}") from error


class _Problem(Problem):
    """A problem that has to say nothing: what another release omits about one message holds up no other."""

    type: str = ""
    title: str = ""
    status: int = 0
    detail: str = ""
    code: str = ""
    retryable: bool = False


class _OneAnswer(wire.AcceptAnswer):
    problem: _Problem | None = None


class _Answers(msgspec.Struct):
    answers: list[_OneAnswer]


def _garbage(sentence: str) -> RequestFailed:
    return RequestFailed.because(Failure.GARBAGE, sentence)


class _Answer(NamedTuple):
    """When an answer came and its `Date`: both in ms since the epoch, each by its own clock."""

    local: int
    date: int


class ConfirmedClock:
    """The daemon's clock, compared with the broker's last answer; times in ms since the epoch.

    Rows expire only while the `Date` of the last answer confirms it (docs/contract/send.md#send-74): a message that
    expires because a clock is wrong is lost.
    """

    def __init__(self) -> None:
        self._last: _Answer | None = None

    def answered(self, date: str | None, now: int) -> None:
        """Note an answer with the header `Date`; one without it changes nothing."""
        if (moment := read_date(date)) is not None:
            self._last = _Answer(now, moment)

    @property
    def ahead_ms(self) -> int | None:
        """How far the clock was ahead of the broker's at the last answer, to a second; None before the first."""
        return None if self._last is None else self._last.local - self._last.date

    def is_confirmed(self, now: int, margin: int) -> bool:
        """Return whether the last answer is recent and agrees with the clock, and the clock has not gone back since."""
        return (
            self._last is not None
            and 0 <= now - self._last.local <= margin
            and abs(self._last.date - self._last.local) <= margin
        )

    def is_stale(self, now: int, margin: int) -> bool:
        """Return whether the broker has to be asked before the clock can be confirmed."""
        return self._last is None or not 0 <= now - self._last.local <= margin

    def has_come(self, moment: int, now: int, margin: int) -> bool:
        """Return whether `moment` is over, which it is by this clock: False where the last answer contradicts that.

        The same where that answer is too old to say so. Without any there is no other clock to go by.
        """
        return self._last is None or not (self.is_stale(now, margin) or moment > self.estimate(now) + margin)

    def estimate(self, now: int) -> int:
        """Return the time by the broker's clock, as the last answer implies it."""
        return now if self._last is None else now + self._last.date - self._last.local


async def report_ends(outbox: Outbox, link: BrokerLink) -> None:
    """Report rows that ended here and that the broker may never have seen, until cancelled.

    Which ones is in the outbox, by the transaction that ended them (docs/contract/operate.md#operate-64).
    """
    rng, failures = Random(), 0  # noqa: S311 - it spreads retries and guards nothing
    while True:
        try:
            numbers, rows = await outbox.unreported(MAX_ENDED)
            if rows:
                await link.report_ended(EndedRows(host=socket.gethostname(), rows=rows))
                await outbox.reported(numbers)
        except PostroomError as error:  # the broker cannot be asked, or the disk is full
            failures += 1
            if failures == 1:
                _log.info("ends_not_reported", code=error.code, reason=str(error))
            await asyncio.sleep(_PAUSES.seconds(failures, rng.random))
        else:
            failures = 0
            await asyncio.sleep(0 if len(rows) == MAX_ENDED else in_step(_LOOK_SECONDS))
