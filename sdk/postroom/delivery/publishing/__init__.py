"""Publishing: what broker, `postroom.emit` and consumers wrote into Postgres goes into JetStream, once and in order."""

from postroom.delivery.publishing.publisher import Publisher, PublisherCounters
from postroom.delivery.publishing.record import Record, Redriven, redrive
from postroom.delivery.publishing.settings import PublisherSettings, RecordSettings
from postroom.delivery.publishing.source import DELIVERIES, EVENTS, LETTERS, Backlog, Source, sources_of
from postroom.delivery.publishing.work_queues import WorkQueues

__all__ = [
    "DELIVERIES",
    "EVENTS",
    "LETTERS",
    "Backlog",
    "Publisher",
    "PublisherCounters",
    "PublisherSettings",
    "Record",
    "RecordSettings",
    "Redriven",
    "Source",
    "WorkQueues",
    "redrive",
    "sources_of",
]
