"""What the relay does with rows: claim, settle, expire (docs/contract/send.md#send-58)."""

import sqlite3
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from outbox.model import DUE, ClaimedRow, Post, Settlement, Verdict
from outbox.transaction import Transaction
from postroom._wire.sql import load_queries

_QUERIES: Final = load_queries("outbox", "sql/relay.sql")
_SCAN: Final = 20_000  # index entries that one claim may walk past in a lane: about a millisecond
_LONGEST_WAIT: Final = 3_600_000  # ms: the longest backoff that can be configured

_encode: Final = msgspec.json.Encoder().encode


_decode_candidates: Final = msgspec.json.Decoder(list[tuple[int, int]]).decode
_decode_claimed: Final = msgspec.json.Decoder(list[tuple[str, str, str, msgspec.Raw, str, int, int, int]]).decode
_decode_ids: Final = msgspec.json.Decoder(list[str]).decode


class ClaimResult(NamedTuple):
    """The rows' numbers and bytes of payload, whether more may be due right now, and when the next one will be (ms)."""

    seqs: Sequence[int]
    size: int
    more: bool
    next_due: int | None


class WalkedPast:
    """The `seq` up to which each lane has only rows of excluded destinations, so that no claim walks there twice.

    Only the writer's thread uses it. An operation that puts an older row back into a lane calls `forget`.
    """

    def __init__(self) -> None:
        self._excluded: frozenset[str] = frozenset()
        self._after: dict[int, int] = {}

    def after(self, lane: int, excluded: frozenset[str]) -> int:
        """Return the `seq` after which a claim has to look."""
        if excluded != self._excluded:
            self.forget()
            self._excluded = excluded
        return self._after.get(lane, 0)

    def walked(self, lane: int, seq: int) -> None:
        """Note that there is nothing to claim up to `seq`."""
        self._after[lane] = seq

    def forget(self) -> None:
        """Start every lane from its oldest row again."""
        self._after.clear()


class Own(NamedTuple):
    """The rows that this process has accepted: none of them is older than it, whatever the clock said at the time.

    A row of which a post got no answer is as old as it says: the broker may have forgotten its id since.
    """

    after: str  # ids of rows grow; theirs are greater than this
    since: int  # ms since the epoch, by the clock as it is now


class Claim(NamedTuple):
    """Take due rows, by priority, then age: at most `limit` rows and `max_bytes` of payload, but at least `least`."""

    limit: int
    max_bytes: int
    excluded: frozenset[str]
    walked: WalkedPast
    least: int = 1

    @property
    def rows(self) -> int:
        """How many rows it may write."""
        return self.limit

    def run(self, transaction: Transaction) -> ClaimResult:
        """Claim: one transaction, `pending` to `inflight`; `read_claimed` reads the rows after it.

        Other operations wait while this runs, and reading takes as long as writing; inflight rows do not change.
        """
        woken = transaction.execute(_QUERIES["wake"], {"now": transaction.now, "limit": self.limit})
        if woken:
            self.walked.forget()
        chosen, size, more = self._choose(transaction)
        if chosen:
            taken = transaction.execute(_QUERIES["take"], (_encode(chosen).decode(),))
            transaction.changed("pending", "inflight", taken)
        return ClaimResult(chosen, size, more or woken == self.limit, transaction.value(_QUERIES["next_due"]))

    def _choose(self, transaction: Transaction) -> tuple[list[int], int, bool]:
        """Return the rows to take, their bytes, and whether there may be more."""
        chosen: list[int] = []
        size = 0
        more = False
        for lane in DUE.values():
            limit, last = self.limit - len(chosen), None
            parameters: dict[str, int | str] = {"lane": lane, "after": 0, "limit": limit}
            if not self.excluded:
                found = _decode_candidates(transaction.value(_QUERIES["candidates"], parameters))
            else:  # those of its next stretch
                parameters["after"] = self.walked.after(lane, self.excluded)
                parameters |= {"scan": _SCAN, "excluded": _encode(sorted(self.excluded)).decode()}
                found = sorted(_decode_candidates(transaction.value(_QUERIES["candidates_elsewhere"], parameters)))
                if len(found) == limit:
                    more = True
                else:
                    looked_at, last = transaction.db.execute(_QUERIES["scanned"], parameters).fetchone()
                    more = more or looked_at == _SCAN
            for seq, payload_bytes in found:
                if len(chosen) >= self.least and size + payload_bytes > self.max_bytes:
                    return chosen, size, True
                size += payload_bytes
                chosen.append(seq)
            if last is not None:  # only once everything found there is taken
                self.walked.walked(lane, last)
            if len(chosen) == self.limit:
                return chosen, size, True
        return chosen, size, more


