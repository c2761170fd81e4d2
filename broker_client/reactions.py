"""What the relay makes of a whole request that failed: the second table of spec send.md, "Relaying".

Always: the batch goes back to `pending` without an attempt of its own, the relay pauses with backoff and probes with
one small batch. The table says what comes on top.
"""

from __future__ import annotations

from random import Random
from typing import Final, NamedTuple

from broker_client.failures import Failure, RequestFailed
from broker_client.settings import RelaySettings
from chassis.backoff import full_jitter


class Reaction(NamedTuple):
    """What a failure means beyond the pause.

    `degraded`: health says so, with the reason: an operator has to act. `suspicious`: the batch itself may be the
    cause, so it is halved. `recheck`: another broker may come back, so its features are asked for again.
    """

    degraded: bool = False
    suspicious: bool = False
    recheck: bool = False


REACTIONS: Final[dict[Failure, Reaction]] = {
    Failure.UNREACHABLE: Reaction(recheck=True),
    Failure.TIMED_OUT: Reaction(suspicious=True),
    Failure.BROKEN_OFF: Reaction(suspicious=True),
    Failure.GARBAGE: Reaction(suspicious=True),
    Failure.SERVER_ERROR: Reaction(suspicious=True),
    Failure.REFUSED: Reaction(suspicious=True),
    Failure.NOT_NOW: Reaction(),
    Failure.NOT_PERMITTED: Reaction(degraded=True, recheck=True),
}


def pause_seconds(error: RequestFailed, failures: int, rng: Random, settings: RelaySettings) -> float:
    """Return how long to pause after `failures` failures in a row: backoff, and at least what the broker asked for."""
    first, most = settings.backoff_first_seconds, settings.backoff_most_seconds
    return max(full_jitter(failures, rng, first=first, most=most), error.retry_after or 0)
