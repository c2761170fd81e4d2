"""From the daemon to the broker: the HTTP client, the features, the relay and how it reads answers."""

from broker_client.answers import RelayCounters
from broker_client.channel import Failure, RequestFailed
from broker_client.features import max_age_hours
from broker_client.link import BrokerLink, ConfirmedClock, report_ends
from broker_client.relay import Relay
from broker_client.settings import BrokerClientSettings, RelaySettings

__all__ = [
    "BrokerClientSettings",
    "BrokerLink",
    "ConfirmedClock",
    "Failure",
    "Relay",
    "RelayCounters",
    "RelaySettings",
    "RequestFailed",
    "max_age_hours",
    "report_ends",
]
