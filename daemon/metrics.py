"""The daemon's metrics (docs/contract/operate.md#operate-31): plain integers kept elsewhere, sorted when scraped."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from broker_client import ConfirmedClock, Relay
from daemon.receiver import Receiver
from ipc.services import Counters
from outbox import Outbox
from postroom.chassis.routes import exposition

PREFIX: Final = "postroom_daemon_"
_process = ProcessCollector(registry=None)


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The sources of the daemon's metrics."""

    counters: Counters
    outbox: Outbox
    relay: Relay
    receiver: Receiver | None
    clock: ConfirmedClock
    max_bytes: int  # what the outbox has room for
    state: Path  # the directory on whose disk it is

    async def expose(self) -> bytes:
        """Return every metric, and those of the process, in Prometheus' text format."""
        return exposition([*await self.families(), *_process.collect()])

    async def families(self) -> list[Metric]:
        """Return every metric of the daemon."""
        counts, missing = await self.outbox.counts(), await self.outbox.missing()
        disk = await asyncio.to_thread(shutil.disk_usage, self.state)
        relaying = self.relay.status()
        paused = relaying.state == "paused" or bool(relaying.paused_destinations)
        oldest = counts.oldest_pending_at
        age = 0.0 if oldest is None else max(0.0, time.time() - oldest / 1000)
        commits, operations = self.outbox.progress
        rows = GaugeMetricFamily(f"{PREFIX}outbox_rows", "Rows of the outbox by status", labels=["status"])
        for status, count in counts.rows.items():
            rows.add_metric([status], count)
        counters, posts = self.counters, self.relay.counters
        metrics = [
            _counter("sends", "Sends by outcome: queued, inflight, done, or the code of the refusal", counters.sends),
            counters.accept.family(f"{PREFIX}accept_seconds", "POST /v1/send, from its head to its answer"),
            CounterMetricFamily(f"{PREFIX}batches", "Requests to the batch route", counters.batches),
            _counter("refusals", "Requests that were answered with a problem", counters.answers, "status"),
            _counter("connections_dropped", "Connections ended by a deadline or a cap", counters.dropped, "reason"),
            _gauge("connections", "Open connections", counters.connections),
            _gauge("requests_in_flight", "Requests being answered", counters.in_flight),
            rows,
            _gauge("outbox_oldest_pending_seconds", "Age of the oldest pending row", age),
            _gauge("outbox_due_seconds", "For how long the row is due that has waited longest", counts.due_ms / 1000),
            _gauge("outbox_payload_bytes", "Payloads kept", counts.payload_bytes),
            _gauge("outbox_waiting_bytes", "Bytes of the file that waiting rows take", counts.waiting_bytes),
            _gauge("outbox_max_bytes", "Bytes that waiting rows may take", self.max_bytes),
            _gauge("outbox_used_bytes", "Bytes of the outbox file that are in use", counts.used_bytes),
            _gauge("outbox_file_bytes", "Size of the outbox file", counts.file_bytes),
            _gauge("outbox_wal_bytes", "Size of the write-ahead log", counts.wal_bytes),
            _gauge("outbox_missing", "Done rows that the broker's database lost", missing.rows),
            _gauge("disk_free_bytes", "Bytes left on the disk of the outbox", disk.free),
            CounterMetricFamily(f"{PREFIX}outbox_commits", "Transactions committed", commits),
            CounterMetricFamily(f"{PREFIX}outbox_committed_operations", "Operations in them", operations),
            _counter("relay_attempts", "Messages posted to the broker, by outcome", posts.attempts),
            _counter("relay_posts", "Posts to the broker, by result", posts.batches, "result"),
            posts.latency.family(f"{PREFIX}relay_post_seconds", "Posts to the broker"),
            _gauge(
                "relay_degraded", "1 while the broker refuses the daemon or has been unreachable", relaying.degraded
            ),
            _gauge("relay_paused", "1 while an operator pauses the relay, or a destination", paused),
        ]
        if (ahead := self.clock.ahead_ms) is not None:
            metrics.append(_gauge("clock_ahead_seconds", "How far the clock is ahead of the broker's", ahead / 1000))
        if self.receiver is not None:
            filing = self.receiver.counters
            outcomes = {"filed": filing.filed, "known": filing.known, "refused": filing.refused}
            metrics.append(_counter("inbox_messages", "Messages that arrived, by outcome", outcomes))
            metrics.append(_gauge("inbox_receiving", "1 while messages can arrive", self.receiver.trouble() is None))
            metrics.append(_gauge("inbox_readers", "Readers of the live stream", counters.event_readers))
            if self.receiver.inbox is not None:
                metrics.append(_gauge("inbox_file_bytes", "Size of the inbox file", self.receiver.inbox.used_bytes))
        return metrics


def _counter(
    name: str, documentation: str, values: Mapping[str, int] | Mapping[int, int], label: str = "outcome"
) -> Metric:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=[label])
    for value, count in values.items():
        family.add_metric([str(value)], count)
    return family


def _gauge(name: str, documentation: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, documentation, value)
