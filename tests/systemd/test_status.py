"""`postroom status` and `trace` on an installation of units: a broker, and the daemons of two meshes on one machine."""

from __future__ import annotations

import json
import secrets
import shlex
import subprocess
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest
from support.container import Machine
from support.services import Daemon
from support.waiting import wait_until

from postroom import BrokerClient

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

PROGRAM = "/opt/postroom/bin/postroom"


class Installation(NamedTuple):
    """The machine, its two daemons, and how its administrator reaches the broker."""

    machine: Machine
    daemons: tuple[Daemon, Daemon]
    reach: dict[str, str]

    def postroom(self, *words: str, socket: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a verb as root, at the daemon of a socket."""
        environment = self.reach if socket is None else {**self.reach, "POSTROOM_SOCKET": socket}
        return self.machine.attempt(PROGRAM, *words, environment=environment)

    def seen(self) -> list[dict[str, Any]]:
        """What `status` says, line by line."""
        return [json.loads(line) for line in self.postroom("status", "--json").stdout.splitlines()]

    def programs(self) -> dict[str, dict[str, Any]]:
        """The two daemons by their mesh, and the broker, as `status` sees them."""
        ours = [daemon.mesh for daemon in self.daemons]
        found = {one["mesh"]: one for one in self.seen() if one.get("mesh") in ours}
        return found | {one["kind"]: one for one in self.seen() if one.get("kind") == "broker"}


@pytest.fixture
async def installation(machine: Machine, broker: Any, orders: Daemon) -> AsyncIterator[Installation]:
    """With another mesh beside `orders`, and its daemon."""
    mesh = f"mesh_{secrets.token_hex(4)}"
    async with BrokerClient(broker.url, broker.admin_token) as admin:
        await admin.create_mesh(mesh)
        member = await admin.create_member(mesh, "eve")
    other = Daemon(machine, mesh)
    other.configure(broker.url, member.token)
    machine.run("systemctl", "start", other.unit)
    reach = {"POSTROOM_BROKER_URL": broker.url, "POSTROOM_ADMIN_TOKEN_FILE": "/etc/postroom/broker-admin.token"}
    yield Installation(machine, (orders, other), reach)
    other.stop()
    other.forget()


def test_status_shows_every_daemon_of_the_installation_and_names_the_one_that_is_gone(
    installation: Installation,
) -> None:
    here, other = installation.daemons
    wait_until(lambda: installation.programs().keys() == {here.mesh, other.mesh, "broker"}, "all three report")
    assert {one["status"] for one in installation.programs().values()} == {"ok"}
    troubled = [one["thing"] for one in installation.seen() if "level" in one]
    assert [thing for thing in troubled if here.mesh in thing or other.mesh in thing] == []

    other.signal("KILL")
    other.stop()  # and nobody starts it again
    wait_until(lambda: bool(installation.programs()[other.mesh].get("away")), "the daemon that was killed is away")
    (gone,) = [one for one in installation.seen() if "level" in one and other.mesh in one["thing"]]
    assert (gone["level"], gone["what"].partition(" since")[0]) == ("down", "no report")
    log = installation.machine.attempt(*shlex.split(gone["help"], comments=True))
    assert log.returncode == 0
    assert "listening" in log.stdout
    shown = installation.postroom("status")
    assert shown.returncode == 69
    down = [one for one in installation.seen() if one.get("level") == "down"]  # those of other tests too
    troubles = [line for line in shown.stdout.splitlines() if not line.startswith(" ")]  # each with what to do below it
    assert any(f"@{other.mesh}" in line for line in troubles[: len(down)])


def test_a_trace_tells_from_any_daemon_what_became_of_a_message_and_the_command_that_it_names_repairs_it(
    installation: Installation,
) -> None:
    here, other = (f"/run/postroom/{daemon.mesh}.sock" for daemon in installation.daemons)
    mesh = installation.daemons[0].mesh
    name = f"order-{secrets.token_hex(4)}"
    assert installation.postroom("send", "queue:nowhere", "a letter", "--id", name, socket=here).returncode == 0

    def waits(socket: str) -> list[dict[str, Any]]:
        told = installation.postroom("trace", name, "--json", socket=socket)
        return json.loads(told.stdout)["waits"] if told.returncode == 0 else []  # type: ignore[no-any-return]

    wait_until(lambda: any("died on" in wait["why"] for wait in waits(other)), "the row that died is told of elsewhere")
    (wait,) = waits(other)
    for command in wait["help"].split(" && "):
        yes = ["--yes"] if "requeue" in command else []
        done = installation.postroom(*shlex.split(command, comments=True)[1:], *yes, socket=here)
        assert done.returncode == 0, done.stderr

    def accepted() -> list[dict[str, Any]]:
        told = installation.postroom("trace", name, "--json", socket=other)
        return [step for step in json.loads(told.stdout)["steps"] if step["what"] == "accepted"]

    wait_until(lambda: bool(accepted()), "its successor was accepted")
    (step,) = accepted()
    assert (step["ids"]["mesh"], step["ids"]["to"]) == (mesh, "queue:nowhere")
