"""docs/install.md is true: what it tells root to type is typed, in its order, on a machine without Postroom."""

from pathlib import Path

import pytest
from support.container import booted, host_settings
from support.guide import EDITOR, commands
from support.services import start_nats, start_postgres, start_redis

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

TREE = Path(__file__).parents[2]
JOURNAL = "trap 'test $? = 0 || journalctl --no-pager --output=cat --lines=60 >&2' EXIT"  # what a failed start said


def test_every_command_for_root_works_in_the_order_it_stands(installed_root: Path, tmp_path: Path) -> None:
    typed = commands((TREE / "docs/install.md").read_text())
    script = "\n".join(["set -ex", JOURNAL, "cd /src", EDITOR, *typed])
    console = tmp_path / "console.log"
    alone = ["--private-network"]  # with the port of the page to itself
    with booted(installed_root, host_settings(), {TREE: "/src"}, console, alone) as machine:
        start_postgres(machine)
        start_redis(machine)
        start_nats(machine)
        machine.run("useradd", "--create-home", "shop")
        machine.run("/bin/sh", "-c", script, environment={"PATH": "/usr/local/bin:/usr/sbin:/usr/bin", "HOME": "/root"})
        assert machine.attempt("systemctl", "list-unit-files", "--no-legend", "postroom*").stdout == ""
