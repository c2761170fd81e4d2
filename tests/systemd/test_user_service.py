"""postroomd@<mesh> under the service manager of one user."""

from collections.abc import Iterator
from functools import partial

import pytest
from support.container import Machine
from support.services import Daemon
from support.waiting import wait_until

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

PROGRAM = "/opt/postroom/bin/postroom"


class Ada:
    """A user of the machine who runs commands in her own session."""

    def __init__(self, machine: Machine) -> None:
        self.uid = int(machine.run("id", "--user", "ada"))
        self.home = "/home/ada"
        self.runtime = f"/run/user/{self.uid}"
        environment = {"HOME": self.home, "USER": "ada", "XDG_RUNTIME_DIR": self.runtime}
        self.run = partial(machine.run, user=self.uid, environment=environment)
        self.attempt = partial(machine.attempt, user=self.uid, environment=environment)


@pytest.fixture(scope="module")
def ada(machine: Machine) -> Iterator[Ada]:
    machine.run("systemctl", "start", "systemd-logind")
    machine.run("loginctl", "enable-linger", "ada")
    ada = Ada(machine)
    machine.run("systemctl", "start", f"user@{ada.uid}")
    ada.run(PROGRAM, "install-service", "--user")
    yield ada
    machine.run("loginctl", "disable-linger", "ada")


@pytest.fixture
def mesh(ada: Ada, orders: Daemon) -> Iterator[str]:
    """The config of the mesh's daemon, moved from the machine's to the user's; the daemon of the machine is stopped."""
    orders.stop()
    mine = f"{ada.home}/.config/postroom/mesh"
    ada.run("mkdir", "--parents", mine)
    for kind in ("toml", "token"):
        text = orders.machine.path(f"/etc/postroom/mesh/{orders.mesh}.{kind}").read_text()
        file = orders.machine.path(f"{mine}/{orders.mesh}.{kind}")
        file.write_text(text.replace("/etc/postroom/mesh", mine))
        file.chmod(0o600)
        orders.machine.run("chown", "ada:", f"{mine}/{orders.mesh}.{kind}")
    ada.run("systemctl", "--user", "enable", "--now", f"postroomd@{orders.mesh}")
    yield orders.mesh
    ada.run("systemctl", "--user", "disable", "--now", f"postroomd@{orders.mesh}")


def _send(ada: Ada, mesh: str) -> None:
    ada.run(PROGRAM, "send", "--socket", f"{ada.runtime}/postroom/{mesh}.sock", "--wait", "queue:work", "a letter")


def test_a_user_sends_through_a_daemon_of_her_own(ada: Ada, mesh: str, machine: Machine) -> None:
    _send(ada, mesh)
    socket = machine.path(f"{ada.runtime}/postroom/{mesh}.sock").stat()
    assert (socket.st_mode & 0o777, socket.st_uid) == (0o600, ada.uid)


def test_her_daemon_comes_back_when_it_is_killed(ada: Ada, mesh: str) -> None:
    ada.run("systemctl", "--user", "kill", "--signal=KILL", f"postroomd@{mesh}")
    _send(ada, mesh)


def test_her_daemon_with_a_wrong_config_is_not_tried_again(ada: Ada, mesh: str, machine: Machine) -> None:
    config = machine.path(f"{ada.home}/.config/postroom/mesh/{mesh}.toml")
    right = config.read_text()
    config.write_text("nonsense")
    assert ada.attempt("systemctl", "--user", "restart", f"postroomd@{mesh}").returncode != 0
    state = ["systemctl", "--user", "is-active", f"postroomd@{mesh}.service", f"postroomd@{mesh}.socket"]
    wait_until(lambda: ada.attempt(*state).stdout.split() == ["failed", "inactive"], "a failed daemon without a socket")
    config.write_text(right)


def test_systemd_understands_every_line_of_the_users_units(ada: Ada) -> None:
    units = (f"{ada.home}/.config/systemd/user/postroomd@.{kind}" for kind in ("service", "socket"))
    assert ada.attempt("systemd-analyze", "--user", "verify", *units).stderr == ""
