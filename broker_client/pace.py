"""How fast the relay may go: what operators set (docs/contract/send.md#send-90), and what the broker takes.

`Controls` are the pauses and rates that operators set, for everything or for one destination. `Availability` is what
the relay knows of the broker: that it answers, how busy it is, or that it fails and when to try it again.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from typing import Final

import structlog

from broker_client.answers import REACTIONS, pause_seconds
from broker_client.channel import Failure, RequestFailed
from broker_client.settings import RelaySettings
from outbox import ClaimedRow, RelayControl

_log = structlog.get_logger(__name__)

PORTION_SECONDS: Final = 0.1  # of a rate over everything: posts are this far apart
DESTINATION_PORTION_SECONDS: Final = 1.0  # of one destination, whose rows have to be found among the others
OUTAGE_MS: Final = 30_000


class Rate:
    """A bucket that fills at `per_second` and is emptied in portions, so that a rate is not a post per message.

    It starts empty and holds one portion at most, so that no burst follows a quiet hour.
    """

    def __init__(self, per_second: float, portion_seconds: float, now_ms: int) -> None:
        self._per_second = per_second
        self._portion = max(1.0, per_second * portion_seconds)
        self._level = 0.0
        self._filled_at = now_ms

    def allowance(self, now_ms: int) -> int:
        """Return how many messages may go now: none, or a portion."""
        self._fill(now_ms)
        return math.floor(self._level) if self._level >= 1 and self.wait_seconds(now_ms) <= 0 else 0

    def wait_seconds(self, now_ms: int) -> float:
        """Return how long it takes until a portion may go."""
        self._fill(now_ms)
        return max(0.0, (math.floor(self._portion) - self._level) / self._per_second)

    def take(self, count: int) -> None:
        """Use up what `count` messages need."""
        self._level -= count

    def _fill(self, now_ms: int) -> None:
        passed = max(0, now_ms - self._filled_at) / 1000
        self._level = min(self._portion, self._level + passed * self._per_second)
        self._filled_at = now_ms


class Controls:
    """Pauses and rates as the relay applies them until it next reads the outbox's table."""

    def __init__(self, controls: Mapping[str, RelayControl] | None = None, now_ms: int = 0) -> None:
        """Take the controls by destination, '' for everything, as `Outbox.relay_controls` returns them."""
        self.paused = False
        self.paused_destinations: list[str] = []
        self.rate_per_second: float | None = None
        self._rate: Rate | None = None
        self._rates: dict[str, Rate] = {}
        for destination, control in (controls or {}).items():
            if not destination:
                self.paused, self.rate_per_second = control.paused, control.rate_per_second
                if control.rate_per_second is not None:
                    self._rate = Rate(control.rate_per_second, PORTION_SECONDS, now_ms)
            elif control.paused:
                self.paused_destinations.append(destination)
            elif control.rate_per_second is not None:
                self._rates[destination] = Rate(control.rate_per_second, DESTINATION_PORTION_SECONDS, now_ms)

    def allowance(self, most: int, now_ms: int) -> int:
        """Return how many messages may be claimed now, at most `most`."""
        return most if self._rate is None else min(most, self._rate.allowance(now_ms))

    def excluded(self, now_ms: int) -> list[str]:
        """Return the destinations that nothing may go to now."""
        return [*self.paused_destinations, *(to for to, rate in self._rates.items() if not rate.allowance(now_ms))]

    def wait_seconds(self, now_ms: int) -> float:
        """Return how long until a rate lets a portion through; infinite without rates to wait for."""
        rates: Sequence[Rate] = [self._rate] if self._rate is not None else list(self._rates.values())
        waits = [wait for rate in rates if (wait := rate.wait_seconds(now_ms)) > 0]
        return min(waits, default=math.inf)

    def admit(self, rows: Sequence[ClaimedRow], now_ms: int) -> tuple[list[ClaimedRow], list[ClaimedRow]]:
        """Split claimed rows into those within their destination's rate and those beyond; uses up what it admits."""
        left = {to: rate.allowance(now_ms) for to, rate in self._rates.items()}
        admitted: list[ClaimedRow] = []
        beyond: list[ClaimedRow] = []
        for row in rows:
            if row.destination in left:
                left[row.destination] -= 1
            (beyond if left.get(row.destination, 0) < 0 else admitted).append(row)
        for to, count in Counter(row.destination for row in admitted).items():
            if to in self._rates:
                self._rates[to].take(count)
        if self._rate is not None:
            self._rate.take(len(admitted))
        return admitted, beyond


