"""The interface of the outbox for other rooms: one object that owns the file, its writer and its readers."""

import asyncio
import contextlib
import sqlite3
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Final, Self, get_args

import structlog

from outbox import errors, model, operations, reader, relay, writer
from outbox.accept import Accept, known
from outbox.backup import Backup, DraftKind, back_up, draft_of
from outbox.comparison import Resent, begin, note, resend
from outbox.settled import prune
from outbox.transaction import Step
from postroom._wire.accept_table import AcceptedRow
from postroom._wire.ids import new_ids, now_ms
from postroom._wire.message import PreparedSend, check_client_message_id
from postroom._wire.moment import from_milliseconds, to_milliseconds
from postroom._wire.operations import MAX_IDS, VERBS, RowFilter, Verb
from postroom._wire.sends import BulkFailure, BulkResult, OutboxRow
from postroom._wire.sql import load_queries
from postroom._wire.words import counted, when
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import within
from postroom.chassis.store import OwnedFile, Store, remove
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_RECOVERED: Final = load_queries("outbox", "sql/recover.sql")
CLAIM_ROWS: Final = 500
CLAIM_BYTES: Final = 1024 * 1024
CLAIM_AT_ONCE: Final = 100  # rows that one transaction of a claim takes: 2 ms for which other operations wait
_DRAINED_MS: Final = 1000  # since a claim that left nothing due, in which the next one does not look
_PATIENCE_SECONDS: Final = 0.02  # for which a patient settlement waits for another transaction
_CHUNK: Final = 200  # rows that one transaction of a long job may touch
_DAY_MS: Final = 86_400_000
_PRUNE_EVERY: Final = 600.0  # seconds
_PRUNED: Final = 100_000  # rows that one request to prune examines
_EXPIRY_CHUNK: Final = 200  # of each lane
_ASK_SECONDS: Final = 5.0  # below the patience of the operator's client


