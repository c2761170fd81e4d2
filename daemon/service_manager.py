"""What the daemon tells systemd: that it is ready, what it does, that it lives (sd_notify(3)).

The watchdog is fed from the event loop, and only after a transaction of the outbox's writer has committed: a loop that
hangs, or a writer that is stuck, starves it, and systemd starts the daemon anew.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from broker_client.relay import Relay
from outbox import Outbox
from postroom.chassis.runtime import notify, watchdog_seconds
from postroom.errors import PostroomError

STATUS_SECONDS: Final = 5.0


def ready() -> None:
    """Tell systemd that sends are accepted."""
    notify("READY=1")


def stopping() -> None:
    """Tell systemd that the daemon is about to end."""
    notify("STOPPING=1\nSTATUS=finishing what is in hand")


async def answer_watchdog(outbox: Outbox) -> None:
    """Feed the watchdog, each time after a commit, at half its interval; for ever, even where nobody watches."""
    interval = watchdog_seconds()
    if interval is None:
        await asyncio.Event().wait()
    while interval is not None:
        with suppress(PostroomError):  # the outbox has failed: its own task ends the process
            await outbox.settle(())  # nothing to settle, but a transaction of the writer all the same
            notify("WATCHDOG=1", patience=0)
        await asyncio.sleep(interval / 2)


async def keep_status(outbox: Outbox, relay: Relay) -> None:
    """Keep the line that `systemctl status` shows up to date, for ever."""
    while True:
        counts = await outbox.counts()
        state = relay.status()
        backlog = counts.rows["pending"] + counts.rows["inflight"]
        reason = f" ({state.reason})" if state.reason else ""
        notify(f"STATUS={backlog} waiting, {counts.rows['dead']} dead; {state.state}{reason}", patience=0)
        await asyncio.sleep(STATUS_SECONDS)
