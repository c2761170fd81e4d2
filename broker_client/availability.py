"""What the relay knows of the broker: answering, busy and with how much, or away and when to try it again."""

from __future__ import annotations

from random import Random
from typing import Final

import structlog

from broker_client.answers import REACTIONS, pause_seconds
from broker_client.channel import Failure, RequestFailed
from broker_client.settings import RelaySettings

_log = structlog.get_logger(__name__)

OUTAGE_MS: Final = 30_000


class Availability:
    """Whether the broker answers; the relay asks before each post and tells after it. Times in ms since the epoch.

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
        """Return how many seconds of the pause are left; none where the clock was set back since it began."""
        return max(0, self.resume_at - now_ms) / 1000 if now_ms >= self._paused_at else 0.0

    def is_outage(self, now_ms: int) -> bool:
        """Tell whether the broker has been tried and not reached for so long that an operator should know."""
        if self._unreached_since is not None:
            self._unreached_since = min(self._unreached_since, now_ms)  # the clock may have been set back
        return self._unreached_since is not None and now_ms - self._unreached_since >= OUTAGE_MS

    def failed(self, error: RequestFailed, pauses: int, now_ms: int) -> None:
        """Pause after a whole request failed, unless another post since the same pause has said so already."""
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
        """Note that the broker showed features that will do; whether it accepts, the next batch finds out."""
        self.features_due = False
        self._unreached_since = None
        self.reason = None
        self.degraded = False

    def try_now(self) -> None:
        """End the pause; the next post is still a probe."""
        self.resume_at = 0

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
