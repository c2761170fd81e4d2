"""Publishing: what the accept transaction and `postroom.emit` wrote goes into JetStream, once and in order."""

from delivery.publishing.publisher import Publisher, PublisherCounters
from delivery.publishing.record import Record, Redriven, redrive
from delivery.publishing.settings import PublisherSettings, RecordSettings
from delivery.publishing.source import DELIVERIES, EVENTS, SOURCES, Backlog, Source

__all__ = [
    "DELIVERIES",
    "EVENTS",
    "SOURCES",
    "Backlog",
    "Publisher",
    "PublisherCounters",
    "PublisherSettings",
    "Record",
    "RecordSettings",
    "Redriven",
    "Source",
    "redrive",
]
