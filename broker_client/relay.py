"""The relay: claims due rows, posts them in batches to the broker, and settles what the broker answers.

It promises that neither an outage nor a wrong token burns attempts or kills anything: only a message's own refusal or
its age does (spec send.md, "Relaying"; seed §4.6.1, §4.11). A post whose answer is lost is posted again; the broker's
dedupe row makes that harmless. What a crash leaves `inflight`, the outbox takes back at the next start.

One loop decides; up to `posts_at_once` tasks post and settle, so that claims, posts and settlements overlap.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import structlog

from broker_client.answers import Outcome, expired, returned
from broker_client.availability import Availability
from broker_client.counters import RelayCounters
from broker_client.failures import Failure, RequestFailed
from broker_client.link import BrokerLink, now_ms
from broker_client.pace import Controls
from broker_client.posting import STORAGE_SECONDS, Posting
from broker_client.settings import RelaySettings
from broker_client.window import KeptFeatures, assumed_max_age_hours, max_age_hours
from outbox import Outbox
from outbox.model import ClaimedRow, to_datetime
from postroom.accept import Features
from postroom.errors import PostroomError
from postroom.sends import RelayStatus

_log = structlog.get_logger(__name__)

HOUR: Final = 3_600_000  # ms
PROBE_MESSAGES: Final = 10  # claimed for a probe; what is least suspicious of them is posted
IDLE_SECONDS: Final = 60.0  # longest wait for work, should nobody wake the relay

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
        """`mesh` is the one that the token has to speak for; `clock` (ms since the epoch) is the outbox's as well."""
        self._outbox = outbox
        self._link = link
        self._settings = settings
        self._mesh = mesh
        self._clock = clock
        self._sleep = sleep
        rng = rng or Random()  # noqa: S311 - it spreads retries and guards nothing
        self._availability = Availability(settings, rng)
        self._posting = Posting(outbox, link, settings, self._availability, clock=clock, rng=rng, sleep=sleep)
        self._kept = KeptFeatures(state_directory)
        self.features: Features | None = self._kept.load()
        self.max_age_hours = assumed_max_age_hours(self.features, settings.max_age_hours)
        self._checked_identity: int | None = None
        self._controls = Controls()
        self._controls_stale = True
        self._expire_at = 0
        self._ready: deque[Batch] = deque()  # claimed, not posted yet
        self._ready_flight = 0
        self._claim: asyncio.Task[list[ClaimedRow]] | None = None
        self._posts: dict[asyncio.Task[None], Batch] = {}
        self._crash: BaseException | None = None
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._idle = asyncio.Event()  # `run` is not running
        self._idle.set()

    async def run(self) -> None:
        """Relay until `stop`. Raises `Fatal` (78) once the broker turns out to be incompatible.

        A broker that cannot be reached is no reason to end: its features are asked for as soon as it can be.
        """
        self._idle.clear()
        try:
            while not self._stopping.is_set():
                await self._step()
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
        await self._finish_posts()
        await self._give_back_the_rest()

    def status(self) -> RelayStatus:
        """Say what the relay does now, and why."""
        availability, controls = self._availability, self._controls
        return RelayStatus(
            state=self._state(),
            degraded=availability.degraded,
            reason=availability.reason,
            paused_destinations=list(controls.paused_destinations),
            rate_per_second=controls.rate_per_second,
            last_success_at=to_datetime(availability.answered_at),
        )

    @property
    def counters(self) -> RelayCounters:
        """What was counted since the process started."""
        return self._posting.counters

    def controls_changed(self) -> None:
        """Read the controls again: an operator paused, resumed or set a rate."""
        self._controls_stale = True
        self._wake.set()

    def probe_now(self) -> None:
        """End a pause at once; the next post is still one small batch."""
        self._availability.try_now()
        self._wake.set()

    def _state(self) -> Any:
        if self._stopping.is_set():
            return "stopped"
        if self._controls.paused:
            return "paused"
        if self._availability.reason is not None:
            return "waiting"
        return "starting" if self._checked_identity is None else "relaying"

    async def _step(self) -> None:
        """Do the next thing there is to do, or wait until there may be one."""
        if self._crash is not None:
            raise self._crash
        try:
            await self._act()
        except PostroomError as error:
            if not error.retryable:
                raise
            _log.warning("outbox_not_available", code=error.code, reason=str(error))
            await self._wait(STORAGE_SECONDS)

    async def _act(self) -> None:
        if self._controls_stale:
            await self._read_controls()
        if not 0 < self._seconds_until_expiry() <= self._settings.expiry_seconds:  # or the clock was set back
            await self._expire()
        self._give_back_stale()
        if (seconds := self._hold_seconds()) > 0:
            await self._wait(seconds)
        elif self._must_check_features():
            await self._check_features()
        elif self._ready:
            batch = self._ready.popleft()
            self._start(self._posting.relay(batch), batch)
        elif not await self._claim_rows():
            await self._wait(self._controls.wait_seconds(self._clock()), for_work=True)

    def _hold_seconds(self) -> float:
        """Return how long not to post: 0 to go on, infinite where something will wake the relay."""
        now = self._clock()
        if self._controls.paused or len(self._posts) >= self._slots():
            return math.inf
        if (pause := self._availability.pause_left(now)) > 0:
            return pause
        if not self._ready and not self._controls.allowance(1, now):
            return self._controls.wait_seconds(now)
        return 0.0

    def _slots(self) -> int:
        return 1 if self._availability.probing else self._settings.posts_at_once

    async def _claim_rows(self) -> bool:
        """Claim the next batch; False where nothing is due."""
        now = self._clock()
        self._ready_flight = self._availability.flight
        claim = self._outbox.claim(
            limit=self._claim_limit(now), max_bytes=self._settings.batch_bytes, excluded=self._controls.excluded(now)
        )
        self._claim = asyncio.ensure_future(claim)
        try:
            rows = await asyncio.shield(self._claim)
        except PostroomError:
            self._claim = None
            raise
        self._claim = None  # where `run` was cancelled it stays, and `stop` gives its rows back
        self._admit(rows)
        return bool(rows)

    def _claim_limit(self, now: int) -> int:
        if self._availability.probing:
            return PROBE_MESSAGES
        most = self._settings.batch_messages
        if self.features is not None:
            most = max(1, min(most, self.features.max_batch))
        return self._controls.allowance(most, now)

    def _admit(self, rows: Batch) -> None:
        """Make batches of what may be posted; the rest is too old, beyond a destination's rate, or not for a probe."""
        now = self._clock()
        oldest = now - self.max_age_hours * HOUR
        old = [row for row in rows if row.enqueued_at < oldest]
        fresh, beyond = self._controls.admit([row for row in rows if row.enqueued_at >= oldest], now)
        batches = self._posting.suspects.divide(fresh)
        first, others = (batches[:1], batches[1:]) if self._availability.probing else (batches, [])
        self._ready.extend(first)
        beyond += [row for batch in others for row in batch]
        self.counters.attempts[Outcome.EXPIRED] += len(old)
        settlements = [expired(row, self.max_age_hours) for row in old] + [returned(row, now) for row in beyond]
        if settlements:
            self._start(self._posting.settle(settlements), [*old, *beyond])

    def _give_back_stale(self) -> None:
        """Give back what was claimed before a pause: the probe has to be small, and an operator's pause is at once."""
        if self._ready and (self._controls.paused or self._ready_flight != self._availability.flight):
            rows = self._take_ready()
            self._start(self._posting.settle([returned(row, self._clock()) for row in rows]), rows)

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
            self._ready.append(batch)
        elif (error := task.exception()) is not None:
            self._crash = error
        self._wake.set()

    async def _read_controls(self) -> None:
        self._controls_stale = False
        self._controls = Controls(await self._outbox.relay_controls(), self._clock())

    async def _expire(self) -> None:
        now = self._clock()
        self._expire_at = now + round(self._settings.expiry_seconds * 1000)
        count = await self._outbox.expire(now - self.max_age_hours * HOUR)
        self.counters.attempts[Outcome.EXPIRED] += count
        if count:
            _log.warning("messages_expired", rows=count, max_age_hours=self.max_age_hours)

    def _seconds_until_expiry(self) -> float:
        return (self._expire_at - self._clock()) / 1000

    def _must_check_features(self) -> bool:
        """Tell whether nothing may be posted before the broker has shown its features, perhaps again."""
        try:
            return self._availability.features_due or self._link.identity() != self._checked_identity
        except RequestFailed:  # no token to show: asking says so
            return True

    async def _check_features(self) -> None:
        """Ask for the features; raises `Fatal` (78) where they do not do."""
        flight = self._availability.flight
        try:
            identity = self._link.identity()
            asking = asyncio.ensure_future(self._link.features())
            await _first_of(_settled(asking), self._stopping.wait())
            if asking.done():
                self._take_features(asking.result(), identity)
            else:
                asking.cancel()
        except RequestFailed as error:
            self._availability.failed(error, flight, self._clock())

    def _take_features(self, features: Features, identity: int) -> None:
        if self._mesh is not None and features.mesh != self._mesh:
            sentence = f"the token speaks for the mesh {features.mesh!r}, this daemon serves {self._mesh!r}"
            raise RequestFailed.because(Failure.NOT_PERMITTED, f"{sentence}: put another token into broker.token_file")
        self.max_age_hours = max_age_hours(features, self._settings.max_age_hours)
        if features != self.features:
            self._kept.save(features)
        self.features = features
        self._checked_identity = identity
        self._expire_at = 0
        self._availability.reachable()

    async def _wait(self, seconds: float, *, for_work: bool = False) -> None:
        """Wait to be woken, for `seconds` at most, and no longer than until the next look for expired rows."""
        seconds = max(0.0, min(seconds, self._seconds_until_expiry(), IDLE_SECONDS))
        waits: list[Awaitable[Any]] = [self._wake.wait(), self._sleep(seconds)]
        if for_work:
            waits.append(self._outbox.wait_for_work(seconds))
        await _first_of(*waits)
        self._wake.clear()

    async def _finish_posts(self) -> None:
        if self._posts:
            posts = asyncio.gather(*self._posts, return_exceptions=True)
            await _first_of(asyncio.shield(posts), self._sleep(self._settings.stop_seconds))
            for task in list(self._posts):
                task.cancel()
            await posts

    async def _give_back_the_rest(self) -> None:
        rows = self._take_ready()
        try:
            if self._claim is not None:
                rows += await self._claim
                self._claim = None
            if rows:
                await self._outbox.settle([returned(row, self._clock()) for row in rows])
        except PostroomError as error:
            _log.warning("rows_left_inflight", rows=len(rows), code=error.code, advice="the next start takes them back")


async def _settled(future: asyncio.Future[Any]) -> None:
    await asyncio.wait({future})


async def _first_of(*waits: Awaitable[Any]) -> None:
    """Wait until one of them ends, and end the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
