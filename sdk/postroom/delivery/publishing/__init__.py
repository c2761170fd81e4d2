"""Publishing: what a database holds goes into JetStream, once and in order, and again where a stream loses it."""

from postroom.delivery.publishing.postgres import DELIVERIES, EVENTS, LETTERS, Backlog, PostgresSource, sources_of
from postroom.delivery.publishing.publisher import CHANNEL, Bell, Publisher, PublisherCounters
from postroom.delivery.publishing.record import Record, WorkQueues
from postroom.delivery.publishing.source import Source

__all__ = [
    "CHANNEL",
    "DELIVERIES",
    "EVENTS",
    "LETTERS",
    "Backlog",
    "Bell",
    "PostgresSource",
    "Publisher",
    "PublisherCounters",
    "Record",
    "Source",
    "WorkQueues",
    "sources_of",
]
