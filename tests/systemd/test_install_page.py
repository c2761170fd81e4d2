"""docs/install.md is true: what it tells root to type is typed, in its order, on a machine without Postroom."""

from pathlib import Path

import pytest
from support.container import booted, host_settings
from support.services import start_nats, start_postgres, start_redis

pytestmark = pytest.mark.systemd

TREE = Path(__file__).parents[2]
JOURNAL = "trap 'test $? = 0 || journalctl --no-pager --output=cat --lines=60 >&2' EXIT"  # what a failed start said
EDITOR = """
editor() {
    case $1 in
        */broker.toml) sed -i \\
            -e 's#^database_url.*#database_url = "postgresql://postgres@/postgres?host=/run/postgresql"#' \\
            -e 's#^redis_url.*#redis_url = "unix:///run/redis/redis.sock"#' "$1" ;;
        */worker.toml | */billing.toml) sed -i \\
            -e 's#^database_url.*#database_url = "postgresql://postgres@/postgres?host=/run/postgresql"#' \\
            -e 's#^url = "nats:.*#url = "nats://127.0.0.1:4222"#' "$1" ;;
        */counter.toml) sed -i 's#^url = "nats:.*#url = "nats://127.0.0.1:4222"#' "$1" ;;
        */audit-log.env) sed -i 's#^POSTROOM_DATABASE_URL.*#POSTROOM_DATABASE_URL=postgresql:///postgres#' "$1" ;;
        */orders.toml) sed -i 's#https://broker.example.com#http://127.0.0.1:7420#' "$1" ;;
    esac
}
"""


def test_every_command_for_root_works_in_the_order_it_stands(installed_root: Path, tmp_path: Path) -> None:
    page = (TREE / "docs/install.md").read_text()
    commands = [line.removeprefix("# ") for line in _console(page) if line.startswith("# ")]
    script = "\n".join(["set -ex", JOURNAL, "cd /src", EDITOR, *commands])
    console = tmp_path / "console.log"
    alone = ["--private-network"]  # with the port of the page to itself
    with booted(installed_root, host_settings(), {TREE: "/src"}, console, alone) as machine:
        start_postgres(machine)
        start_redis(machine)
        start_nats(machine)
        machine.run("useradd", "--create-home", "shop")
        machine.run("/bin/sh", "-c", script, environment={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin", "HOME": "/root"})
        assert machine.attempt("systemctl", "list-unit-files", "--no-legend", "postroom*").stdout == ""


def _console(page: str) -> list[str]:
    blocks = page.split("```console\n")[1:]
    return [line for block in blocks for line in block.split("```")[0].splitlines()]
