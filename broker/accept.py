"""`POST /v1/accept`: a batch goes through B0 to B3, and each message is answered (docs/contract/accept.md#accept-9).

    B0  the dedupe rows that hold these ids already: 200 or 409, before anything that can fail
    B1  the limiter, then the message itself: 429 or 4xx, and nothing left behind except a unit of the limiter
    B2  the destination, inside the transaction: 4xx, and nothing left behind
    B3  the commit: 201

A round is B0 to B3 for the messages that have no answer yet. One round answers all but three rare kinds of message,
which the next round's B0 settles: those whose id another batch took meanwhile, those whose id is given twice in the
batch, and those that their destination refused (a retry of an accepted message must get its 200, even where the topic
was deleted since). A second run of an accepted message is harmless because of its row in `mesh.client_message_dedupe`.

A batch is read and checked in slices, in turn with other batches (docs/contract/accept.md#accept-43).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final

import msgspec
import structlog

from broker.authentication import NEW_TOKEN, Member
from broker.config import BrokerConfig
from broker.database import unavailable_as_503
from broker.items import Checked, Item, Malformed, check, read_item, split
from broker.limiter import Limiter, LimiterClosed
from broker.metrics import Metrics
from broker.store import AcceptStore, Candidate, Taken, TokenRevoked, Unwanted, Wanted, Written
from postroom._wire import spans
from postroom._wire.accept import AcceptAnswer, AcceptResponse
from postroom._wire.fingerprint import prefix
from postroom._wire.ids import new_id
from postroom.errors import Conflict, NotFound, NotPermitted, PostroomError, Problem, TryAgain

_log = structlog.get_logger(__name__)

MAX_ROUNDS: Final = 5
_UNKNOWN_RETRY_SECONDS: Final = 1.0

_encode: Final = msgspec.json.Encoder().encode


class AcceptService:
    """Answers batches; one for the whole process."""

    def __init__(self, store: AcceptStore, limiter: Limiter, metrics: Metrics, config: BrokerConfig) -> None:
        self._store = store
        self.slices = store.slices
        self._limiter = limiter
        self._metrics = metrics
        self._config = config
        self._at_work: dict[int, set[asyncio.Future[None]]] = {}  # a future per batch, by member

    async def accept(self, sender: Member, body: bytes | bytearray, wanted: Wanted = lambda: True) -> bytes:
        """Return the encoded `AcceptResponse` to a batch; nothing more is written once it is not `wanted`.

        Raises `PostroomError` where the request fails as a whole: 400 and 413 for a batch that can't be read, 401 for a
        token revoked meanwhile, 503 where nothing is known about any of its messages.
        """
        began = time.time_ns()
        with self._metrics.accept_seconds.time(), self._registered(sender):
            batch = _Batch(self._metrics)
            await self.slices.each(sender.whose, split(body, self._config.max_batch), batch.read)
            self._metrics.batch_messages.observe(len(batch.answers))
            for _ in range(MAX_ROUNDS):
                await self._round(sender, batch, wanted)
                if not batch.waiting:
                    break
            # ids that are taken and released faster than they can be looked up
            sentence = "other senders are using this id at the moment: send the message again under the same id"
            batch.fail_waiting(TryAgain.of("id_contended", sentence, retryable=True, retry_after=1.0).problem)
            for (phase, status), answers in batch.answered.items():
                self._metrics.messages.labels(phase, status).inc(answers)
            if spans.wanted():
                batch.record(began)
            return _encode(AcceptResponse(answers=[answer for answer in batch.answers if answer is not None]))

    async def until_ended(self, sender: Member) -> None:
        """Wait until the member's batches that are at work now have ended."""
        if at_work := self._at_work.get(sender.member_id):
            await asyncio.wait(set(at_work))

    @contextmanager
    def _registered(self, sender: Member) -> Iterator[None]:
        ended = asyncio.get_running_loop().create_future()
        at_work = self._at_work.setdefault(sender.member_id, set())
        at_work.add(ended)
        try:
            yield
        finally:
            ended.set_result(None)
            at_work.discard(ended)
            if not at_work:
                self._at_work.pop(sender.member_id, None)

    async def _round(self, sender: Member, batch: _Batch, wanted: Wanted) -> None:
        async with unavailable_as_503():
            batch.settle_taken(sender, await self._store.find(sender.mesh_id, batch.waiting_ids()))
        batch.settle_refused()
        await self._limit(sender, batch)
        check_one = partial(batch.check, self._config.max_inline_bytes)
        await self.slices.each(sender.whose, batch.take_unchecked(), check_one)
        candidates = batch.candidates()
        if not candidates:
            return
        try:
            with self._metrics.write_seconds.time():
                written = await self._store.write(sender, candidates, wanted)
        except TryAgain:  # its turn never came, and nothing was written
            raise
        except Unwanted:
            closed = "the connection, or the caller's half of it, was closed before anything was written"
            advice = "send the batch again under the same ids, and leave the connection open until the answer"
            raise TryAgain.of("given_up", f"{closed}: {advice}", retryable=True, retry_after=1.0) from None
        except TokenRevoked:
            raise NotPermitted.of("invalid_token", f"the token was revoked; {NEW_TOKEN}") from None
        except Exception as error:  # noqa: BLE001 - after any other error the batch may have been committed
            await self._resolve_unknown(sender, batch, error)
        else:
            batch.settle_written(written)

    async def _limit(self, sender: Member, batch: _Batch) -> None:
        ids, fines = batch.unlimited_ids(), list(batch.fines)
        batch.fines.clear()
        if not ids and not fines:
            return
        try:
            admission = await self._limiter.admit(sender.mesh, sender.name, [*ids, *fines])
        except LimiterClosed as error:
            batch.settle_denied(frozenset(ids), error.problem)
            return
        sentence = "the rate limit of the mesh or the member is used up: try again when the next window begins"
        batch.settle_denied(
            admission.denied,
            TryAgain.of("rate_limited", sentence, retryable=True, retry_after=admission.retry_after).problem,
        )

    async def _resolve_unknown(self, sender: Member, batch: _Batch, error: Exception) -> None:
        """Answer after an error by the dedupe rows: a message that has one was accepted, the others may be retried."""
        self._metrics.unknown_outcomes.inc()
        kind, sqlstate = type(error).__name__, getattr(error, "sqlstate", None)  # its text may quote a row
        _log.warning("accept_outcome_unknown", messages=len(batch.waiting), error=kind, sqlstate=sqlstate)
        async with unavailable_as_503():
            batch.settle_taken(sender, await self._store.find(sender.mesh_id, batch.waiting_ids()))
        batch.fail_waiting(
            TryAgain.of(
                "outcome_unknown",
                "the transaction failed, and this message was not written: send it again under the same id",
                retryable=True,
                retry_after=_UNKNOWN_RETRY_SECONDS,
            ).problem
        )


