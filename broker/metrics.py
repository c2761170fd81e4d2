"""The broker's metrics, in one registry, as `postroom_broker_<what>_<unit>` (docs/contract/operate.md#operate-31)."""

from functools import partial
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
_NAMESPACE: Final = "postroom_broker"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_MESSAGES: Final = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000)

# Of each counter and histogram it would be a second series, with the time at which that began.
disable_created_metrics()  # type: ignore[no-untyped-call] # it has no types


class Metrics:
    """Every metric of the broker; no label ever holds a mesh, a member, an id or a token."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=_NAMESPACE, registry=self.registry)
        gauge = partial(Gauge, namespace=_NAMESPACE, registry=self.registry)
        histogram = partial(Histogram, namespace=_NAMESPACE, registry=self.registry)
        self.messages = counter(
            "messages",
            "Messages answered, by the phase that decided (b0, b1, b2, b3) and the HTTP status of the answer.",
            ["phase", "status"],
        )
        self.accept_seconds = histogram("accept_seconds", "Time to answer a batch.", buckets=_SECONDS)
        self.write_seconds = histogram("accept_write_seconds", "Time of the transaction.", buckets=_SECONDS)
        self.batch_messages = histogram("batch_messages", "Messages in a batch.", buckets=_MESSAGES)
        self.unknown_outcomes = counter(
            "unknown_outcomes", "Transactions that ended in an error and whose ids were looked up before answering."
        )
        self.limiter_decisions = counter(
            "limiter_decisions",
            "Messages that the limiter allowed or denied, by what decided (redis, local, closed).",
            ["decider", "decision"],
        )
        self.limiter_degraded = gauge("limiter_degraded", "1 while the limiter works without Redis.")
        self.postgres_reachable = gauge("postgres_reachable", "1 while Postgres takes what the broker accepts.")
        self.consumed_then_rejected = counter(
            "rate_limit_consumed_then_rejected",
            "Refusals by a destination (B2) after the limiter, one each time a message is tried; it takes one unit.",
        )
        self.swept_rows = counter("swept_rows", "Rows that retention deleted, by kind.", ["kind"])
        self.dropped = counter("connections_dropped", "Connections ended by a deadline, by the reason.", ["reason"])

    def expose(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)
