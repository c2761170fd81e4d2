"""The metrics of a process: `postroom_worker_…`, `postroom_consumer_…`, `postroom_agent_…`.

None has a label that names a message (docs/contract/operate.md#operate-31).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from postroom.delivery.agents.outgoing import AgentCounters
from postroom.delivery.agents.runtime import AgentRuntime
from postroom.delivery.consumer import ConsumerCounters
from postroom.delivery.http.handler import CALL_BOUNDS, HandlerCounters, HttpHandler, Reach
from postroom.delivery.http.inbox_messages import Backlog as InboxBacklog
from postroom.delivery.publishing import Backlog, Publisher, Record
from postroom.delivery.webhooks.webhooks import Webhooks
from postroom.worker.jobs import Jobs
from postroom.worker.orphans import OrphanCheck


def of_publication(
    publishers: Sequence[Publisher],
    record: Record,
    backlogs: Mapping[str, Backlog],
    *,
    webhooks: Webhooks | None,
    jobs: Jobs | None,
    orphan_check: OrphanCheck | None,
) -> list[Metric]:
    """Return every metric of publishing; without `backlogs`, which Postgres knows, none of them."""
    return [
        *_counters(publishers, record),
        *_backlogs(backlogs),
        *_webhooks(webhooks),
        *_jobs(jobs),
        *_orphans(orphan_check),
    ]


def of_consumer(
    consumer: ConsumerCounters, handler: HttpHandler, in_hand: int, backlog: InboxBacklog | None
) -> list[Metric]:
    """Return every metric of a consumer; without a backlog where Postgres could not tell it."""
    return [*_consumer(consumer, in_hand), *_handler(handler.counters), *_reach(handler.reach), *_inbox(backlog)]


def of_agent(runtime: AgentRuntime, consumers: Sequence[ConsumerCounters]) -> list[Metric]:
    """Return every metric of an agent."""
    return [*_agent_messages(runtime.counters, runtime.position), *_agent_deliveries(consumers)]


def labelled(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Add labels to every sample, where a process runs several of what has such families."""
    for family in families:
        family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in family.samples]
        yield family


def merged(families: Iterable[Metric]) -> list[Metric]:
    """Put the samples of equal families into one, as the text format wants it."""
    found: dict[str, Metric] = {}
    for family in families:
        if (same := found.setdefault(family.name, family)) is not family:
            same.samples += family.samples
    return list(found.values())


def _counters(publishers: Sequence[Publisher], record: Record) -> Iterable[Metric]:
    counters = {publisher.source.name: publisher.counters for publisher in publishers}
    yield _counter("published", "Messages that JetStream acknowledged.", _pick(counters, "published"))
    yield _counter("publish_failures", "Attempts that failed.", _pick(counters, "failed"))
    yield _counter("batches", "Transactions that published something.", _pick(counters, "batches"))
    yield _counter("requeued", "Messages that a stream lost and that are published again.", record.requeued)
    working = {source: float(one.trouble is None) for source, one in counters.items()}
    yield _gauge("publishing", "1 while publishing is not blocked.", working)


def _backlogs(backlogs: Mapping[str, Backlog]) -> Iterable[Metric]:
    now = time.time()
    ages = {
        source: 0.0 if backlog.oldest_at is None else max(0.0, now - backlog.oldest_at.timestamp())
        for source, backlog in backlogs.items()
    }
    yield _gauge("backlog_messages", "Messages that wait to be published.", _pick(backlogs, "count"))
    yield _gauge("backlog_failing_messages", "Waiting messages that failed before.", _pick(backlogs, "failing"))
    yield _gauge("backlog_age_seconds", "How long the oldest has waited.", ages)


def _webhooks(webhooks: Webhooks | None) -> Iterable[Metric]:
    if webhooks is None:
        return
    yield GaugeMetricFamily("postroom_worker_webhooks", "Webhooks that messages are posted to.", len(webhooks.running))
    away = sum(webhook.reach.error is not None for webhook in webhooks.running.values())
    yield GaugeMetricFamily(
        "postroom_worker_webhooks_unreachable", "Webhooks that pause because they are unreachable.", away
    )
    name, text = "postroom_worker_webhook_deliveries", "Deliveries to webhooks, by outcome."
    family = CounterMetricFamily(name, text, labels=["outcome"])
    for outcome, count in asdict(webhooks.counters).items():
        family.add_metric([outcome], count)
    yield family


