"""Publishing: what broker, `postroom.emit` and consumers wrote into Postgres goes into JetStream, once and in order."""

from delivery.publishing.publisher import Publisher, PublisherCounters
from delivery.publishing.record import Record, Redriven, redrive
from delivery.publishing.settings import PublisherSettings, RecordSettings
from delivery.publishing.source import DELIVERIES, EVENTS, LETTERS, Backlog, Source, sources_of
from delivery.publishing.work_queues import WorkQueues

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