class Outbox(reader.Reader):
    """The durable queue of one daemon (docs/contract/send.md#send-42). Any task of one event loop may call it.

    A writing method returns once its result is on disk. Each raises `PostroomError`: 507 `disk_full` while the disk is
    full, 503 `outcome_unknown` after the disk failed under a commit; the outbox then takes nothing any more, and
    `run_until_failure` ends.
    """

    def __init__(
        self,
        store: Store,
        transactor: writer.Transactor,
        *,
        settings: model.OutboxSettings,
        walked: relay.WalkedPast,
        clock: Callable[[], int],
        look_up: operations.LookUp | None,
    ) -> None:
        super().__init__(store, clock)
        self._transactor = transactor
        self._settings = settings
        self._walked = walked
        self._work = asyncio.Event()
        self._work.set()
        self._next_due: int | None = None
        self._drained_at: int | None = None  # when a claim of every destination took all that was due
        self._watchers = reader.Watchers()
        self.urged: Callable[[], None] = lambda: None  # called when an operator wants rows sent now, for the relay
        self._backing_up = asyncio.Lock()
        self._look_up = look_up

    @classmethod
    async def open(
        cls,
        directory: Path,
        settings: model.OutboxSettings | None = None,
        *,
        accept_lost_ids: bool = False,
        clock: Callable[[], int] = now_ms,
        earliest: int = 0,
        new_ids: Callable[[int], list[str]] = new_ids,
        look_up: operations.LookUp | None = None,
        steady_clock: Callable[[], int] | None = None,
    ) -> Self:
        """Lock `directory`, check the file after an unclean stop, migrate it, put inflight rows back, and start.

        `clock` returns ms since the epoch; until it is confirmed no row is dated before `earliest`. `steady_clock`
        returns ms too, and nobody sets it: where it is given, no row that was accepted since this start, and may not
        have reached the broker, is older than the start. `look_up` asks the broker for rows that it did not answer for.

        Raises `Fatal`: 69 where another process owns the directory, 78 for a file that cannot be used as it is, which
        one that was recovered with rows missing can with `accept_lost_ids`, 75 or 74 while the disk is full or fails.
        """
        settings = settings or model.OutboxSettings()
        walked = relay.WalkedPast()
        transactor = writer.Transactor(
            clock=clock,
            steady_clock=steady_clock or clock,
            earliest=earliest,
            new_ids=new_ids,
            max_bytes=settings.max_bytes,
            walked=walked,
        )

        def prepare(db: sqlite3.Connection) -> None:
            recoveries, missing = db.execute(_RECOVERED["unaccepted"]).fetchone()
            if accept_lost_ids:
                db.execute(_RECOVERED["accept"], {"now": now_ms(), "actor": str(model.Caller.this_process())})
            elif recoveries:
                raise errors.ids_lost(file.path, missing)
            transactor.start(db)

        file = OwnedFile(directory, model.NAME)
        if not file.path.exists() and file.damaged is not None:
            file.end(clean=False)
            raise errors.cut_short(file.path, file.damaged)
        with contextlib.suppress(OSError):
            for kind in get_args(DraftKind):
                remove(draft_of(file.path, kind))
        store = await Store.open(
            file,
            model.SCHEMA,
            errors.ANSWERS,
            prepare=prepare,
            damaged=errors.damaged,
            transactor=transactor,
            queue=writer.Queue(),
            group=settings.max_group_rows,
            checkpoint_bytes=settings.checkpoint_bytes,
        )
        try:
            await store.submit(Step(relay.reclaim))
        except PostroomError as error:
            await store.close()
            raise Fatal(
                Exit.TRY_AGAIN, f"cannot take back the rows that were inflight: {error}; start again"
            ) from error
        return cls(store, transactor, settings=settings, walked=walked, clock=clock, look_up=look_up)

    async def close(self) -> None:
        """Finish what is queued and close; what was answered stays. A second call does nothing."""
        await self._store.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # Sending

    async def accept(self, sends: Sequence[PreparedSend], caller: model.Caller) -> list[AcceptedRow | PostroomError]:
        """Write new sends, in order; an outcome per send, once it is on disk (docs/contract/send.md#send-36).

        A send that fails alone (507) has its error in its place. Concurrent calls share a transaction; a call with more
        than a transaction may hold takes several.
        """
        accept = Accept.of(sends, caller)
        most = min(self._settings.max_group_rows, writer.PART_ROWS)
        if len(sends) == 1 or accept.rows <= most:
            outcomes = await self._store.submit(accept)
        else:
            parts = [self._store.submit(part) for part in accept.parts(most)]
            outcomes = [outcome for part in await asyncio.gather(*parts) for outcome in part]
        if any(isinstance(outcome, AcceptedRow) and outcome.inserted for outcome in outcomes):
            self._work.set()
        return outcomes

    async def known(self, sends: Sequence[PreparedSend], caller: model.Caller) -> list[AcceptedRow | None]:
        """Return what `accept` would answer for each send whose id has a row, None for the others; writes nothing."""
        return await self._store.submit(Step(partial(known, Accept.of(sends, caller))))

    async def wait_all(self, row_ids: Sequence[str], timeout: float) -> None:  # noqa: ASYNC109 - a time-out is an ordinary return here
        """Return once each of the rows is done, dead or aborted, or after `timeout` seconds."""
        with self._watchers.watch(*row_ids) as settled:
            self._watchers.settled(await self.settled_of(row_ids))
            await within(timeout, settled)

    # Relaying

    async def claim(
        self, *, limit: int = CLAIM_ROWS, max_bytes: int = CLAIM_BYTES, excluded: Collection[str] = ()
    ) -> list[model.ClaimedRow]:
        """Make due rows `inflight` and return them, by priority, then age.

        At most `limit` rows and `max_bytes` of payload (but at least one row); none whose destination is `excluded`. It
        may return nothing although rows are due, after it walked past many excluded ones: `wait_for_work` then returns
        at once. Where the last claim left nothing due, and nothing came since, it does not look for a second.
        """
        now = self._clock()
        quiet = not self._work.is_set() and (self._next_due is None or self._next_due > now)
        if quiet and self._drained_at is not None and 0 <= now - self._drained_at < _DRAINED_MS:
            return []
        self._work.clear()
        self._drained_at = None
        claim = relay.Claim(min(limit, CLAIM_AT_ONCE), max_bytes, frozenset(excluded), self._walked)
        result = await self._claim(claim)
        seqs = list(result.seqs)
        size = result.size
        while len(result.seqs) == claim.limit and len(seqs) < limit and result.more:
            claim = claim._replace(limit=min(limit - len(seqs), CLAIM_AT_ONCE), max_bytes=max_bytes - size, least=0)
            try:
                result = await self._claim(claim)
            except PostroomError:  # such as a full disk: what has been claimed must not be forgotten
                break
            seqs += result.seqs
            size += result.size
        if not excluded and not result.more:
            self._drained_at = now
        return await self.claimed(seqs, self._transactor.own()) if seqs else []

    async def _claim(self, claim: relay.Claim) -> relay.ClaimResult:
        """Run one transaction of a claim, and remember when to look again."""
        result = await self._store.submit(claim)
        self._next_due = result.next_due
        if result.more:
            self._work.set()
        return result

    async def settle(
        self, settlements: Sequence[model.Settlement], post: model.Post | None = None, *, patient: bool = False
    ) -> int:
        """Apply the broker's answers in one transaction; returns how many rows were still `inflight` and changed.

        They are the answers to `post`, which is kept with the rows that were not accepted. A `patient` one shares the
        transaction of a send or a claim if one comes soon, unless a caller waits for a row.
        """
        patience = _PATIENCE_SECONDS if patient and not self._watchers.any else 0.0
        settle = Step(partial(relay.settle, settlements, self._walked, post), rows=len(settlements))
        settled = await self._store.submit(settle, patience=patience)
        self._watchers.settled(s.row_id for s in settlements if s.verdict is not model.Verdict.RETRY)
        if any(s.verdict is model.Verdict.RETRY for s in settlements):
            self._work.set()
        return settled

    async def expire(self, before_ms: int) -> int:
        """Make every pending row dead (`expired`) whose age began before the moment; returns how many.

        It begins when the row was enqueued, or at its `not_before`, or when it was sent again, where that is later.
        """
        total, places = 0, dict.fromkeys(model.LANES, 0)
        while places:
            work = partial(relay.expire, before_ms, _EXPIRY_CHUNK, places, self._transactor.own())
            ids, places = await self._store.submit(Step(work, rows=_EXPIRY_CHUNK * len(places)))
            self._watchers.settled(ids)
            total += len(ids)
        return total

    def confirm_clock(self) -> None:
        """Date new rows by the clock until it is set back: a trusted source of the time has agreed with it."""
        self._transactor.confirm_clock()

    async def wait_for_work(self, timeout: float) -> None:  # noqa: ASYNC109 - a time-out is an ordinary return here
        """Return when a row may be due, because it was written or its time came, or after `timeout` seconds."""
        if self._next_due is not None:
            timeout = min(timeout, max(0.0, (self._next_due - self._clock()) / 1000))
        await within(timeout, self._work)

    async def set_relay_control(
        self,
        destination: str | None,
        *,
        paused: bool,
        rate_per_second: float | None = None,
        caller: model.Caller,
        reason: str,
    ) -> None:
        """Store that a destination (None for everything) is paused, or continues at a rate."""
        order = operations.Order(caller, reason).checked()
        await self._store.submit(operations.Control(destination or "", paused, rate_per_second, order, self._walked))
        self._work.set()
        if not paused:
            self.urged()

    # Operating

    async def act(
        self,
        verb: Verb,
        row_id: str,
        *,
        caller: model.Caller,
        reason: str,
        force: bool = False,
        new_client_message_id: str | None = None,
        patch: PreparedSend | None = None,
    ) -> OutboxRow:
        """Do `verb` to a row and return the row (docs/contract/send.md#send-83); 409 where its state forbids it.

        404 for an unknown row. One that the broker did not answer for is looked up there first where it is to be
        retired (docs/contract/send.md#send-81). A requeue returns the successor, under `new_client_message_id` or a
        fresh id, never the patch's own; `patch` comes from `_wire.message.prepare`.
        """
        order = operations.Order(caller, reason, force).checked()
        if new_client_message_id is not None:
            check_client_message_id(new_client_message_id, "new_client_message_id")
        if VERBS[verb].retires:
            row_id = (await self.row(row_id)).id
            learned = await self._learn([row_id])
            if (accepted := learned.accepted.get(row_id)) is not None:
                raise errors.already_accepted(verb, row_id, accepted.broker_message_id)
            order = order._replace(doubt=learned.doubt)
        came = await self._store.submit(operations.Act(verb, row_id, order, self._walked, new_client_message_id, patch))
        self._changed(verb, row_id)
        if VERBS[verb].urges:
            self.urged()
        return await self.row(came)

    async def bulk(
        self,
        verb: Verb,
        row_filter: RowFilter,
        *,
        caller: model.Caller,
        reason: str,
        force: bool = False,
        dry_run: bool = False,
        cursor: str | None = None,
    ) -> BulkResult:
        """Do `verb` to every matching row, each as in a transaction of its own (docs/contract/send.md#send-92).

        A dry run only lists them. `skipped` are those whose state forbids the verb, or that the filter names by id but
        otherwise rules out, `failed` the rest with reasons. After `MAX_IDS` rows it ends with a `next_cursor`.
        """
        order = operations.Order(caller, reason, force).checked()
        result = BulkResult(dry_run=dry_run, matched=0, done=[], skipped=[], failed=[])
        unseen = set(row_filter.ids or ())
        after: str | None = None
        if cursor is None:
            until = await self.last_seq()  # not the successors that it writes itself
        else:
            after, _, end = cursor.partition("-")
            until = reader.seq_of(end)
        async for page in self.pages(row_filter, after, until):
            unseen.difference_update(*((row.id, row.client_message_id) for row in page.rows))
            result.matched += len(page.rows)
            able: list[str] = []
            for row in page.rows:
                early = row.not_before is not None and to_milliseconds(row.not_before) > self._clock()
                why_not = operations.why_not(verb, row.status, held=row.held, early=early)
                (able if why_not is None else result.skipped).append(row.id)
            if dry_run:
                result.done += able
            else:
                order = await self._act_on_each(verb, able, order, result)
            if row_filter.ids is None and page.next_cursor is not None and result.matched >= MAX_IDS:
                result.next_cursor = f"{page.next_cursor}-{until}"
                break
        if unseen:
            async for page in self.pages(RowFilter(ids=sorted(unseen)), None, until):
                unseen.difference_update(*((row.id, row.client_message_id) for row in page.rows))
                result.skipped += [row.id for row in page.rows]
        result.failed += [BulkFailure(id=each, code="row_not_found", detail="no such row") for each in sorted(unseen)]
        if VERBS[verb].urges and result.done and not dry_run:
            self.urged()
        return result

    async def _act_on_each(
        self, verb: Verb, row_ids: Sequence[str], order: operations.Order, result: BulkResult
    ) -> operations.Order:
        """Do `verb` to these rows, and note each outcome; return the order with what is known of the broker now."""
        outcomes: dict[str, object] = {}
        if VERBS[verb].retires and order.doubt is None:  # an unreachable broker is asked once
            learned = await self._learn(row_ids)
            order = order._replace(doubt=learned.doubt)
            for row_id, accepted in learned.accepted.items():
                outcomes[row_id] = errors.already_accepted(verb, row_id, accepted.broker_message_id)
        able = [row_id for row_id in row_ids if row_id not in outcomes]
        acts = [self._store.submit(operations.Act(verb, row_id, order, self._walked)) for row_id in able]
        outcomes |= zip(able, await asyncio.gather(*acts, return_exceptions=True), strict=True)
        for row_id, outcome in outcomes.items():
            if isinstance(outcome, PostroomError) and outcome.code == "wrong_state":
                result.skipped.append(row_id)  # it changed since it was listed
            elif isinstance(outcome, PostroomError):
                result.failed.append(BulkFailure(id=row_id, code=outcome.code, detail=str(outcome)))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                result.done.append(row_id)
                self._changed(verb, row_id)
        return order

    async def _learn(self, row_ids: Sequence[str]) -> operations.Learned:
        """Ask the broker for those of the rows that it did not answer for (docs/contract/send.md#send-81)."""
        rows = await self.unanswered(row_ids)
        if not rows:
            return operations.Learned({})
        if self._look_up is None:
            return operations.Learned({}, "there is no broker to ask")
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                found = await self._look_up(rows)
        except TimeoutError:
            return operations.Learned({}, f"the broker did not answer within {_ASK_SECONDS:g} s")
        except PostroomError as error:
            return operations.Learned({}, f"the broker cannot be asked: {error}")
        settled = await self._store.submit(Step(partial(operations.learn, rows, found), rows=len(rows)))
        self._watchers.settled(settled)
        accepted = {row.row_id: one for row, one in zip(rows, found, strict=True) if one is not None}
        return operations.Learned({row_id: accepted[row_id] for row_id in settled})

    async def reported(self, numbers: Sequence[int]) -> None:
        """Note that these ends (`unreported`) were reported; a row that ended again since then is still to be."""
        await self._store.submit(Step(partial(operations.reported, numbers), rows=len(numbers)))

    # What the broker's database lost

    async def begin_comparison(self, incarnation: str, since_ms: int) -> None:
        """Compare the rows that are done now, and settled from the moment on, with the database of that incarnation."""
        await self._store.submit(Step(partial(begin, incarnation, since_ms)))

    async def note_compared(
        self,
        comparison: model.Comparison,
        up_to: int,
        *,
        found: Sequence[tuple[model.DoneRow, model.Accepted | None]],
        lost: Sequence[model.DoneRow],
    ) -> None:
        """Record which rows of a stretch the database has and which it lacks; the comparison goes on after `up_to`.

        A row that has other ids there than here was sent again by another daemon, and takes those.
        """
        there = [(row.seq, *(accepted or (None, None))) for row, accepted in found]
        noting = partial(note, comparison.incarnation, up_to, there, [row.seq for row in lost])
        await self._store.submit(Step(noting, rows=len(there) + len(lost) + 1))

    async def resend_missing(self, *, caller: model.Caller, reason: str) -> Resent:
        """Send the rows that the broker's database lost again, under their own ids, up to `MAX_IDS` of them.

        Those whose payload was pruned are returned, noted in the operator log, and no longer missing.
        """
        order = operations.Order(caller, reason).checked()
        total = Resent([], [], 0)
        while total.after is not None and len(total.row_ids) + len(total.without_payload) < MAX_IDS:
            part = await self._store.submit(
                Step(partial(resend, total.after, _CHUNK, order, self._walked), rows=_CHUNK)
            )
            total = Resent(total.row_ids + part.row_ids, total.without_payload + part.without_payload, part.after)
        self._work.set()
        return total

    async def prune(
        self, settled_before_ms: int | None, *, caller: model.Caller, reason: str, after: int = 0
    ) -> tuple[int, int | None]:
        """Drop the payloads of done and aborted rows that settled before the moment, of some 100,000 rows at most.

        None is `keep_payloads` ago. Returns how many, and after which row to go on (None at the end). Rows, ids,
        fingerprints and outcomes stay for ever.
        """
        order = operations.Order(caller, reason).checked()
        if settled_before_ms is None:
            settled_before_ms = self._kept_since(self._clock())
        total, last = await self._prune(settled_before_ms, after, _PRUNED // _CHUNK)
        moment = from_milliseconds(min(settled_before_ms, self._clock()))
        detail = f"{counted(total, 'payload')} of rows that ended before {when(moment)}"
        await self._store.submit(Step(lambda transaction: operations.log(transaction, "prune", order, None, detail)))
        return total, last

    async def prune_by_age(self, confirmed_time: Callable[[], Awaitable[int]]) -> None:
        """Never return; drop the payloads of done and aborted rows once they are older than `keep_payloads`.

        `confirmed_time` returns the time in ms since the epoch, once the clock can be trusted.
        """
        while True:
            now = await confirmed_time()
            try:
                await self._prune(self._kept_since(now))
            except PostroomError as error:
                _log.warning("not_pruned", error=str(error), advice="it is tried again")
            await asyncio.sleep(_PRUNE_EVERY)

    def _kept_since(self, now: int) -> int:
        return now - int(self._settings.keep_payloads * _DAY_MS)

    async def _prune(
        self, settled_before_ms: int, after: int | None = 0, slices: int = sys.maxsize
    ) -> tuple[int, int | None]:
        """Prune in slices, so that other operations wait briefly; return how many, and after which row to go on."""
        total = 0
        while after is not None and slices:
            pruned, after = await self._store.submit(
                Step(partial(prune, settled_before_ms, after, _CHUNK), rows=_CHUNK)
            )
            total, slices = total + pruned, slices - 1
        return total, after

    @contextlib.asynccontextmanager
    async def backup(self, *, caller: model.Caller, reason: str) -> AsyncIterator[Backup]:
        """Make a copy of the whole outbox, payloads too, as of when this yields; it exists within the block.

        The copy holds the line of the operator log about itself. One is made at a time, others are refused.
        """
        order = operations.Order(caller, reason).checked()
        if self._backing_up.locked():
            raise errors.backup_running()
        async with self._backing_up:
            await self._store.submit(Step(lambda transaction: operations.log(transaction, "backup", order, None)))
            async with contextlib.aclosing(await back_up(self._store)) as copy:
                yield copy

    # Watching

    @property
    def healthy(self) -> bool:
        """Whether the writer takes operations and makes progress, for the watchdog and readiness."""
        return self._store.healthy

    @property
    def filling_up(self) -> bool:
        """Whether the rows that wait take so much room that sends will soon be refused."""
        return self._transactor.filling_up

    @property
    def full(self) -> bool:
        """Whether every new send is refused, for want of room (docs/contract/send.md#send-54)."""
        return self._transactor.full

    @property
    def disk_full(self) -> bool:
        """Whether sends are refused because the disk has no space."""
        return self._store.disk_full

    @property
    def progress(self) -> tuple[int, int]:
        """Transactions committed and operations answered since the start."""
        return self._store.transactions, self._store.operations

    async def run_until_failure(self) -> None:
        """Never return; raise `Fatal` (74) once a commit's outcome is unknown. A task for `run_until_stopped`."""
        await self._store.failed.wait()
        if self._store.failure is not None:
            raise errors.write_failed(self._store.path, self._store.failure)

    def _changed(self, verb: Verb, row_id: str) -> None:
        """Wake the relay, since a row may be due now, and callers that wait for this one if it is retired."""
        self._work.set()
        if VERBS[verb].retires:
            self._watchers.settled([row_id])
