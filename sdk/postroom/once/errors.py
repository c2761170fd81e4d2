"""What the registry raises."""

from __future__ import annotations

from postroom.errors import Conflict, NotFound, PostroomError, Unavailable
from postroom.once.model import Held, Scope


class KeyHeld(Conflict):
    """Another worker holds the key and did not end in time: try the message again, `retry_after` at the latest."""

    @classmethod
    def by_another(cls, scope: Scope, held: Held) -> KeyHeld:
        """Build the error for a key that stayed `held`."""
        return cls.of(
            "key_held",
            f"{scope} is held by another worker until {held.until:%Y-%m-%dT%H:%M:%SZ}: try again",
            retryable=True,
            retry_after=held.seconds,
        )


class LeaseLost(Conflict):
    """The lease ran out, or somebody else settled the key: what this worker did is not recorded as done."""

    @classmethod
    def of_scope(cls, scope: Scope) -> LeaseLost:
        """Build the error for `scope`."""
        detail = (
            f"the lease on {scope} has expired: this worker can no longer settle it, and another may have taken it over"
        )
        return cls.of("lease_lost", detail)


def absent(where: str) -> NotFound:
    """Build the error for a place where nobody has begun to keep keys."""
    detail = f"there is no registry in {where}: the first program that opens it creates it"
    return NotFound.of("registry_absent", detail)


def unavailable(error: BaseException) -> Unavailable:
    """Build the error for a store that can't be reached just now."""
    detail = f"the registry cannot be reached ({type(error).__name__}: {error}): try again"
    return Unavailable.of("registry_unavailable", detail, retryable=True)


def unusable(why: str) -> PostroomError:
    """Build the error for a store that somebody has to put right first."""
    return PostroomError.of("registry_unusable", f"the registry cannot be used: {why}")
