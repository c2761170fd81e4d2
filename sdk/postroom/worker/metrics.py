"""The publishing worker's metrics: `postroom_worker_<what>_<unit>` (docs/contract/operate.md#operate-31)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from postroom.chassis.routes import exposition
from postroom.delivery.publishing import Backlog, Publisher, Record
from postroom.delivery.webhooks.webhooks import Webhooks
from postroom.worker.jobs import Jobs
from postroom.worker.orphans import OrphanCheck


def expose(
    publishers: Sequence[Publisher],
    record: Record,
    backlogs: Mapping[str, Backlog],
    *,
    webhooks: Webhooks | None,
    jobs: Jobs | None,
    orphan_check: OrphanCheck | None,
) -> bytes:
    """Return every metric in Prometheus' text format; without `backlogs`, which Postgres knows, none of them."""
    return exposition(
        [
            *_counters(publishers, record),
            *_backlogs(backlogs),
            *_webhooks(webhooks),
            *_jobs(jobs),
            *_orphans(orphan_check),
        ]
    )


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