class _Batch:
    """The messages of one request, until each has its answer."""

    def __init__(self, metrics: Metrics) -> None:
        self.answers: list[AcceptAnswer | None] = []
        self.answered: Counter[tuple[str, int]] = Counter()  # by phase and status
        self.waiting: list[Item] = []
        self._metrics = metrics
        self._checked: dict[int, Checked] = {}
        self._admitted: set[str] = set()
        self._refused: dict[tuple[str, bytes], Problem] = {}
        self.fines: dict[str, None] = {}  # ids that cost a unit of the limiter although they were refused before it

    def read(self, message: msgspec.Raw) -> None:
        """Read the id of the next message; one that has none is answered 400."""
        self.answers.append(None)
        item = read_item(len(self.answers) - 1, message)
        if isinstance(item, Item):
            self.waiting.append(item)
        else:
            self.fines[new_id()] = None
            self._answer_problem("b1", item, item.problem)

    def waiting_ids(self) -> set[str]:
        """Return the ids of the messages that have no answer."""
        return {item.client_message_id for item in self.waiting}

    def settle_taken(self, sender: Member, taken: dict[str, Taken]) -> None:
        """B0: answer 200 or 409 to every message whose id is taken."""
        for item in self._take_waiting(set(taken)):
            answer = answer_taken(sender, item.client_message_id, item.fingerprint, taken[item.client_message_id])
            if answer.problem is not None:
                self.fines[item.client_message_id] = None
            self._answer("b0", item, answer)

    def settle_refused(self) -> None:
        """Answer what its destination refused in the round before, now that B0 found no other answer."""
        for item in self.take_unchecked():
            if (problem := self._refused.get((item.client_message_id, item.fingerprint))) is not None:
                self._answer_problem("b2", item, problem)
            else:
                self.waiting.append(item)

    def take_unchecked(self) -> list[Item]:
        """Return the messages that have no answer; those that pass `check` wait again."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def check(self, max_inline_bytes: int, item: Item) -> None:
        """B1, the message itself: answer 4xx where it is malformed; each message is checked once."""
        try:
            if item.position not in self._checked:
                self._checked[item.position] = check(item, max_inline_bytes)
        except PostroomError as error:
            self._answer_problem("b1", item, error.problem)
        else:
            self.waiting.append(item)

    def unlimited_ids(self) -> list[str]:
        """Return the ids that have not been through the limiter, each once, in order."""
        ids = dict.fromkeys(item.client_message_id for item in self.waiting)
        return [client_id for client_id in ids if client_id not in self._admitted]

    def settle_denied(self, denied: frozenset[str], problem: Problem) -> None:
        """B1, the limiter: answer `problem` to what it denied; the rest is admitted."""
        for item in self._take_waiting(denied):
            self._answer_problem("b1", item, problem)
        self._admitted.update(item.client_message_id for item in self.waiting)

    def candidates(self) -> list[Candidate]:
        """Return the first message of each content of each id: of an id, the first that can be written is."""
        first: dict[tuple[str, bytes], Item] = {}
        for item in self.waiting:
            first.setdefault((item.client_message_id, item.fingerprint), item)
        return [Candidate(item, self._checked[item.position]) for item in first.values()]

    def settle_written(self, written: Sequence[Written]) -> None:
        """B3: answer 201 to what was accepted; remember what its destination refused.

        What was refused before another content of its id was accepted is answered too: its id was free then.
        """
        accepted: dict[str, int] = {}  # the position of what holds an id now
        for candidate, broker_message_id, history_id, refusal in written:
            item = candidate.item
            if history_id is not None:
                accepted[item.client_message_id] = item.position
                answer = AcceptAnswer(
                    status=201,
                    client_message_id=item.client_message_id,
                    broker_message_id=str(broker_message_id),
                    history_id=history_id,
                    duplicate=False,
                )
                self._answer("b3", item, answer)
            elif refusal is not None:
                self._metrics.consumed_then_rejected.inc()
                self._refused[item.client_message_id, item.fingerprint] = _refusal(refusal, candidate.checked).problem
        for item in self.take_unchecked():
            holder = accepted.get(item.client_message_id, -1)
            problem = self._refused.get((item.client_message_id, item.fingerprint))
            if item.position < holder and problem is not None:
                self._answer_problem("b2", item, problem)
            elif item.position != holder:
                self.waiting.append(item)

    def fail_waiting(self, problem: Problem) -> None:
        """Answer `problem` to everything that has no answer."""
        for item in self.take_unchecked():
            self._answer_problem("b3", item, problem)

    def record(self, began: int) -> None:
        """Record a span for each message that was checked, from `began` (ns since the epoch) until now.

        Of the others only the ids are known: they were recognised, denied or malformed before.
        """
        for position, checked in self._checked.items():
            answer = self.answers[position]
            if answer is not None:
                problem, given = answer.problem, answer.broker_message_id
                spans.record(
                    spans.ACCEPT,
                    f"{checked.destination_kind}:{checked.destination_ref}",
                    answer.client_message_id,
                    checked.traceparent,
                    began=began,
                    error=None if problem is None else (problem.code, problem.detail),
                    attributes={} if given is None else {"postroom.broker_message_id": given},
                )

    def _take_waiting(self, ids: frozenset[str] | set[str]) -> list[Item]:
        if not ids:
            return []
        taken = [item for item in self.waiting if item.client_message_id in ids]
        self.waiting = [item for item in self.waiting if item.client_message_id not in ids]
        return taken

    def _answer_problem(self, phase: str, item: Item | Malformed, problem: Problem) -> None:
        answer = AcceptAnswer(status=problem.status, client_message_id=item.client_message_id, problem=problem)
        self._answer(phase, item, answer)

    def _answer(self, phase: str, item: Item | Malformed, answer: AcceptAnswer) -> None:
        self.answered[phase, answer.status] += 1
        self.answers[item.position] = answer


def answer_taken(sender: Member, client_message_id: str, fingerprint: bytes, row: Taken) -> AcceptAnswer:
    """Answer for an id that `row` holds: 200 for the same message, 409 for another one, or for another member's."""
    if row.sender_id == sender.member_id and row.request_fingerprint == fingerprint:
        return AcceptAnswer(
            status=200,
            client_message_id=client_message_id,
            broker_message_id=str(row.broker_message_id),
            history_id=row.history_id,
            duplicate=True,
            history_available=row.history_available,
            first_seen_at=row.first_seen_at.isoformat(),
        )
    if row.sender_id != sender.member_id:  # nothing of the other member's message is shown
        how, conflict, known = "used before by another member of the mesh", "id_of_another_member", None
    else:
        known = prefix(row.request_fingerprint)
        how, conflict = "accepted with other content", "request_fingerprint_mismatch"
    sentence = f"the id {client_message_id} was {how}: send this message under an id of its own"
    problem = Conflict.of(
        "idempotency_key_reused", sentence, conflict=conflict, broker_fingerprint_prefix=known
    ).problem
    return AcceptAnswer(status=problem.status, client_message_id=client_message_id, problem=problem)


def _refusal(code: str, checked: Checked) -> PostroomError:
    name = checked.destination_ref
    if code == "not_subscribed":
        sentence = f"only subscribers may post to topic:{name}: subscribe first (`postroom topic subscribe {name}`)"
        return NotPermitted.of(code, sentence, field="to", destination=f"topic:{name}")
    destination = f"{checked.destination_kind}:{name}"
    noun = "member" if checked.destination_kind == "dm" else checked.destination_kind
    sentence = f"there is no {destination} in this mesh: `postroom {noun} list` shows them"
    return NotFound.of(code, sentence, field="to", destination=destination)
