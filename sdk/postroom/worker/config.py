"""The worker's config: one TOML file; `POSTROOM_WORKER_<KEY>` overrides a key (docs/contract/operate.md#operate-19).

Without a file, `POSTROOM_DATABASE_URL` and `POSTROOM_NATS_URL`, which every verb reads, stand in for the worker's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from postroom.chassis.config import SECRET, load
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.publishing import PublisherSettings, RecordSettings
from postroom.delivery.settings import NatsSettings, StreamDefaults, StreamSettings
from postroom.delivery.webhooks.settings import WebhookSettings, check_webhooks
from postroom.worker.job_settings import JobSettings
from postroom.worker.once import OnceSettings
from postroom.worker.orphans import OrphanCheckSettings

PREFIX: Final = "POSTROOM_WORKER_"
_SHARED: Final = {"POSTROOM_DATABASE_URL": "DATABASE_URL", "POSTROOM_NATS_URL": "NATS_URL"}


class WorkerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The config of one worker; any number of them share a Postgres and a JetStream."""

    database_url: Annotated[str, SECRET, Meta(description="Postgres 16 or newer, postgresql://…")]
    nats: NatsSettings
    listen_host: Annotated[str, Meta(description="address of /health, /ready and /metrics")] = "127.0.0.1"
    listen_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="port of these pages; 0: a free one; unset: none")
    ] = None
    declare_streams: Annotated[
        bool,
        Meta(description="whether to create the default streams of each mesh where no other stream has their subjects"),
    ] = True
    stream_defaults: StreamDefaults = msgspec.field(default_factory=StreamDefaults)
    streams: Annotated[list[StreamSettings], Meta(description="further streams to create and update")] = msgspec.field(
        default_factory=list
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest level that is logged")
    ] = "info"
    events: PublisherSettings = msgspec.field(default_factory=PublisherSettings)
    deliveries: PublisherSettings = msgspec.field(default_factory=PublisherSettings)
    record: RecordSettings = msgspec.field(default_factory=RecordSettings)
    once: OnceSettings = msgspec.field(default_factory=OnceSettings)
    webhooks: WebhookSettings = msgspec.field(default_factory=WebhookSettings)
    flows: Annotated[list[str], Meta(description="flows whose jobs this worker runs, as in nightly_export:flow")] = (
        msgspec.field(default_factory=list)
    )
    orphan_check: OrphanCheckSettings = msgspec.field(default_factory=OrphanCheckSettings)
    jobs: JobSettings = msgspec.field(default_factory=JobSettings)


def load_config(file: Path | None, environ: Mapping[str, str] = os.environ) -> WorkerConfig:
    """Read and check the config; raises `Fatal` (78) with the path of what is wrong."""
    config = load(WorkerConfig, file, prefix=PREFIX, environ=environ, shared=_SHARED if file is None else None)
    if config.record.keep_days < config.record.horizon_days:
        raise Fatal(
            Exit.CONFIG,
            f"record.keep_days ({config.record.keep_days:g}) is shorter than record.horizon_days "
            f"({config.record.horizon_days:g}): messages that may have to be published again must be kept",
        )
    check_webhooks(config.webhooks)
    if config.once.keep_days < config.record.horizon_days:
        raise Fatal(
            Exit.CONFIG,
            f"once.keep_days ({config.once.keep_days:g}) is shorter than record.horizon_days "
            f"({config.record.horizon_days:g}): messages that are published again would be handled again",
        )
    if config.webhooks.inbox.horizon_days < config.record.horizon_days:
        raise Fatal(
            Exit.CONFIG,
            f"webhooks.inbox.horizon_days ({config.webhooks.inbox.horizon_days:g}) is shorter than "
            f"record.horizon_days ({config.record.horizon_days:g}): messages that are "
            "published again would be posted again",
        )
    return config
