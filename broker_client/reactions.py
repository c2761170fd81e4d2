"""What the relay makes of a whole request that failed.

Always: the batch goes back to `pending` without an attempt of its own, and the relay pauses. A broker that is busy is
left alone for as long as it asks, and gets batches as large as before, fewer at once; any other failure is an outage,
with backoff and one small batch as a probe. The table says what comes on top.
"""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

from broker_client.failures import Failure, RequestFailed
from broker_client.settings import RelaySettings
from postroom.retry import RETRY_AFTER_LEAST, Backoff


class Reaction(NamedTuple):
    """What a failure means beyond the pause.

    `degraded`: health says so, with the reason: an operator has to act. `suspicious`: the batch itself may be the
    cause, so it is halved. `recheck`: another broker may come back, so its features are asked for again. `busy`: the
    broker works, and asks for less at once. `untaken`: the broker took nothing of the request, since it did not arrive
    or was refused whole.
    """

    degraded: bool = False
    suspicious: bool = False
    recheck: bool = False
    busy: bool = False
    untaken: bool = False


REACTIONS: Final[dict[Failure, Reaction]] = {
    Failure.UNREACHABLE: Reaction(recheck=True, untaken=True),
    Failure.TIMED_OUT: Reaction(suspicious=True),
    Failure.BROKEN_OFF: Reaction(suspicious=True),
    Failure.GARBAGE: Reaction(suspicious=True),
    Failure.SERVER_ERROR: Reaction(suspicious=True),
    Failure.REFUSED: Reaction(suspicious=True, untaken=True),
    Failure.NOT_NOW: Reaction(busy=True, untaken=True),
    Failure.OVERLOADED: Reaction(busy=True, untaken=True),
    Failure.NOT_PERMITTED: Reaction(degraded=True, recheck=True, untaken=True),
}


def pause_seconds(error: RequestFailed, failures: int, rng: Random, settings: RelaySettings) -> float:
    """Return how long to pause after `failures` failures in a row, at least as long as the broker asked for.

    After an outage it is backoff. What a busy broker asks for is spread over twice the time, or all whom it turned away
    together would come back together.
    """
    if REACTIONS[error.failure].busy:
        twice = 2 * (error.retry_after or RETRY_AFTER_LEAST)
        return Backoff(twice, twice, least=0.5).seconds(1, rng.random)
    return max(settings.backoff.seconds(failures, rng.random), error.retry_after or 0)
