"""The relay: claims due rows, posts them in batches to the broker, and settles what the broker answers.

Only a message's own refusal or its age kills it (docs/contract/send.md#send-61). A post whose answer is lost is posted
again; the broker's dedupe row makes that harmless.

One loop decides; up to `posts_at_once` tasks post and settle, so that claims, posts and settlements overlap.
"""

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import structlog

from broker_client.answers import Outcome, expired, not_dated, returned
from broker_client.channel import RequestFailed
from broker_client.features import HOUR, Comparison, FeatureCheck
from broker_client.link import BrokerLink
from broker_client.pace import Availability, Controls
from broker_client.posts import STORAGE_SECONDS, Poster
from broker_client.settings import RelaySettings
from outbox import ClaimedRow, Outbox
from postroom._wire.accept import Features
from postroom._wire.ids import now_ms
from postroom._wire.moment import from_milliseconds
from postroom._wire.sends import RelayState, RelayStatus
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

PROBE_MESSAGES: Final = 10  # claimed for a probe; only the least suspect batch of them is posted
IDLE_SECONDS: Final = 60.0  # longest wait for work, if nothing wakes the relay
GATHER_SECONDS: Final = 0.02  # for which work gathers at most while posts are under way: few are cheaper than many
APART_MS: Final = 10  # and from the beginning of one post to the next, where little comes

Batch = Sequence[ClaimedRow]


