"""Where callers may send: what the config of a daemon allows (docs/contract/send.md#send-19)."""

import asyncio
from collections.abc import Awaitable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from outbox import AcceptedRow, Caller, Outbox
from postroom._wire.message import PreparedSend
from postroom.errors import NotPermitted, PostroomError


class DestinationRule:
    """Allows what matches one of its shell patterns, such as `topic:orders*`; without patterns everything."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._matches = lru_cache(maxsize=1024)(lambda to: any(fnmatchcase(to, each) for each in self._patterns))

    def check(self, destination: str) -> None:
        """Raise `NotPermitted` (403) for a destination that the config does not allow."""
        if not self.allows(destination):
            raise _refusal(destination)

    def accept(
        self, outbox: Outbox, sends: Sequence[PreparedSend], caller: Caller
    ) -> Awaitable[list[AcceptedRow | PostroomError]]:
        """Accept the sends that the config allows; one that is on disk already is answered, whatever it allows now.

        The others have their refusal (403) in their place.
        """
        return self._accept_allowed(outbox, sends, caller) if self._patterns else outbox.accept(sends, caller)

    async def _accept_allowed(
        self, outbox: Outbox, sends: Sequence[PreparedSend], caller: Caller
    ) -> list[AcceptedRow | PostroomError]:
        allowed = [send for send in sends if self.allows(send.destination)]
        others = [send for send in sends if not self.allows(send.destination)]
        rows = await asyncio.gather(  # both before what the caller sends later
            outbox.accept(allowed, caller), outbox.known(others, caller)
        )
        accepted, known = iter(rows[0]), iter(rows[1])
        return [
            next(accepted) if self.allows(send.destination) else next(known) or _refusal(send.destination)
            for send in sends
        ]

    def allows(self, destination: str) -> bool:
        """Tell whether callers may send there."""
        return not self._patterns or self._matches(destination)


def _refusal(destination: str) -> NotPermitted:
    detail = f"this daemon may not send to {destination}: add it to allow_destinations in its config"
    return NotPermitted.of("destination_not_allowed", detail, field="to")
