"""The broker's metrics, in one registry, as `postroom_broker_<what>_<unit>` (docs/contract/operate.md#operate-31)."""

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MESSAGES: Final = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)


class Metrics:
    """Every metric of the broker; no label ever holds a mesh, a member, an id or a token."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.messages = Counter(
            "postroom_broker_messages",
            "Messages answered, by the phase that decided (b0, b1, b2, b3) and the HTTP status of the answer.",
            ["phase", "status"],
            registry=registry,
        )
        self.accept_seconds = Histogram(
            "postroom_broker_accept_seconds", "Time to answer a batch.", buckets=_SECONDS, registry=registry
        )
        self.write_seconds = Histogram(
            "postroom_broker_accept_write_seconds", "Time of the transaction.", buckets=_SECONDS, registry=registry
        )
        self.batch_messages = Histogram(
            "postroom_broker_batch_messages", "Messages in a batch.", buckets=_MESSAGES, registry=registry
        )
        self.unknown_outcomes = Counter(
            "postroom_broker_unknown_outcomes",
            "Transactions that ended in an error and whose ids were looked up before answering.",
            registry=registry,
        )
        self.limiter_decisions = Counter(
            "postroom_broker_limiter_decisions",
            "Messages that the limiter allowed or denied, by what decided (redis, local, closed).",
            ["decider", "decision"],
            registry=registry,
        )
        self.limiter_degraded = Gauge(
            "postroom_broker_limiter_degraded", "1 while the limiter works without Redis.", registry=registry
        )
        self.postgres_reachable = Gauge(
            "postroom_broker_postgres_reachable", "1 while Postgres takes what the broker accepts.", registry=registry
        )
        self.consumed_then_rejected = Counter(
            "postroom_broker_rate_limit_consumed_then_rejected",
            "Messages that took a unit of the limiter and were refused by their destination (B2) afterwards.",
            registry=registry,
        )
        self.swept_rows = Counter(
            "postroom_broker_swept_rows", "Rows that retention deleted, by kind.", ["kind"], registry=registry
        )

        self.dropped = Counter(
            "postroom_broker_connections_dropped",
            "Connections ended by a deadline, by the reason.",
            ["reason"],
            registry=registry,
        )

    def expose(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