class Relay:
    """The daemon's one relay: `run` it as a task, `stop` it before the outbox and the link are closed."""

    def __init__(
        self,
        outbox: Outbox,
        link: BrokerLink,
        settings: RelaySettings,
        *,
        state_directory: Path,
        mesh: str | None = None,
        clock: Callable[[], int] = now_ms,
        rng: Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`mesh` is the one that the token has to belong to; `clock` (ms since the epoch) is the outbox's as well."""
        self._outbox = outbox
        outbox.urged = self.probe_now
        self._link = link
        self._settings = settings
        self._clock = clock
        self._sleep = sleep
        rng = rng or Random()  # noqa: S311 - it spreads retries and guards nothing
        self._availability = Availability(settings, rng)
        self._wake = asyncio.Event()
        self._poster = Poster(
            outbox, link, settings, self._availability, clock=clock, rng=rng, sleep=sleep, ended=self._wake.set
        )
        self.counters = self._poster.counters
        self.comparison = Comparison(outbox, link, clock=clock)
        self._check = FeatureCheck(link, settings, state_directory, mesh)
        self._controls = Controls()
        self._controls_stale = True
        self._expire_at = 0
        self._ready: deque[Batch] = deque()  # claimed, not posted yet
        self._ready_pauses = 0
        self._posted_at = 0  # when the last post began
        self._claim: asyncio.Task[list[ClaimedRow]] | None = None
        self._posts: dict[asyncio.Task[None], Batch] = {}
        self._broken_off: list[ClaimedRow] = []  # posted, and not waited for
        self._crash: BaseException | None = None
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()  # `run` is not running
        self._idle.set()

    async def run(self) -> None:
        """Relay until `stop`. Raises `Fatal` (78) once the broker turns out to be incompatible.

        An unreachable broker does not end it: the features are asked for as soon as it can be reached.
        """
        self._idle.clear()
        try:
            while not self._stopping.is_set():
                # do the next thing there is to do, or wait until there may be one
                if self._crash is not None:
                    raise self._crash
                try:
                    await self._act()
                except PostroomError as error:
                    if not error.retryable:
                        raise
                    _log.warning("outbox_not_available", code=error.code, reason=str(error))
                    await self._wait(STORAGE_SECONDS)
        finally:
            self._idle.set()

    async def stop(self) -> None:
        """Claim nothing more, finish the posts under way, settle them, and give back what was claimed but not posted.

        Returns when that is done. Posts that take longer than `stop_seconds` are broken off and given back as well. It
        may be called before, during or after `run`, and twice.
        """
        self._stopping.set()
        self._wake.set()
        await self._idle.wait()
        if self._posts:
            posts = asyncio.gather(*self._posts, return_exceptions=True)
            await _first_of(asyncio.shield(posts), self._sleep(self._settings.stop_seconds))
            for task in list(self._posts):
                task.cancel()
            await posts
        rows = self._take_ready()
        try:
            if self._claim is not None:
                rows += await self._claim
                self._claim = None
            settlements = [returned(row) for row in rows]
            settlements += [returned(row, answered=False) for row in self._broken_off]
            if settlements:
                await self._outbox.settle(settlements)
        except PostroomError as error:
            _log.warning(
                "rows_left_inflight",
                rows=len(rows) + len(self._broken_off),
                code=error.code,
                advice="the next start takes them back",
            )

    def status(self) -> RelayStatus:
        """Return what the relay does now, and why."""
        availability, controls = self._availability, self._controls
        if self._stopping.is_set():
            state: RelayState = "stopped"
        elif controls.paused:
            state = "paused"
        elif availability.reason is not None:
            state = "waiting"
        else:
            state = "relaying" if self._check.passed else "starting"
        return RelayStatus(
            state=state,
            degraded=availability.degraded or availability.is_outage(self._clock()),
            reason=availability.reason,
            paused_destinations=list(controls.paused_destinations),
            rate_per_second=controls.rate_per_second,
            last_success_at=from_milliseconds(availability.answered_at),
        )

    @property
    def features(self) -> Features | None:
        """The broker's features as it showed them last, perhaps before the last start."""
        return self._check.features

    @property
    def max_age_hours(self) -> int:
        """The age in hours at which a row goes dead."""
        return self._check.max_age_hours

    async def controls_changed(self) -> None:
        """Read the controls again: an operator paused, resumed or set a rate; `status` shows it from here on."""
        self._controls_stale = True
        self._wake.set()
        await self._read_controls()

    def probe_now(self) -> None:
        """End a pause at once; the next post is still one small batch."""
        self._availability.resume_at = 0
        self._wake.set()

    async def _act(self) -> None:
        if self._controls_stale:
            await self._read_controls()
        if not 0 < self._seconds_until_expiry() <= self._settings.expiry_seconds:  # or the clock was set back
            if self._link.clock.is_stale(self._clock(), self._check.margin_ms):
                self._availability.features_due = True  # the answer's `Date` is the broker's time
            await self._expire()
        # give back what was claimed before an outage: the probe is small; and an operator's pause is at once
        outage = self._availability.probing and self._ready_pauses != self._availability.pauses
        if self._ready and (self._controls.paused or outage):
            rows = self._take_ready()
            self._start(self._poster.settle([returned(row) for row in rows]), rows)
        if (seconds := self._hold_seconds()) > 0:
            await self._wait(seconds)
        elif self._availability.features_due or self._check.is_due():
            await self._check_features()
        elif self._ready:
            batch = self._ready.popleft()
            self._posted_at = self._clock()
            self._start(self._poster.relay(batch), batch)
        elif not await self._claim_rows():
            seconds = min(self._controls.wait_seconds(self._clock()), self._check.fresh_seconds())
            await self._wait(seconds, for_work=True)
            await self._gather()

    async def _gather(self) -> None:
        """Let more work come while a post is under way, and shortly after one began."""
        if self._poster.under_way:
            await _first_of(self._wake.wait(), self._sleep(GATHER_SECONDS))
        if 0 <= (passed := self._clock() - self._posted_at) < APART_MS:
            await self._sleep((APART_MS - passed) / 1000)

    def _hold_seconds(self) -> float:
        """Return how long not to post: 0 to go on, infinite if the relay is woken when it may."""
        now = self._clock()
        if self._controls.paused or len(self._posts) >= (1 if self._availability.probing else self._availability.slots):
            return math.inf
        if (pause := self._availability.pause_left(now)) > 0:
            return pause
        if not self._ready and not self._controls.allowance(1, now):
            return self._controls.wait_seconds(now)
        return 0.0

    async def _claim_rows(self) -> bool:
        """Claim the next batch; False if nothing is due."""
        now = self._clock()
        self._ready_pauses = self._availability.pauses
        if self._availability.probing:
            limit = PROBE_MESSAGES
        else:
            limit = self._settings.batch_messages
            if self._check.features is not None:
                limit = max(1, min(limit, self._check.features.max_batch))
            limit = self._controls.allowance(limit, now)
        claim = self._outbox.claim(
            limit=limit, max_bytes=self._settings.batch_bytes, excluded=self._controls.excluded(now)
        )
        self._claim = asyncio.ensure_future(claim)
        try:
            rows = await asyncio.shield(self._claim)
        except PostroomError:
            self._claim = None
            raise
        self._claim = None  # if `run` was cancelled it stays set, and `stop` gives its rows back
        self._admit(rows)
        return bool(rows)

    def _admit(self, rows: Batch) -> None:
        """Make batches of what may be posted; the rest is too old, beyond a destination's rate, or not for a probe."""
        now = self._clock()
        oldest = self._link.clock.estimate(now) - self.max_age_hours * HOUR
        has_come, margin = self._link.clock.has_come, self._check.margin_ms
        due: list[ClaimedRow] = []
        early: list[ClaimedRow] = []
        for row in rows:
            (due if not row.not_before or has_come(row.not_before, now, margin) else early).append(row)
        old = [row for row in due if row.age_from < oldest]
        fresh, beyond = self._controls.admit([row for row in due if row.age_from >= oldest], now)
        undated, dead = (early, old) if self._may_expire(now) else ([*early, *old], [])
        self._availability.features_due = self._availability.features_due or bool(undated)
        batches = self._poster.suspects.divide(fresh)
        first, others = (batches[:1], batches[1:]) if self._availability.probing else (batches, [])
        self._ready.extend(first)
        beyond += [row for batch in others for row in batch]
        self.counters.attempts[Outcome.EXPIRED] += len(dead)
        later = round(self._settings.expiry_seconds * 1000)
        settlements = [
            *(expired(row, self.max_age_hours) for row in dead),
            *(not_dated(row, later) for row in undated),
            *map(returned, beyond),
        ]
        if settlements:
            self._start(self._poster.settle(settlements), [*dead, *undated, *beyond])

    def _take_ready(self) -> list[ClaimedRow]:
        rows = [row for batch in self._ready for row in batch]
        self._ready.clear()
        return rows

    def _start(self, work: Coroutine[Any, Any, None], batch: Batch) -> None:
        task = asyncio.create_task(work, name="relay-post")
        self._posts[task] = batch
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        batch = self._posts.pop(task)
        if task.cancelled():
            self._broken_off += batch
        elif (error := task.exception()) is not None:
            self._crash = error
        self._wake.set()

    async def _read_controls(self) -> None:
        self._controls = Controls(await self._outbox.relay_controls(), self._clock())
        self._controls_stale = False

    async def _expire(self) -> None:
        now = self._clock()
        self._expire_at = now + round(self._settings.expiry_seconds * 1000)
        if not self._may_expire(now):
            return
        count = await self._outbox.expire(min(now, self._link.clock.estimate(now)) - self.max_age_hours * HOUR)
        self.counters.attempts[Outcome.EXPIRED] += count
        if count:
            _log.warning("messages_expired", rows=count, max_age_hours=self.max_age_hours)

    def _may_expire(self, now: int) -> bool:
        """Return whether the broker confirmed the clock; if so, the outbox may date new rows by it."""
        confirmed = self._link.clock.is_confirmed(now, self._check.margin_ms)
        if confirmed:
            self._outbox.confirm_clock()
        return confirmed

    def _seconds_until_expiry(self) -> float:
        return (self._expire_at - self._clock()) / 1000

    async def _check_features(self) -> None:
        """Ask for the features, unless a stop comes first; raises `Fatal` (78) if they are incompatible."""
        pauses = self._availability.pauses
        last_done = await self._outbox.last_history_id()  # before the broker says what it has
        asking = asyncio.ensure_future(self._check.ask())
        try:
            await _first_of(asyncio.shield(asking), self._stopping.wait())
            if asking.done():
                asking.result()
                # Have the done rows compared if the broker's database is another one. The posts under way are settled
                # first, since the previous database may have answered them.
                features = self._check.features
                if features is not None and (name := await self.comparison.name_of(features, last_done)) is not None:
                    if self._posts:
                        await asyncio.wait(self._posts)
                    await self.comparison.begin(name, features)
                self._availability.reachable()
                await self._expire()  # by the age that now holds
        except RequestFailed as error:
            self._availability.failed(error, pauses, self._clock())
        finally:
            asking.cancel()

    async def _wait(self, seconds: float, *, for_work: bool = False) -> None:
        """Wait to be woken, for `seconds` at most, and no longer than until the next look for expired rows."""
        seconds = max(0.0, min(seconds, self._seconds_until_expiry(), IDLE_SECONDS))
        waits: list[Awaitable[Any]] = [self._wake.wait(), self._sleep(seconds)]
        if for_work:
            waits.append(self._outbox.wait_for_work(seconds))
        await _first_of(*waits)
        self._wake.clear()


async def _first_of(*waits: Awaitable[Any]) -> None:
    """Wait until one of them ends, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
