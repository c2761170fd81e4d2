"""The faults of entries and steps, each with what becomes of the message that asked for it.

A fault changes nothing in the ledgers, except that a replayed leg 1 is counted. Every message is acknowledged in the
end (docs/contract/jobs.md#jobs-24): at once, after another delivery, or when its activity was failed.
"""

from enum import Enum
from typing import ClassVar, Self

from postroom.errors import PostroomError


class Reaction(Enum):
    """What becomes of the message."""

    ACKNOWLEDGE = "acknowledge"
    RETRY = "retry"
    ESCALATE = "escalate"  # fail the activity, visibly, then acknowledge


class Fault(PostroomError):
    """The base of the errors that refuse an entry or a step."""

    reaction: ClassVar[Reaction]


class Missing(Fault):
    """There is no such activity."""

    reaction = Reaction.ACKNOWLEDGE


class Duplicate(Fault):
    """It has happened already: the message is a replay."""

    reaction = Reaction.ACKNOWLEDGE

    @classmethod
    def of_what(cls, what: str) -> Self:
        """Say what has happened already."""
        return cls.of("duplicate", f"{what}: this is a replay, nothing is left to do")


class Inactive(Fault):
    """The job has ended, or the activity has failed: nothing more is done for it."""

    reaction = Reaction.ACKNOWLEDGE


class Forbidden(Fault):
    """Leg 2 before leg 1 is complete, or a step before the one that it follows: it comes again later."""

    reaction = Reaction.RETRY


class Held(Fault):
    """Another worker does it now."""

    reaction = Reaction.RETRY


class LeaseLost(Fault):
    """The lease ran out, and another worker may have begun: this transaction must not be committed."""

    reaction = Reaction.RETRY

    @classmethod
    def of_entry(cls) -> Self:
        """Say what to do."""
        detail = "the lease ran out before the step was done: nothing of it was committed; enter again"
        return cls.of("lease_lost", detail, retryable=True)


class Exhausted(Fault):
    """Every attempt that the activity's policy allows has begun, and the last did not end."""

    reaction = Reaction.ESCALATE


class Overflow(Fault):
    """A counter is full: the activity fails fast (docs/contract/jobs.md#jobs-8)."""

    reaction = Reaction.ESCALATE

    @classmethod
    def of_leg1(cls, ledger: str) -> Self:
        """Refuse the thousandth attempt."""
        return cls.of("overflow", f"leg 1 was attempted 999 times (ledger {ledger}), which is the limit")

    @classmethod
    def of_leg2(cls, ledger: str) -> Self:
        """Refuse entry 100,000,000."""
        return cls.of("overflow", f"leg 2 was entered 99999999 times (ledger {ledger}), which is the limit")
