"""How a process reports of itself, again and again (docs/contract/operate.md#operate-60); to whom is its own affair."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any, Final

from postroom._wire.programs import MAX_LINE, MAX_REASONS, REPORT_SECONDS, Report, Status
from postroom.chassis.runtime import in_step
from postroom.errors import PostroomError

_GLANCE_SECONDS: Final = 1.0  # between two looks at what can be seen without asking anybody


class Reporter:
    """What a process says of itself in each of its reports; it is of a `distribution`, and begins now."""

    def __init__(self, distribution: str, address: str | None) -> None:
        self._version = version(distribution)
        self._address = address
        self._started_at = datetime.now(UTC)

    def report(self, reasons: Sequence[str], *, status: Status | None = None, **more: Any) -> Report:
        """Build the report of how it is now: `degraded` where there are reasons, and no other status is given."""
        return Report(
            host=socket.gethostname(),
            pid=os.getpid(),
            version=self._version,
            started_at=self._started_at,
            at=datetime.now(UTC),
            status=status or ("degraded" if reasons else "ok"),
            reasons=lines(reasons),
            address=self._address,
            **more,
        )


def lines(reasons: Sequence[str]) -> list[str]:
    """Return of reasons what a report has room for."""
    return [reason[:MAX_LINE] for reason in reasons[:MAX_REASONS]]


async def keep_reporting(
    look: Callable[[], Awaitable[Report]],
    tell: Callable[[Report], Awaitable[None]],
    glance: Callable[[], Hashable],
) -> None:
    """Report for ever, every ten seconds, and soon after what `glance` sees has changed.

    A report that cannot be made or told (`PostroomError`) is left out: the next one follows.
    """
    while True:
        seen = glance()
        with suppress(PostroomError):
            await tell(await look())
        for _ in range(round(REPORT_SECONDS / _GLANCE_SECONDS)):
            await asyncio.sleep(in_step(_GLANCE_SECONDS))
            if glance() != seen:
                break
