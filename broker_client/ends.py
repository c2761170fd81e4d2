"""Telling the broker of rows that ended here and that it may never have seen (docs/contract/operate.md#operate-64).

Which ones it has not heard of is in the outbox, written with what ended them, so that each is reported at least once,
also after a crash. Nobody waits for it: reports go by themselves, a few at a time, while the broker can be reached.
"""

import asyncio
import socket
from random import Random
from typing import Final

import structlog

from broker_client.link import BrokerLink
from outbox import Outbox
from postroom._wire.retry import Backoff
from postroom._wire.sends import MAX_ENDED, EndedRows
from postroom.errors import PostroomError

_log = structlog.get_logger(__name__)

_LOOK_SECONDS: Final = 1.0  # between two looks for rows that ended
_BACKOFF: Final = Backoff(1.0, 60.0)


async def report_ends(outbox: Outbox, link: BrokerLink) -> None:
    """Report for ever what the broker has not heard of."""
    rng, failures = Random(), 0  # noqa: S311 - it spreads retries and guards nothing
    while True:
        try:
            numbers, rows = await outbox.unreported(MAX_ENDED)
            if rows:
                await link.report_ended(EndedRows(host=socket.gethostname(), rows=rows))
                await outbox.reported(numbers)
        except PostroomError as error:  # the broker cannot be asked, or the disk is full
            failures += 1
            if failures == 1:
                _log.info("ends_not_reported", code=error.code, reason=str(error))
            await asyncio.sleep(_BACKOFF.seconds(failures, rng.random))
        else:
            failures = 0
            await asyncio.sleep(0 if len(rows) == MAX_ENDED else _LOOK_SECONDS)
