"""The console's config: one TOML file; `POSTROOM_CONSOLE_<KEY>` overrides a key.

The rule is docs/contract/operate.md#operate-19.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from postroom._wire.http import is_loopback
from postroom._wire.names import URL
from postroom.chassis.config import Host, LogLevel, load
from postroom.chassis.exits import Exit, Fatal

PREFIX: Final = "POSTROOM_CONSOLE_"
_ORIGIN: Final = r"^https?://[^/?#@\s]+$(?!\n)"
_SHARED: Final = {"POSTROOM_BROKER_URL": "BROKER_URL"}  # as `postroom up` writes it


class ConsoleConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The config of one console; any number of them may show one broker."""

    broker_url: Annotated[str, Meta(pattern=URL.schema, description="the broker, http://… or https://…")]
    broker_ca_file: Annotated[
        Path | None, Meta(description="PEM file of the authorities that may sign the broker's certificate")
    ] = None
    listen_host: Annotated[Host, Meta(description="address to listen on; another than loopback needs `public_url`")] = (
        "127.0.0.1"
    )
    listen_port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0: a free one")] = 7480
    public_url: Annotated[
        Annotated[str, Meta(pattern=_ORIGIN)] | None,
        Meta(description="address for browsers where a proxy is in front, as https://console.example.com"),
    ] = None
    session_minutes: Annotated[float, Meta(gt=0, description="how long a log-in lasts, in minutes")] = 480.0
    idle_minutes: Annotated[float, Meta(gt=0, description="how long a log-in lasts unused, in minutes")] = 60.0
    log_level: LogLevel = "info"


def load_config(file: Path | None, environ: Mapping[str, str] = os.environ) -> ConsoleConfig:
    """Read and check the config; raises `Fatal` (78) with the path of what is wrong."""
    config = load(ConsoleConfig, file, prefix=PREFIX, environ=environ, shared=_SHARED)
    if not is_loopback(config.listen_host) and not (config.public_url or "").startswith("https://"):
        raise Fatal(
            Exit.CONFIG,
            f"listen_host ({config.listen_host}) is not a loopback address, and operators paste their tokens: "
            "put a proxy with TLS in front of the console, and set public_url to its https:// address",
        )
    return config