class Availability:
    """Whether the broker answers: the relay asks before each post and records its result. Times in ms since the epoch.

    `pauses` counts the pauses: of the posts that were under way together, only the first failure counts. `slots` is
    how many posts may be under way: half as many once the broker was too busy, one more with each round it answered.
    """

    def __init__(self, settings: RelaySettings, rng: Random) -> None:
        self._settings = settings
        self._rng = rng
        self.failures = 0  # in a row
        self.pauses = 0
        self.resume_at = 0
        self.slots = settings.posts_at_once
        self._answered_since = 0  # posts since the last pause or added slot
        self._paused_at = 0
        self._unreached_since: int | None = None
        self.reason: str | None = None
        self.degraded = False
        self.features_due = True  # ask for them before the next post
        self.answered = 0  # posts, ever
        self.answered_at: int | None = None

    @property
    def probing(self) -> bool:
        """Whether one small batch has to find out how the broker is."""
        return self.failures > 0

    def pause_left(self, now_ms: int) -> float:
        """Return how many seconds of the pause are left; 0 if the clock was set back since it began."""
        return max(0, self.resume_at - now_ms) / 1000 if now_ms >= self._paused_at else 0.0

    def is_outage(self, now_ms: int) -> bool:
        """Return whether the broker has been tried and not reached for so long that an operator should know."""
        if self._unreached_since is not None:
            self._unreached_since = min(self._unreached_since, now_ms)  # the clock may have been set back
        return self._unreached_since is not None and now_ms - self._unreached_since >= OUTAGE_MS

    def failed(self, error: RequestFailed, pauses: int, now_ms: int) -> None:
        """Pause after a whole request failed, unless a post sent before the same pause has caused one already."""
        if pauses != self.pauses:
            return
        self.pauses += 1
        self._answered_since = 0
        if REACTIONS[error.failure].busy:
            self.failures = 0
            self._unreached_since = None
            self.slots = max(1, self.slots // 2)
        else:
            self.failures += 1
            self._unreached_since = self._unreached_since or now_ms
        self._pause(error, pause_seconds(error, self.failures, self._rng, self._settings), now_ms)

    def rest(self, retry_after: float, now_ms: int) -> None:
        """Pause while the broker answers but its limiter lets nothing through; that is no failure."""
        self.pauses += 1
        sentence = "the broker's rate limit is used up"
        self._pause(RequestFailed.because(Failure.NOT_NOW, sentence, retry_after), retry_after, now_ms)

    def succeeded(self, pauses: int, now_ms: int) -> None:
        """Note that a post was answered: an outage is over; a pause that a busy broker asked for is kept."""
        self.answered += 1
        self.answered_at = now_ms
        self._unreached_since = None
        if pauses == self.pauses:
            self._answered_since += 1
            if self._answered_since >= self.slots:
                self._answered_since = 0
                self.slots = min(self.slots + 1, self._settings.posts_at_once)
        elif not self.probing:
            return
        if self.probing:
            _log.info("relay_resumed", failures=self.failures)
        self.failures = 0
        self.resume_at = 0
        self.reason = None
        self.degraded = False

    def reachable(self) -> None:
        """Note that the broker's features are compatible; whether it accepts, the next batch finds out."""
        self.features_due = False
        self._unreached_since = None
        self.reason = None
        self.degraded = False

    def _pause(self, error: RequestFailed, seconds: float, now_ms: int) -> None:
        reaction = REACTIONS[error.failure]
        self._paused_at = now_ms
        self.resume_at = now_ms + round(seconds * 1000)
        self.reason = error.problem.detail
        self.degraded = reaction.degraded
        self.features_due = self.features_due or reaction.recheck
        _log.warning(
            "relay_waiting",
            code=error.code,
            reason=self.reason,
            failures=self.failures,
            seconds=round(seconds, 3),
            degraded=self.degraded,
        )
