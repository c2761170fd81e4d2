"""The settings of NATS, streams, publishing, consumers and handlers, which programs include in their configs."""

from datetime import datetime, timedelta
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from postroom._wire.names import STREAM, SUBJECT, SUBJECTS
from postroom._wire.retry import STEADY, Backoff
from postroom.chassis.config import MAX_SECONDS, SECRET, ConnectSeconds, Days, Seconds
from postroom.chassis.exits import Exit, Fatal

DAY: Final = 86_400.0  # seconds
_LEAST_AGE: Final = 0.1  # seconds, NATS's own
KIB: Final = 1024  # bytes

# The limits of a stream, as one is declared and as those of all meshes are.
_Age = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]
_Bytes = Annotated[int, Meta(ge=1)]
_Replicas = Annotated[int, Meta(ge=1, le=5)]
_Window = Annotated[float, Meta(ge=_LEAST_AGE, le=MAX_SECONDS)]
_OF_AGE: Final = Meta(description="age at which a message is deleted, in seconds; 0: never")
_OF_BYTES: Final = "size at which the oldest messages are deleted, in bytes"
_OF_REPLICAS: Final = Meta(description="number of servers of a cluster that keep a copy")
_OF_WINDOW: Final = Meta(description="how long a second publish of the same message id is dropped, in seconds")

Name = Annotated[str, Meta(pattern=STREAM.schema)]
Subjects = Annotated[str, Meta(pattern=SUBJECTS.schema)]
Retention = Literal["limits", "workqueue", "interest"]
AnswerSeconds = Annotated[
    float, Meta(gt=0, le=3600, description="longest wait for an answer, in seconds; shorter than ack_wait_seconds")
]
AckWaitSeconds = Annotated[
    float,
    Meta(
        ge=0.1,
        le=MAX_SECONDS,
        description="time without an acknowledgement after which a message is delivered again, in seconds",
    ),
]
AGENT_MAX_DELIVER: Final = 5  # of an agent whose config does not say it
MaxDeliver = Annotated[
    int, Meta(ge=1, description="attempts, the first included, after which a message is dead-lettered")
]
MaxAckPending = Annotated[int, Meta(ge=1, description="most messages that this process has claimed")]
CallsAtOnce = Annotated[int, Meta(ge=1, le=1000, description="most calls at once")]
HorizonDays = Annotated[
    Days, Meta(description="age up to which a message that a stream lost is published again, in days")
]


class NatsSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How JetStream is reached."""

    url: Annotated[str, SECRET, Meta(description="NATS servers with JetStream, nats://… or tls://…, comma-separated")]
    credentials_file: Annotated[
        Path | None,
        Meta(
            description="file with `user:password`, a token, an nkey's seed, or a token and a seed as in a .creds file;"
            " read at every connection, not readable by others"
        ),
    ] = None
    ca_file: Annotated[
        Path | None, Meta(description="PEM file of the authorities that may sign the server's certificate")
    ] = None
    cert_file: Annotated[
        Path | None, Meta(description="certificate chain (PEM) for servers that ask their clients for one")
    ] = None
    key_file: Annotated[
        Path | None, Meta(description="private key (PEM) of `cert_file`, without a passphrase; not readable by others")
    ] = None
    inbox_prefix: Annotated[
        str,
        Meta(
            pattern=SUBJECT.schema,
            description="where answers and messages come to; with one of its own no other program can listen to them",
        ),
    ] = "_INBOX"
    connect_seconds: ConnectSeconds = 5
    reconnect_seconds: Annotated[
        float, Meta(gt=0, le=60, description="pause between two tries to connect again, in seconds")
    ] = 0.5
    ping_seconds: Annotated[
        float,
        Meta(gt=0, le=600, description="pause between pings, in seconds; a server that misses two counts as lost"),
    ] = 10

    def __post_init__(self) -> None:
        """Refuse half of a certificate."""
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file belong together: set both or neither")


def _check_age(seconds: float | None) -> None:
    if seconds and seconds < _LEAST_AGE:
        raise ValueError(f"max_age_seconds must be 0 or at least {_LEAST_AGE}")


class StreamSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One stream as it is declared (docs/contract/delivery.md#delivery-5)."""

    name: Annotated[Name, Meta(description="the stream's name, as in SEA_EVENTS")]
    subjects: Annotated[list[Subjects], Meta(min_length=1, description="subjects that it keeps, as in sea.event.>")]
    retention: Annotated[
        Retention,
        Meta(description="keep until a limit, until one consumer has acknowledged it, or while a consumer needs it"),
    ] = "limits"
    max_age_seconds: Annotated[_Age, _OF_AGE] = 0
    max_bytes: Annotated[_Bytes | None, Meta(description=f"{_OF_BYTES}; unset: no limit")] = None
    storage: Annotated[Literal["file"], Meta(description="where it is kept: always in files")] = "file"
    replicas: Annotated[_Replicas, _OF_REPLICAS] = 1
    duplicate_window_seconds: Annotated[_Window, _OF_WINDOW] = 120

    def __post_init__(self) -> None:
        """Check what no annotation can say."""
        _check_age(self.max_age_seconds)


class KindDefaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Limits of the streams of one kind; what is unset has its default, and is left alone where a stream exists."""

    max_age_seconds: Annotated[_Age | None, _OF_AGE] = None
    max_bytes: Annotated[_Bytes | None, Meta(description=_OF_BYTES)] = None

    def __post_init__(self) -> None:
        """Check what no annotation can say."""
        _check_age(self.max_age_seconds)


class StreamDefaults(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Limits of the streams that a worker creates for each mesh, later ones too; unset limits as in `KindDefaults`."""

    replicas: Annotated[_Replicas | None, _OF_REPLICAS] = None
    duplicate_window_seconds: Annotated[_Window | None, _OF_WINDOW] = None
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
            gt=0, le=60, description="longest pause between two checks of a backlog without a notification, in seconds"
        ),
    ] = 1
    ack_seconds: Annotated[
        float, Meta(gt=0, le=10, description="how long JetStream may take to acknowledge a batch, in seconds")
    ] = 5
    first_seconds: Annotated[Seconds, Meta(description="longest wait after an event's first failure, in seconds")] = 0.5
    most_seconds: Annotated[
        float, Meta(gt=0, le=DAY, description="longest wait that further failures double it to, in seconds")
    ] = 60


class RecordSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How the record is kept, and how far back losses are made up for (docs/contract/delivery.md#delivery-21)."""

    check_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="pause between two comparisons of streams and record, in seconds")
    ] = 10
    horizon_days: HorizonDays = 7
    keep_days: Annotated[Days, Meta(description="how long published events are kept, in days")] = 30

    @property
    def horizon(self) -> timedelta:
        """How old a lost message may be to be published again."""
        return timedelta(days=self.horizon_days)


class BackoffSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long a message waits for its next delivery: `first`, times `factor` with each further one, up to `most`."""

    first_seconds: Annotated[Seconds, Meta(description="wait after the first attempt, in seconds")] = 1
    factor: Annotated[float, Meta(ge=1, le=100, description="factor of each further wait")] = 2
    most_seconds: Annotated[float, Meta(gt=0, le=DAY, description="longest wait, in seconds")] = 300

    @property
    def schedule(self) -> Backoff:
        """How long each wait is."""
        return Backoff(self.first_seconds, self.most_seconds, self.factor, STEADY)


class ConsumerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """One durable pull consumer. All processes that name the same one share its work."""

    stream: Annotated[Name, Meta(description="the stream to read")]
    durable: Annotated[Name, Meta(description="the name of the consumer, as in sea__from_vibespro")]
    filter_subjects: Annotated[
        list[Subjects], Meta(description="subjects that it receives; none: all of the stream")
    ] = []
    ack_wait_seconds: AckWaitSeconds = 30
    max_deliver: MaxDeliver = 20
    max_ack_pending: MaxAckPending = 1000
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


HandlerFormat = Literal["postroom", "cloudevents", "cloudevents-binary"]


class HandlerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Where messages are posted to, and how long and how large an answer may be."""

    url: Annotated[str, Meta(description="the handler's address, as in http://127.0.0.1:8000/handle")]
    timeout_seconds: AnswerSeconds = 20
    connect_seconds: ConnectSeconds = 5
    calls_at_once: CallsAtOnce = 64
    format: Annotated[
        HandlerFormat,
        Meta(
            description="what is posted: `postroom`, `cloudevents` (a JSON object with the data in it) or "
            "`cloudevents-binary` (the data, with the attributes as headers)"
        ),
    ] = "postroom"
    secret_file: Annotated[
        Path | None, Meta(description="file with the secret that signs requests; not readable by others")
    ] = None
    ca_file: Annotated[
        Path | None,
        Meta(
            description="PEM file of the authorities that may sign the handler's certificate, instead of the system's"
        ),
    ] = None
    max_answer_bytes: Annotated[
        int,
        Meta(ge=0, le=1024 * KIB, description="how much of an answer is read for the reason of a failure, in bytes"),
    ] = 16 * KIB


class InboxSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long a consumer remembers what it has handled."""

    keep_days: Annotated[
        Days, Meta(description="least time that handled messages are remembered, in days; longer than `horizon_days`")
    ] = 30
    horizon_days: Annotated[
        Days, Meta(description="age up to which workers publish a message again (their `record.horizon_days`)")
    ] = 7
    sweep_interval_seconds: Annotated[Seconds, Meta(description="pause between sweeps, in seconds")] = 600
    sweep_rows: Annotated[int, Meta(ge=1, le=10_000, description="rows in one slice of a sweep")] = 500


def check_inbox(inbox: InboxSettings) -> None:
    """Raise `Fatal` (78) unless a message is remembered for longer than it may be published again."""
    if inbox.keep_days <= inbox.horizon_days:
        kept = f"inbox.keep_days ({inbox.keep_days:g}) is not longer than inbox.horizon_days ({inbox.horizon_days:g})"
        raise Fatal(Exit.CONFIG, f"{kept}: a message that workers publish again would be handled again")


class AddressSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which addresses that are not public a webhook may still have; broker and worker need the same list."""

    allow_networks: Annotated[
        list[str], Meta(description="networks that webhooks may reach although they are not public, as in 10.1.0.0/16")
    ] = []


class WebhookSettings(AddressSettings, kw_only=True, forbid_unknown_fields=True):
    """How the worker delivers to webhooks; each limit applies to each webhook."""

    check_seconds: Annotated[
        float, Meta(gt=0, le=60, description="pause between two checks for new webhooks, in seconds")
    ] = 2
    timeout_seconds: AnswerSeconds = 10
    connect_seconds: ConnectSeconds = 5
    ack_wait_seconds: AckWaitSeconds = 30
    calls_at_once: CallsAtOnce = 8
    max_deliver: MaxDeliver = 20
    inbox: InboxSettings = msgspec.field(default_factory=InboxSettings)
    backoff: BackoffSettings = msgspec.field(
        default_factory=lambda: BackoffSettings(first_seconds=5, factor=2, most_seconds=3600)
    )


def check_timeout(handler: HandlerSettings | WebhookSettings, consumer: ConsumerSettings | WebhookSettings) -> None:
    """Raise `Fatal` (78) unless the handler's time-out is below the consumer's ack_wait."""
    if handler.timeout_seconds >= consumer.ack_wait_seconds:
        of = ("webhooks", "webhooks") if handler is consumer else ("handler", "consumer")
        limit = f"{of[1]}.ack_wait_seconds ({consumer.ack_wait_seconds:g})"
        rule = f"{of[0]}.timeout_seconds ({handler.timeout_seconds:g}) must be shorter than {limit}"
        raise Fatal(Exit.CONFIG, f"{rule}: otherwise a message is delivered again while its handler still runs")


def networks_of(settings: AddressSettings) -> list[IPv4Network | IPv6Network]:
    """Return the networks that are allowed; raises `Fatal` (78) for one that is not valid."""
    try:
        return [ip_network(text) for text in settings.allow_networks]
    except ValueError as error:
        raise Fatal(Exit.CONFIG, f"webhooks.allow_networks: {error} (as in 10.1.0.0/16 or fd00:1::/32)") from error


class AgentSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The limits of one agent."""

    receive_seconds: Annotated[
        Seconds, Meta(description="longest time that `receive` may take for one message, in seconds")
    ] = 60
    group_messages: Annotated[
        int, Meta(ge=1, le=10_000, description="most messages that share a transaction of the event store")
    ] = 500
    group_seconds: Annotated[
        float,
        Meta(gt=0, le=60, description="age of a transaction's first message at which it is committed, in seconds"),
    ] = 0.02
    publish_seconds: Annotated[
        float, Meta(gt=0, le=300, description="longest wait for JetStream to acknowledge what was emitted, in seconds")
    ] = 5
    retry_seconds: Annotated[
        float, Meta(gt=0, le=300, description="pause before a failed publish is tried again, in seconds")
    ] = 1
    check_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="pause between two comparisons of streams and store, in seconds")
    ] = 10
    horizon_days: HorizonDays = 7
    keep_days: Annotated[
        Days,
        Meta(description="how long the store records where a message was published, in days; at least `horizon_days`"),
    ] = 30
