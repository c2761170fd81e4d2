"""The daemon's config: one TOML file, overridden by `POSTROOM_DAEMON_…` (docs/contract/operate.md#operate-19).

Paths default to the XDG directories of the user; `/run/postroom` and `/var/lib/postroom` for root.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta, field

from broker_client import BrokerClientSettings, RelaySettings
from inbox import InboxSettings
from ipc.shares import Limits
from outbox import OutboxSettings
from postroom._wire.message import DestinationKind, is_destination
from postroom._wire.names import MESH
from postroom.chassis.config import Host, LogLevel, load, state_home
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.settings import NatsSettings

PREFIX: Final = "POSTROOM_DAEMON_"

Uid = Annotated[int, Meta(ge=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]


class SocketSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The Unix socket, unless systemd passes one in, and who may use it."""

    path: Annotated[
        Path | None, Meta(description="Path of the socket; unset: `$XDG_RUNTIME_DIR/postroom/<mesh>.sock`.")
    ] = None
    group: Annotated[
        str | None, Meta(description="Group that may connect (mode 0660); unset: only the daemon's user (mode 0600).")
    ] = None
    allow_uids: Annotated[
        list[Uid], Meta(description="Users that may call; empty: everyone that the socket's mode allows.")
    ] = []
    operators: Annotated[
        list[Uid], Meta(description="Users that may see and repair every row; empty: root and the daemon's user.")
    ] = []


class TcpSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The loopback TCP port, off unless a port is set."""

    port: Annotated[Port | None, Meta(description="Port on 127.0.0.1; unset: no TCP.")] = None
    token_file: Annotated[
        Path | None,
        Meta(description="File with the local token (mode 0600); `postroom daemon rotate-token` writes it."),
    ] = None


class MetricsSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """A port with `GET /metrics` for Prometheus, without a token, and nothing else; the socket has the same."""

    listen_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None,
        Meta(description="Port of `/metrics`; 0: a free one; unset: none. Each daemon of a host needs one of its own."),
    ] = None
    listen_host: Annotated[
        Host, Meta(description="Address of that port; every client that reaches it can read the metrics.")
    ] = "127.0.0.1"


class DaemonConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The whole configuration of the daemon of one mesh."""

    mesh: Annotated[str, Meta(pattern=MESH.schema, description="The mesh that this daemon sends into.")]
    broker: BrokerClientSettings
    state_directory: Annotated[
        Path | None,
        Meta(description="Directory of `outbox.db` and `inbox.db`; unset: `$XDG_STATE_HOME/postroom/<mesh>`."),
    ] = None
    allow_destinations: Annotated[
        list[str],
        Meta(description="Destinations that callers may use, as shell patterns (`topic:orders*`); empty: all."),
    ] = []
    log_level: LogLevel = "info"
    stop_seconds: Annotated[
        float, Meta(gt=0, le=600, description="Longest wait for running requests at a stop, in seconds.")
    ] = 10
    socket: SocketSettings = field(default_factory=SocketSettings)
    tcp: TcpSettings = field(default_factory=TcpSettings)
    metrics: MetricsSettings = field(default_factory=MetricsSettings)
    limits: Limits = field(default_factory=Limits)
    outbox: OutboxSettings = field(default_factory=OutboxSettings)
    inbox: InboxSettings = field(default_factory=InboxSettings)
    nats: NatsSettings | None = None  # where the inbox comes from; without it there is no inbox
    relay: RelaySettings = field(default_factory=RelaySettings)


def load_config(file: Path | None, environ: Mapping[str, str] = os.environ) -> DaemonConfig:
    """Read the config; raises `Fatal` (78) with the path of what is wrong."""
    config = load(DaemonConfig, file, prefix=PREFIX, environ=environ)
    if (held := config.limits.buffered_bytes) < (most := config.limits.request_bytes):
        sentence = (
            f"limits.buffered_bytes is {held}, less than limits.request_bytes ({most}), so the largest requests would "
            "never be accepted: raise it, or lower limits.request_bytes"
        )
        raise Fatal(Exit.CONFIG, f"{file or 'environment'}: {sentence}")
    for pattern in config.allow_destinations:
        begin = re.split(r"[*?[]", pattern, maxsplit=1)[0]  # how every destination that it matches begins
        longer = [f"{begin}a", *(f"{kind}:a" for kind in get_args(DestinationKind) if f"{kind}:".startswith(begin))]
        if not any(map(is_destination, [begin] if begin == pattern else [begin, *longer])):
            sentence = (
                f"allow_destinations has {pattern!r}, which no destination matches: write it as in `topic:orders*`, "
                "in lower case"
            )
            raise Fatal(Exit.CONFIG, f"{file or 'environment'}: {sentence}")
    return config


def socket_path(config: DaemonConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the socket; raises `Fatal` (78) where neither the config nor the environment gives one."""
    if config.socket.path is not None:
        return config.socket.path
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        directory = Path(runtime) / "postroom"
    elif os.getuid() == 0:
        directory = Path("/run/postroom")
    else:
        raise Fatal(Exit.CONFIG, "XDG_RUNTIME_DIR is not set: set socket.path (POSTROOM_DAEMON_SOCKET_PATH)")
    return directory / f"{config.mesh}.sock"


def state_directory(config: DaemonConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the outbox's directory; raises `Fatal` (78) where neither the config nor the environment gives one."""
    if config.state_directory is not None:
        return config.state_directory
    advice = "set state_directory (POSTROOM_DAEMON_STATE_DIRECTORY)"
    return state_home(environ, advice) / "postroom" / config.mesh


def token_file(config: DaemonConfig, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the TCP port's local token; raises `Fatal` (78) like `state_directory`."""
    return config.tcp.token_file or state_directory(config, environ) / "local.token"