def _jobs(jobs: Jobs | None) -> Iterable[Metric]:
    if jobs is None:
        return
    yield GaugeMetricFamily("postroom_worker_flows_running", "Flows that run, by mesh.", len(jobs.running))
    name, text = "postroom_worker_job_messages", "Transitions of jobs, by outcome."
    family = CounterMetricFamily(name, text, labels=["flow", "outcome"])
    for flow, engine in jobs.engines.items():
        for outcome, count in asdict(engine.counters).items():
            family.add_metric([flow, outcome], count)
    yield family


def _orphans(check: OrphanCheck | None) -> Iterable[Metric]:
    if check is None or check.last is None:
        return
    rows = sum(violation.rows for violation in check.last.violations)
    yield GaugeMetricFamily("postroom_worker_orphans", "Rows that the last orphan check found incomplete.", rows)
    name, text = "postroom_worker_orphan_check_timestamp_seconds", "When the last orphan check began."
    yield GaugeMetricFamily(name, text, check.last.at.timestamp())


def _pick(values: Mapping[str, object], field: str) -> dict[str, float]:
    return {source: float(getattr(value, field)) for source, value in values.items()}


def _counter(name: str, text: str, values: Mapping[str, float]) -> Metric:
    return _family(CounterMetricFamily(f"postroom_worker_{name}", text, labels=["source"]), values)


def _gauge(name: str, text: str, values: Mapping[str, float]) -> Metric:
    return _family(GaugeMetricFamily(f"postroom_worker_{name}", text, labels=["source"]), values)


def _family(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    for source, value in values.items():
        family.add_metric([source], value)
    return family


def _consumer(counters: ConsumerCounters, in_hand: int) -> Iterator[Metric]:
    deliveries = CounterMetricFamily(
        "postroom_consumer_deliveries", "Deliveries by outcome, since the start", labels=["outcome"]
    )
    for field in fields(counters):
        deliveries.add_metric([field.name], getattr(counters, field.name))
    yield deliveries
    yield GaugeMetricFamily("postroom_consumer_in_hand", "Messages claimed", in_hand)


def _handler(counters: HandlerCounters) -> Iterator[Metric]:
    calls = CounterMetricFamily("postroom_consumer_calls", "Calls of the handler by its answer", labels=["answer"])
    for answer, count in counters.answers.items():
        calls.add_metric([answer], count)
    yield calls
    buckets = list(zip([*map(str, CALL_BOUNDS), "+Inf"], accumulate(counters.call_counts), strict=True))
    yield HistogramMetricFamily(
        "postroom_consumer_call_seconds", "Time of a call", buckets=buckets, sum_value=counters.call_seconds
    )
    yield GaugeMetricFamily("postroom_consumer_calls_under_way", "Calls running", counters.calls_under_way)
    for name, what, value in (
        ("duplicates", "Deliveries of messages that were processed before", counters.duplicates),
        ("malformed", "Messages that could not become a request", counters.malformed),
        ("held", "Deliveries of messages that another consumer was handling", counters.held),
        ("leases_lost", "Attempts that ended without their lease", counters.leases_lost),
    ):
        yield CounterMetricFamily(f"postroom_consumer_{name}", what, value)


def _reach(reach: Reach) -> Iterator[Metric]:
    there = float(reach.error is None)
    yield GaugeMetricFamily(
        "postroom_consumer_handler_reachable", "0 while calls pause because the handler is unreachable", there
    )
    yield GaugeMetricFamily(
        "postroom_consumer_handler_away_seconds", "How long the handler has been unreachable", reach.away_seconds
    )


def _inbox(backlog: InboxBacklog | None) -> Iterator[Metric]:
    if backlog is None:
        return
    oldest = 0.0 if backlog.oldest_at is None else max(0.0, time.time() - backlog.oldest_at.timestamp())
    yield GaugeMetricFamily(
        "postroom_consumer_backlog_messages", "Messages neither processed nor dead", backlog.messages
    )
    yield GaugeMetricFamily("postroom_consumer_backlog_oldest_seconds", "Age of the oldest of them", oldest)


def _agent_messages(counters: AgentCounters, position: int) -> Iterator[Metric]:
    messages = CounterMetricFamily(
        "postroom_agent_messages", "Messages that the agent handled and emitted, by outcome.", labels=["what"]
    )
    for what, count in asdict(counters).items():
        messages.add_metric([what], count)
    yield messages
    yield GaugeMetricFamily("postroom_agent_position", "The last position of the event store.", value=position)


def _agent_deliveries(consumers: Sequence[ConsumerCounters]) -> Iterator[Metric]:
    deliveries = CounterMetricFamily(
        "postroom_agent_deliveries", "Deliveries by outcome; delivered counts all.", labels=["what"]
    )
    for what in ConsumerCounters.__slots__:
        deliveries.add_metric([what], sum(getattr(counters, what) for counters in consumers))
    yield deliveries
