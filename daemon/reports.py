"""What the daemon reports of itself to its broker, at which all are seen (docs/contract/operate.md#operate-60)."""

import asyncio
import shutil
from collections.abc import Hashable
from pathlib import Path

from broker_client import BrokerLink, Relay
from broker_client.answers import Outcome
from ipc.control import health_of
from ipc.services import Services
from outbox import Outbox
from postroom._wire.programs import Report
from postroom.chassis.reporting import Reporter, keep_reporting


class Reports:
    """The daemon's reports: `run` them as a task."""

    def __init__(
        self, services: Services, outbox: Outbox, link: BrokerLink, relay: Relay, *, address: str, state: Path
    ) -> None:
        self._services = services
        self._outbox = outbox
        self._link = link
        self._relay = relay
        self._state = state
        self._reporter = Reporter("postroom-server", address)

    async def run(self) -> None:
        """Report for ever; a broker that cannot be asked is the relay's affair, and an outbox that fails its own."""
        await keep_reporting(self._look, self._link.report, self._glance)

    async def _look(self) -> Report:
        health = await health_of(self._services)
        room = await asyncio.to_thread(shutil.disk_usage, self._state)
        totals = {
            "queued": self._services.counters.sends["queued"],
            "relayed": self._relay.counters.attempts[Outcome.ACCEPTED],
        }
        return self._reporter.report(
            health.reasons,
            waiting=health.rows["pending"] + health.rows["inflight"],
            dead=health.rows["dead"],
            oldest_at=health.oldest_pending_at,
            relay=health.relay.state,
            disk_free=room.free,
            totals=totals,
        )

    def _glance(self) -> Hashable:
        relay = self._relay.status()
        return self._outbox.healthy, relay.state, relay.degraded
