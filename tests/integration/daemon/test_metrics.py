"""The daemon's metrics, scraped from a running process (docs/contract/operate.md#operate-31)."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

NEEDED = {
    "postroom_daemon_sends",
    "postroom_daemon_accept_seconds",
    "postroom_daemon_outbox_commits",
    "postroom_daemon_outbox_committed_operations",
    "postroom_daemon_outbox_rows",
    "postroom_daemon_outbox_oldest_pending_seconds",
    "postroom_daemon_relay_attempts",
    "postroom_daemon_relay_posts",
    "process_resident_memory_bytes",
}


def test_the_metrics_count_what_happened(daemon: Any) -> None:
    daemon.start().ready()
    daemon.send("a")
    daemon.send("a", body="other")
    families = {
        family.name: family for family in text_string_to_metric_families(daemon.ask("GET", "/v1/metrics")[1].decode())
    }
    assert families.keys() >= NEEDED
    sends = {sample.labels["outcome"]: sample.value for sample in families["postroom_daemon_sends"].samples}
    assert sends == {"queued": 1.0, "idempotency_key_reused": 1.0}
    assert sum(sample.value for sample in families["postroom_daemon_outbox_rows"].samples) == 1.0
    (counted,) = [s for s in families["postroom_daemon_accept_seconds"].samples if s.name.endswith("_count")]
    assert counted.value == 1.0
