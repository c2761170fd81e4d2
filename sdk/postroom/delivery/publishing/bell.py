"""The bell: wakes publishers as soon as there is something to publish (docs/contract/delivery.md#delivery-86).

Whoever has committed rows rings it by `NOTIFY`, with the name of the source (`events`, say), or without one for all.
It is rung after the commit, by a statement of its own: a transaction that notifies holds a lock of the whole database
until it ends, so that commits with rows in them would queue.

Nothing is lost with a ring that is not heard. Publishers look by themselves too, only later.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import asyncpg
import structlog

from postroom._wire.retry import Backoff
from postroom.chassis.postgres import UNREACHABLE, Pool
from postroom.delivery.publishing.publisher import Publisher

_log = structlog.get_logger(__name__)

CHANNEL: Final = "postroom_outbox"
_PAUSES: Final = Backoff(0.5, 30.0)  # between two tries to listen


class Bell:
    """Listens for the publishers of one process."""

    def __init__(self, pool: Pool, publishers: Sequence[Publisher]) -> None:
        """One connection of `pool` is the bell's while it runs."""
        self._pool = pool
        self._publishers = publishers

    def ring(self, source: str = "") -> None:
        """Wake the publisher of a source of this process, or all."""
        for publisher in self._publishers:
            if source in ("", publisher.source.name):
                publisher.wake()

    async def run(self) -> None:
        """Listen until cancelled; a connection that breaks is replaced, and what rang meanwhile is made up for."""
        failures = 0

        def heard(_connection: Any, _pid: int, _channel: str, source: object) -> None:
            self.ring(str(source))

        while True:
            lost = asyncio.Event()
            try:
                async with self._pool.acquire() as connection:
                    connection.add_termination_listener(ended := lambda _: lost.set())  # noqa: B023 - this turn's
                    await connection.add_listener(CHANNEL, heard)
                    try:
                        failures = 0
                        self.ring()
                        await lost.wait()
                    finally:
                        connection.remove_termination_listener(ended)
                        await connection.remove_listener(CHANNEL, heard)
            except (asyncpg.PostgresError, *UNREACHABLE) as error:
                _log.info("bell_not_heard", error=str(error) or type(error).__name__)
            failures += 1
            await asyncio.sleep(_PAUSES.seconds(failures))
