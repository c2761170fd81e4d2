"""What a config may say about NATS, streams, publishing and consumers.

Each program puts these structs into its own config.
"""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from postroom._wire.retry import STEADY, Backoff
from postroom.chassis.config import SECRET

DAY: Final = 86_400.0  # seconds

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Retention = Literal["limits", "workqueue", "interest"]


class NatsSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How JetStream is reached."""

    url: Annotated[str, SECRET, Meta(description="NATS servers with JetStream, nats://… or tls://…, comma-separated")]
    credentials_file: Annotated[
        Path | None,
        Meta(description="file with `user:password`, or a token; read at every connection, not readable by others"),
    ] = None
    ca_file: Annotated[
        Path | None, Meta(description="PEM file of the authorities that may sign the server's certificate")
    ] = None
    connect_seconds: Annotated[float, Meta(gt=0, le=300, description="longest wait for a connection, in seconds")] = 5
    reconnect_seconds: Annotated[
        float, Meta(gt=0, le=60, description="pause between two tries to connect again, in seconds")
    ] = 0.5
    ping_seconds: Annotated[
        float,
        Meta(gt=0, le=600, description="pause between pings, in seconds; a server that misses two counts as lost"),
    ] = 10


class StreamSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One stream as it is declared (docs/contract/delivery.md#delivery-5)."""

    name: Annotated[Name, Meta(description="the stream's name, as in SEA_EVENTS")]
    subjects: Annotated[list[str], Meta(min_length=1, description="subjects that it keeps, as in sea.event.>")]
    retention: Annotated[
        Retention,
        Meta(description="keep until a limit, until one consumer has acknowledged it, or while a consumer needs it"),
    ] = "limits"
    max_age_seconds: Annotated[
        float, Meta(ge=0, description="age at which a message is deleted, in seconds; 0: never")
    ] = 0
    max_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="size at which the oldest messages are deleted, in bytes; unset: no limit"),
    ] = None
    storage: Annotated[Literal["file"], Meta(description="where it is kept: always in files")] = "file"
    replicas: Annotated[int, Meta(ge=1, le=5, description="number of servers of a cluster that keep a copy")] = 1
    duplicate_window_seconds: Annotated[
        float, Meta(gt=0, description="how long a second publish of the same message id is dropped, in seconds")
    ] = 120


class KindDefaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What the streams of one kind get; what is unset is as usual, and stays as it is where a stream exists."""

    max_age_seconds: Annotated[
        Annotated[float, Meta(ge=0)] | None, Meta(description="age at which a message is deleted, in seconds; 0: never")
    ] = None
    max_bytes: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="size at which the oldest messages are deleted, in bytes")
    ] = None


class StreamDefaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """What the streams get that a worker makes for each mesh, those of later meshes too; unset: as with the kinds."""

    replicas: Annotated[
        Annotated[int, Meta(ge=1, le=5)] | None, Meta(description="number of servers of a cluster that keep a copy")
    ] = None
    duplicate_window_seconds: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="how long a second publish of the same message id is dropped, in seconds"),
    ] = None
    events: KindDefaults = msgspec.field(default_factory=KindDefaults)
    commands: KindDefaults = msgspec.field(default_factory=KindDefaults)
    inbox: KindDefaults = msgspec.field(default_factory=KindDefaults)
    dead_letters: KindDefaults = msgspec.field(default_factory=KindDefaults)


class PublisherSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How one publisher works; events and deliveries have one each."""

    batch: Annotated[int, Meta(ge=1, le=10_000, description="most messages in one transaction")] = 1000
    batch_bytes: Annotated[int, Meta(ge=1, description="most bytes in one transaction (one message at least)")] = (
        8 * 1024 * 1024
    )
    aggregates: Annotated[int, Meta(ge=1, le=10_000, description="most aggregates in one transaction")] = 256
    idle_seconds: Annotated[
        float,
        Meta(
            gt=0, le=60, description="longest pause between two checks of a backlog that nobody calls for, in seconds"
        ),
    ] = 1
    ack_seconds: Annotated[
        float, Meta(gt=0, le=10, description="how long JetStream may take to acknowledge a batch, in seconds")
    ] = 5
    first_seconds: Annotated[
        float, Meta(gt=0, description="longest wait after an event's first failure, in seconds")
    ] = 0.5
    most_seconds: Annotated[
        float, Meta(gt=0, le=DAY, description="longest wait that further failures double it to, in seconds")
    ] = 60


class RecordSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How the record is kept, and what it makes up for (docs/contract/delivery.md#delivery-21)."""

    check_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="pause between two comparisons of streams and record, in seconds")
    ] = 10
    horizon_days: Annotated[
        float, Meta(gt=0, description="age up to which a message that a stream lost is published again, in days")
    ] = 7
    keep_days: Annotated[float, Meta(gt=0, description="how long published events are kept, in days")] = 30

    @property
    def horizon(self) -> timedelta:
        """How old what was lost may be."""
        return timedelta(days=self.horizon_days)


class BackoffSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long a message waits for its next delivery: `first`, times `factor` with each further one, up to `most`."""

    first_seconds: Annotated[float, Meta(gt=0, description="wait after the first attempt, in seconds")] = 1
    factor: Annotated[float, Meta(ge=1, le=100, description="factor of each further wait")] = 2
    most_seconds: Annotated[float, Meta(gt=0, le=DAY, description="longest wait, in seconds")] = 300

    @property
    def schedule(self) -> Backoff:
        """How long each wait is."""
        return Backoff(self.first_seconds, self.most_seconds, self.factor, STEADY)


class ConsumerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One durable pull consumer. Every process that names the same one shares its work."""

    stream: Annotated[Name, Meta(description="the stream to read")]
    durable: Annotated[Name, Meta(description="the name of the consumer, as in sea__from_vibespro")]
    filter_subjects: Annotated[list[str], Meta(description="subjects that it receives; none: all of the stream")] = (
        msgspec.field(default_factory=list)
    )
    ack_wait_seconds: Annotated[
        float,
        Meta(
            ge=0.1, description="time without an acknowledgement after which a message is delivered again, in seconds"
        ),
    ] = 30
    max_deliver: Annotated[
        int, Meta(ge=1, description="attempts, the first included, after which a message is dead-lettered")
    ] = 20
    max_ack_pending: Annotated[int, Meta(ge=1, description="most messages that this process has claimed")] = 1000
    max_waiting: Annotated[
        int,
        Meta(ge=0, description="most messages that may wait for their next attempt, in addition to the claimed ones"),
    ] = 10_000
    batch: Annotated[int, Meta(ge=1, le=10_000, description="most messages that a handler gets at once")] = 100
    batches_at_once: Annotated[int, Meta(ge=1, description="most batches that are handled at once")] = 4
    backoff: BackoffSettings = msgspec.field(default_factory=BackoffSettings)
    since: Annotated[
        datetime | None,
        Meta(description="a new consumer begins with what was published from this time on; unset: with the oldest"),
    ] = None
