"""What `postroom consumer run` can be told: one TOML file, or a few options for the usual case.

`POSTROOM_CONSUMER_<KEY>` overrides a key of the file (docs/contract/operate.md#operate-19).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from postroom.chassis.config import SECRET, load
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.http.settings import HandlerSettings, InboxSettings, check_inbox, check_timeout
from postroom.delivery.settings import ConsumerSettings, NatsSettings, StreamSettings
from postroom.delivery.streams import default_streams
from postroom.delivery.subjects import stream_name
from postroom.errors import InvalidMessage

PREFIX: Final = "POSTROOM_CONSUMER_"
NATS_URL: Final = "POSTROOM_NATS_URL"
DATABASE_URL: Final = "POSTROOM_DATABASE_URL"


class ConsumerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The config of one consumer process; any number of them with the same `consumer.durable` share its work."""

    context: Annotated[
        str,
        Meta(
            pattern="^[a-z][a-z0-9_]{0,63}$", description="the mesh that consumes, and that the dead letters belong to"
        ),
    ]
    database_url: Annotated[str, SECRET, Meta(description="Postgres with the inbox, postgresql://…")]
    connections: Annotated[int, Meta(ge=1, le=100, description="Postgres connections")] = 3
    listen_host: Annotated[str, Meta(description="address of the page with health and metrics")] = "127.0.0.1"
    listen_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="port of the page with health and metrics; 0: a free one; unset: no page"),
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest level that is logged")
    ] = "info"
    nats: NatsSettings
    consumer: ConsumerSettings
    handler: HandlerSettings
    inbox: InboxSettings = msgspec.field(default_factory=InboxSettings)
    streams: Annotated[
        list[StreamSettings], Meta(description="streams that this process declares at its start, as `[[streams]]`")
    ] = msgspec.field(default_factory=list)

    @property
    def stream(self) -> StreamSettings | None:
        """How the consumer's stream is declared: here, or as the context's default where it has that name."""
        known = [*self.streams, *default_streams(self.context)]
        return next((stream for stream in known if stream.name == self.consumer.stream), None)


def load_config(file: Path | None, environ: Mapping[str, str] = os.environ) -> ConsumerConfig:
    """Read and check the config; raises `Fatal` (78) with the path of what is wrong."""
    config = load(ConsumerConfig, file, prefix=PREFIX, environ=environ)
    check_timeout(config.handler, config.consumer)
    check_inbox(config.inbox)
    return config


def direct_config(
    *,
    context: str,
    name: str,
    handler: str,
    stream: str | None = None,
    subjects: Sequence[str] = (),
    secret_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ConsumerConfig:
    """Make the config of the consumer `name` of a context's events, with the servers that the environment names.

    Raises `Fatal` (78) with what is missing or wrong.
    """
    for variable in (NATS_URL, DATABASE_URL):
        if not environ.get(variable):
            raise Fatal(Exit.CONFIG, f"{variable} is not set: source the `env` file of `postroom up`, or use --config")
    try:
        stream = stream or stream_name(context, "events")
    except InvalidMessage as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    given = {
        "CONTEXT": context,
        "DATABASE_URL": environ[DATABASE_URL],
        "NATS_URL": environ[NATS_URL],
        "CONSUMER_STREAM": stream,
        "CONSUMER_DURABLE": name,
        "CONSUMER_FILTER_SUBJECTS": ",".join(subjects),
        "HANDLER_URL": handler,
    }
    if secret_file is not None:
        given["HANDLER_SECRET_FILE"] = str(secret_file)
    variables = {PREFIX + key: value for key, value in given.items()}
    return load_config(None, {**environ, **variables})
