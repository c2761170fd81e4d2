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
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from support.container import Machine, Settings, booted, host_settings, run
from support.debian import BOOTABLE, MachineMissing, cached, debian_root, digest
from support.services import Daemon, start_postgres, start_redis

from postroom import AsyncClient, BrokerClient

TREE = Path(__file__).parents[2]
PIP = "/opt/postroom/bin/pip"


class Broker(NamedTuple):
    """Where the broker is, and what opens every door of it."""

    url: str
    admin_token: str


@pytest.fixture(scope="session")
def installed_root() -> Path:
    """A Debian with what Postroom needs in /opt/postroom, and the servers in /opt/servers."""
    subprocess.run(["make", "wheels"], cwd=TREE, check=True, capture_output=True)
    return _installed_root(host_settings())


@pytest.fixture(scope="session")
def machine(installed_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    log = tmp_path_factory.mktemp("machine") / "console.log"
    with booted(installed_root, host_settings(), {TREE: "/src"}, log) as machine:
        machine.run("/bin/sh", "-c", f"{PIP} install --no-index --no-deps /src/dist/*.whl")
        for user in ("ada", "eve"):
            machine.run("useradd", "--create-home", user)
        machine.run("/opt/postroom/bin/postroom", "install-service", "--system")
        machine.run("usermod", "--append", "--groups=postroom", "ada")
        yield machine


@pytest.fixture(scope="session")
def broker(machine: Machine) -> Broker:
    start_postgres(machine)
    start_redis(machine)
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
    try:
        base = debian_root("bookworm", BOOTABLE)
    except MachineMissing as missing:
        pytest.fail(str(missing), pytrace=False)

    def install(root: Path) -> None:
        subprocess.run(["cp", "--archive", "--reflink=auto", base, root], check=True)
        script = f"""
            python3 -m venv /opt/postroom
            {PIP} install --quiet --require-hashes -r /src/requirements.lock
            python3 -m venv /opt/servers
            /opt/servers/bin/pip install --quiet --require-hashes -r /src/dev.lock
            """
        assert run(root, ["/bin/sh", "-ec", script], settings, [f"--bind-ro={TREE}:/src"]) == 0, "see above"

    locks = [(TREE / name).read_bytes() for name in ("requirements.lock", "dev.lock")]
    return cached(f"{base.name}-installed-{digest(*locks)}", install)


def _free_port() -> int:
    """Find a port below those that the kernel hands out, so that it is still free when the broker is restarted."""
    for port in range(20_000 + secrets.randbelow(10_000), 32_000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    pytest.fail("no port is free between 20000 and 32000")
