"""The metrics of a process: `postroom_worker_…`, `postroom_consumer_…`, `postroom_agent_…`.

None has a label that names a message (docs/contract/operate.md#operate-31).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from postroom._wire.unpublished import Durable, SourceBacklog
from postroom.delivery.agents.runtime import AgentRuntime
from postroom.delivery.consumer import ConsumerCounters
from postroom.delivery.http.handler import PostingConsumer
from postroom.delivery.http.inbox_messages import Backlog
from postroom.delivery.http.webhooks import Webhooks
from postroom.delivery.publication.publisher import Publisher
from postroom.delivery.publication.record import Record
from postroom.worker.jobs import Jobs
from postroom.worker.orphans import OrphanCheck


def of_publication(
    publishers: Sequence[Publisher],
    record: Record,
    backlogs: Mapping[str, SourceBacklog],
    durables: Sequence[Durable],
    *,
    webhooks: Webhooks | None,
    jobs: Jobs | None,
    orphan_check: OrphanCheck | None,
) -> list[Metric]:
    """Return every metric of publishing, and of all `durables`, whether they run or not.

    `backlogs` is empty where Postgres cannot be asked: then their metrics have no samples.
    """
    counters = {publisher.source.name: publisher.counters for publisher in publishers}
    working = {source: float(one.trouble is None) for source, one in counters.items()}
    ages = {source: _age(backlog.oldest_at) for source, backlog in backlogs.items()}
    failing = "Waiting messages that JetStream has refused."
    requeued = "Messages that a stream lost and that are published again."
    families = [
        _counter("worker_published", "Messages that JetStream acknowledged.", "source", _pick(counters, "published")),
        _counter("worker_publish_failures", "Attempts that failed.", "source", _pick(counters, "failed")),
        _counter("worker_batches", "Transactions that published something.", "source", _pick(counters, "batches")),
        _counter("worker_requeued", requeued, "source", record.requeued),
        _gauge("worker_publishing", "1 while publishing is not blocked.", working),
        _gauge("worker_backlog_messages", "Messages that wait to be published.", _pick(backlogs, "count")),
        _gauge("worker_backlog_failing_messages", failing, _pick(backlogs, "failing")),
        _gauge("worker_backlog_age_seconds", "How long the oldest has waited.", ages),
    ]
    families += _of_durables(durables)
    if webhooks is not None:
        away = sum(webhook.handler.reach.error is not None for webhook in webhooks.running.values())
        outcomes = asdict(webhooks.counters)
        families += [
            _gauge("worker_webhooks", "Webhooks that messages are posted to.", len(webhooks.running)),
            _gauge("worker_webhooks_unreachable", "Webhooks that pause because they are unreachable.", away),
            _counter("worker_webhook_deliveries", "Deliveries to webhooks, by outcome.", "outcome", outcomes),
        ]
    if jobs is not None:
        text = "Transitions of jobs, by outcome."
        messages = CounterMetricFamily("postroom_worker_job_messages", text, labels=["flow", "outcome"])
        for flow, engine in jobs.engines.items():
            for outcome, count in asdict(engine.counters).items():
                messages.add_metric([flow, outcome], count)
        families += [_gauge("worker_flows_running", "Flows that run, by mesh.", len(jobs.running)), messages]
    if orphan_check is not None:
        rows = 0 if orphan_check.last is None else sum(violation.rows for violation in orphan_check.last.violations)
        began = "When the last orphan check began; where there was none, when the worker did."
        families += [
            _gauge("worker_orphans", "Rows that the last orphan check found incomplete.", rows),
            _gauge("worker_orphan_check_timestamp_seconds", began, orphan_check.at.timestamp()),
        ]
    return families


def _of_durables(durables: Sequence[Durable]) -> list[Metric]:
    gauges: dict[str, tuple[str, Callable[[Durable], float | None]]] = {
        "waiting_messages": ("Messages that a durable consumer has yet to be given.", lambda one: one.waiting),
        "in_hand_messages": ("Messages that it was given and has not settled.", lambda one: one.in_hand),
        "asking": ("1 while a program asks for its messages.", lambda one: one.asks),
        "paused": ("1 while an operator pauses it, or its handler is unreachable.", lambda one: one.paused is not None),
        "seen_timestamp_seconds": (
            "When it was last given or settled a message.",
            lambda one: None if one.seen_at is None else one.seen_at.timestamp(),
        ),
    }
    families: list[Metric] = []
    for name, (text, value) in gauges.items():
        family = GaugeMetricFamily(f"postroom_worker_durable_{name}", text, labels=["stream", "consumer"])
        for one in durables:
            if (found := value(one)) is not None:
                family.add_metric([one.stream, one.consumer], float(found))
        families.append(family)
    return families


def of_consumer(consumer: PostingConsumer, backlog: Backlog | None) -> list[Metric]:
    """Return every metric of a consumer; without those of the backlog where Postgres cannot be asked."""
    counters, reach = consumer.handler.counters, consumer.handler.reach
    reachable = "0 while calls pause because the handler is unreachable"
    away = "How long the handler has been unreachable"
    families = [
        _counter("consumer_deliveries", "Deliveries by outcome, since the start", "outcome", asdict(consumer.counters)),
        _gauge("consumer_in_hand", "Messages claimed", consumer.in_hand),
        _counter("consumer_calls", "Calls of the handler by its answer", "answer", counters.answers),
        counters.call_seconds.family("postroom_consumer_call_seconds", "Time of a call"),
        _gauge("consumer_calls_under_way", "Calls running", counters.calls_under_way),
        *(
            CounterMetricFamily(f"postroom_consumer_{name}", what, value)
            for name, what, value in (
                ("duplicates", "Deliveries of messages that were processed before", counters.duplicates),
                ("malformed", "Messages that could not become a request", counters.malformed),
                ("held", "Deliveries of messages that another consumer was handling", counters.held),
                ("leases_lost", "Attempts that ended without their lease", counters.leases_lost),
            )
        ),
        _gauge("consumer_handler_reachable", reachable, float(reach.error is None)),
        _gauge("consumer_handler_away_seconds", away, reach.away_seconds),
    ]
    if backlog is not None:
        families += [
            _gauge("consumer_backlog_messages", "Messages neither processed nor dead", backlog.messages),
            _gauge("consumer_backlog_oldest_seconds", "Age of the oldest of them", _age(backlog.oldest_at)),
        ]
    return families


def of_agent(runtime: AgentRuntime, consumers: Sequence[ConsumerCounters]) -> list[Metric]:
    """Return every metric of an agent."""
    handled = "Messages that the agent handled and emitted, by outcome."
    delivered = {what: sum(getattr(one, what) for one in consumers) for what in ConsumerCounters.__slots__}
    return [
        _counter("agent_messages", handled, "what", asdict(runtime.counters)),
        _gauge("agent_position", "The last position of the event store.", runtime.position),
        _counter("agent_deliveries", "Deliveries by outcome; delivered counts all.", "what", delivered),
    ]


def labelled(families: Iterable[Metric], labels: Mapping[str, str]) -> Iterator[Metric]:
    """Add labels to every sample, where several parts of a process have such families."""
    for family in families:
        family.samples = [sample._replace(labels={**labels, **sample.labels}) for sample in family.samples]
        yield family


def merged(families: Iterable[Metric]) -> list[Metric]:
    """Merge the samples of equal families, as the text format requires."""
    found: dict[str, Metric] = {}
    for family in families:
        if (same := found.setdefault(family.name, family)) is not family:
            same.samples += family.samples
    return list(found.values())


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(f"postroom_{name}", text, labels=[label])
    for labelling, value in values.items():
        family.add_metric([labelling], value)
    return family


def _gauge(name: str, text: str, found: Mapping[str, float] | float) -> Metric:
    """Return a gauge, with one value, or one for each source."""
    if not isinstance(found, Mapping):
        return GaugeMetricFamily(f"postroom_{name}", text, found)
    family = GaugeMetricFamily(f"postroom_{name}", text, labels=["source"])
    for source, value in found.items():
        family.add_metric([source], value)
    return family


def _pick(values: Mapping[str, object], field: str) -> dict[str, float]:
    return {source: float(getattr(value, field)) for source, value in values.items()}


def _age(moment: datetime | None) -> float:
    """Return the seconds since then; 0 where nothing waits."""
    return 0.0 if moment is None else max(0.0, time.time() - moment.timestamp())