def shorten_waits(transaction: Transaction, walked: WalkedPast, *, seen: bool) -> None:
    """Shorten the waits of rows whose next attempt was set by a clock that was ahead.

    Where the clock was `seen` to be set back, that is every row; at a start only those that wait impossibly long.
    """
    latest = transaction.now + (0 if seen else _LONGEST_WAIT)
    if transaction.execute(_QUERIES["shorten_waits"], {"now": transaction.now, "latest": latest}):
        walked.forget()


def settle(settlements: Sequence[Settlement], walked: WalkedPast, post: Post | None, transaction: Transaction) -> int:
    """Apply the broker's answers to `post`, one statement per verdict; returns how many rows were settled.

    A row that is no longer `inflight` is left alone.
    """
    done = [
        (s.row_id, s.broker_message_id, s.history_id, 1 if s.duplicate else None)
        for s in settlements
        if s.verdict is Verdict.DONE
    ]
    dead = [(s.row_id, s.last_error, s.answered) for s in settlements if s.verdict is Verdict.DEAD]
    retry = [
        (s.row_id, s.wait_ms, s.last_error, int(s.burns_attempt), s.answered)
        for s in settlements
        if s.verdict is Verdict.RETRY
    ]
    if retry:
        walked.forget()
    if post is not None and (failed := [s for s in settlements if s.verdict is not Verdict.DONE]):
        answers = [(s.row_id, (s.last_error or "").partition(":")[0]) for s in failed]
        noted = {**post._asdict(), "answers": _encode(answers).decode()}
        transaction.execute(_QUERIES["note_failed_posts"], noted)
    settled = 0
    for verdict, query, rows in (
        (Verdict.DONE, "settle_done", done),
        (Verdict.DEAD, "settle_dead", dead),
        (Verdict.RETRY, "settle_retry", retry),
    ):
        if rows:
            parameters = {"now": transaction.now, "settlements": _encode(rows).decode()}
            room = transaction.value(_QUERIES["room"], parameters) if verdict is Verdict.DONE else 0
            changed = transaction.execute(_QUERIES[query], parameters)
            transaction.changed("inflight", verdict.value, changed, room)
            settled += changed
    if dead:
        report(transaction, [row_id for row_id, *_ in dead])
    return settled


def expire(
    before: int, scan: int, places: Mapping[int, int], own: Own, transaction: Transaction
) -> tuple[list[str], dict[int, int]]:
    """Give up the rows that were due before a moment (ms since the epoch) among the next `scan` rows of each lane.

    `places` has the `seq` after which to look, by lane. A row's age counts from `enqueued_at`, or from a later
    `not_before`, or when it was sent again. A lane is in the order of `enqueued_at`, so a walk goes on past such rows,
    until it meets one that was enqueued later. Returns the ids of the rows that are dead now, and the places to go on
    from.
    """
    ids: list[str] = []
    onward: dict[int, int] = {}
    for lane, after in places.items():
        place = {"lane": lane, "before": before, "after": after, "scan": scan}
        parameters = {**place, "own_after": own.after, "own_since": own.since}
        expired, last = transaction.db.execute(_QUERIES["expired"], parameters).fetchone()
        ids += _decode_ids(expired)
        if last is not None:
            onward[lane] = last
    last_error = "expired: the broker did not accept the message within max_age"
    changed = transaction.execute(_QUERIES["expire"], {"ids": _encode(ids).decode(), "last_error": last_error})
    transaction.changed("pending", "dead", changed)
    if ids:
        report(transaction, ids)
    return ids, onward


def report(transaction: Transaction, row_ids: Sequence[str]) -> None:
    """Queue a report to the broker of how these rows ended (docs/contract/operate.md#operate-64)."""
    transaction.execute(_QUERIES["to_report"], {"ids": _encode(row_ids).decode()})


def reclaim(transaction: Transaction) -> None:
    """Make rows that were inflight at a start pending again, with one more attempt (docs/contract/send.md#send-76)."""
    noted = {**Post(transaction.now, 0, "")._asdict(), "answers": transaction.value(_QUERIES["interrupted"])}
    transaction.execute(_QUERIES["note_failed_posts"], noted)
    transaction.changed("inflight", "pending", transaction.execute(_QUERIES["reclaim"], {"now": transaction.now}))


def read_claimed(seqs: Sequence[int], own: Own, db: sqlite3.Connection) -> list[ClaimedRow]:
    """Return the rows that a claim took, in its order; runs on the thread of any connection."""
    parameters = {"seqs": _encode(seqs).decode(), "own_after": own.after, "own_since": own.since}
    (found,) = db.execute(_QUERIES["taken"], parameters).fetchone()
    return [
        ClaimedRow(row_id, name, bytes.fromhex(fingerprint), bytes(payload), to, attempts, age_from, not_before)
        for row_id, name, fingerprint, payload, to, attempts, age_from, not_before in _decode_claimed(found)
    ]
