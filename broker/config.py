"""The broker's config: one TOML file; `POSTROOM_BROKER_<KEY>` overrides a key (docs/contract/operate.md#operate-19)."""

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from postroom._wire.accept import MAX_BATCH, MIN_DEDUPE_DAYS
from postroom._wire.message import MAX_BODY_BYTES
from postroom.chassis.config import MAX_DAYS, SECRET, Days, Host, LogLevel, Seconds, load
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.settings import AddressSettings, NatsSettings, networks_of

PREFIX: Final = "POSTROOM_BROKER_"
_SHARED: Final = {f"POSTROOM_{name}": name for name in ("DATABASE_URL", "REDIS_URL", "NATS_URL")}  # by `postroom up`


class LimiterConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How many messages a mesh and a member may send in one window, and what happens without Redis."""

    per_mesh: Annotated[int, Meta(ge=1, description="messages that one mesh may send in a window")] = 1_000_000
    per_member: Annotated[int, Meta(ge=1, description="messages that one member may send in a window")] = 500_000
    window_seconds: Annotated[int, Meta(ge=1, le=3600, description="length of a window, in seconds")] = 10
    on_error: Annotated[
        Literal["local", "closed"],
        Meta(description="without Redis: `local` limits in this process at the same rate, `closed` answers 503"),
    ] = "local"
    timeout_ms: Annotated[int, Meta(ge=1, le=10_000, description="how long Redis may take, in ms")] = 100
    breaker_failures: Annotated[
        int, Meta(ge=1, description="consecutive failures after which Redis is not asked for a while")
    ] = 3
    breaker_seconds: Annotated[Seconds, Meta(description="how long Redis is not asked then, in seconds")] = 2.0


class RetentionConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How long messages are kept and ids are recognised (docs/contract/accept.md#accept-37)."""

    mode: Annotated[
        Literal["retention_scoped", "permanent"],
        Meta(description="whether ids are recognised for `dedupe_days` or forever"),
    ] = "retention_scoped"
    dedupe_days: Annotated[
        int, Meta(ge=MIN_DEDUPE_DAYS, le=MAX_DAYS, description="how long an id is recognised, in days")
    ] = 30
    message_days: Annotated[int, Meta(ge=1, le=MAX_DAYS, description="how long a message is kept, in days")] = 30
    event_days: Annotated[
        Days, Meta(description="how long workers keep published events (their `record.keep_days`), in days")
    ] = 30
    sweep: Annotated[bool, Meta(description="whether this process takes part in sweeping (one leader sweeps)")] = True
    sweep_interval_seconds: Annotated[Seconds, Meta(description="pause between sweeps, in seconds")] = 60.0
    sweep_rows: Annotated[int, Meta(ge=1, le=10_000, description="rows in one step of a sweep")] = 500


def dedupe_life(retention: RetentionConfig) -> timedelta | None:
    """Return how long an id is recognised; None: for ever."""
    return None if retention.mode == "permanent" else timedelta(days=retention.dedupe_days)


def events_kept(retention: RetentionConfig) -> timedelta:
    """Return how long a published event is kept at least."""
    return timedelta(days=retention.event_days)


class BrokerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The config of one broker instance; any number of them share a Postgres and a Redis."""

    database_url: Annotated[str, SECRET, Meta(description="Postgres 16 or newer, postgresql://…")]
    redis_url: Annotated[
        str | None,
        SECRET,
        Meta(
            description="Redis for the limiter, redis://…, rediss://… or unix://…; unset: each broker limits by itself"
        ),
    ] = None
    admin_token_file: Annotated[
        Path | None, Meta(description="file with the broker-wide administrator's token; not readable by others")
    ] = None
    listen_host: Annotated[Host, Meta(description="address to listen on")] = "127.0.0.1"
    listen_port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: a free one")] = 7420
    socket_path: Annotated[Path | None, Meta(description="listen on this Unix socket instead")] = None
    socket_group: Annotated[
        str | None, Meta(description="group that may connect (mode 0660); unset: only the broker's user (mode 0600)")
    ] = None
    tls_cert: Annotated[Path | None, Meta(description="certificate chain (PEM); turns TLS on")] = None
    tls_key: Annotated[
        Path | None, Meta(description="private key (PEM) of `tls_cert`, without a passphrase; not readable by others")
    ] = None
    connections: Annotated[int, Meta(ge=1, le=100, description="Postgres connections for accepting")] = 6
    max_batch: Annotated[int, Meta(ge=1, le=MAX_BATCH, description="messages in one accept request")] = MAX_BATCH
    max_request_bytes: Annotated[int, Meta(ge=1024, description="largest request body, in bytes")] = 8 * MAX_BODY_BYTES
    max_inline_bytes: Annotated[int, Meta(ge=1, le=MAX_BODY_BYTES, description="largest message body, in bytes")] = (
        MAX_BODY_BYTES
    )
    max_in_flight: Annotated[
        int,
        Meta(
            ge=1,
            description="batches that are accepted at once; a mesh has at most a quarter, a member a quarter of that",
        ),
    ] = 64
    buffered_bytes: Annotated[
        int, Meta(ge=1024, description="bodies in memory at once, in bytes, shared in the same way; the rest waits")
    ] = 64 * MAX_BODY_BYTES
    max_connections: Annotated[
        int, Meta(ge=1, description="open connections; always kept below the limit on file descriptors")
    ] = 4096
    header_seconds: Annotated[Seconds, Meta(description="how long a request's head may take, in seconds")] = 10.0
    body_seconds: Annotated[Seconds, Meta(description="how long a client may take to send a body, in seconds")] = 30.0
    stall_seconds: Annotated[Seconds, Meta(description="how long an answer may stay unread, in seconds")] = 30.0
    idle_seconds: Annotated[Seconds, Meta(description="how long a connection may idle, in seconds")] = 75.0
    log_level: LogLevel = "info"
    limiter: LimiterConfig = msgspec.field(default_factory=LimiterConfig)
    retention: RetentionConfig = msgspec.field(default_factory=RetentionConfig)
    webhooks: AddressSettings = msgspec.field(default_factory=AddressSettings)
    nats: Annotated[
        NatsSettings | None,
        Meta(description="JetStream, for operators to see and replay dead letters; nothing else needs it"),
    ] = None


def load_config(file: Path | None, environ: Mapping[str, str] = os.environ) -> BrokerConfig:
    """Read and check the config; raises `Fatal` (78) with the path of what is wrong."""
    config = load(BrokerConfig, file, prefix=PREFIX, environ=environ, shared=_SHARED if file is None else None)
    retention = config.retention
    if retention.mode == "retention_scoped" and retention.message_days > retention.dedupe_days:
        limit = f"retention.dedupe_days ({retention.dedupe_days})"
        kept = f"retention.message_days ({retention.message_days}) is longer than {limit}"
        raise Fatal(Exit.CONFIG, f"{kept}: an id must be recognised for as long as its message is kept")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise Fatal(Exit.CONFIG, "tls_cert and tls_key belong together: set both or neither")
    if config.redis_url is None and config.limiter.on_error == "closed":
        raise Fatal(Exit.CONFIG, "limiter.on_error = closed needs a Redis: set redis_url as well, or neither")
    if config.socket_group is not None and config.socket_path is None:
        raise Fatal(Exit.CONFIG, "socket_group is for a socket: set socket_path as well, or neither")
    networks_of(config.webhooks)
    return config
