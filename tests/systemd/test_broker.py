"""postroom-broker under a real systemd."""

import json
from collections.abc import Iterator

import pytest
from support.container import Machine
from support.services import Daemon, Service
from support.waiting import wait_until

from postroom import AsyncClient

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

TO = "queue:work"
CONFIG = "/etc/postroom/broker.toml"


@pytest.fixture
def service(machine: Machine, orders: Daemon) -> Iterator[Service]:
    """The broker that `orders` sends to; started afresh where a test left it broken."""
    assert orders.show("ActiveState") == "active"
    service = Service(machine, "postroom-broker.service")
    machine.run("systemctl", "restart", service.unit)
    yield service
    machine.run("systemctl", "restart", service.unit)


async def test_a_killed_broker_comes_back_and_nothing_waits_for_ever(service: Service, client: AsyncClient) -> None:
    before = service.pid
    service.signal("KILL")
    sent = await client.send(TO, "a letter")
    assert (await client.wait(sent.client_message_id, 60)).status == "done"
    assert service.pid not in {"0", before}


def test_a_broker_that_stands_still_is_ended_by_the_watchdog_and_started_again(service: Service) -> None:
    with service.setting("WatchdogSec=2s"):
        service.signal("STOP")
        wait_until(
            lambda: service.show("NRestarts") == "1" and service.show("ActiveState") == "active", "a broker that runs"
        )


def test_an_idle_broker_lives_on_under_a_short_watchdog(service: Service) -> None:
    with service.setting("WatchdogSec=1s"):
        first = int(service.show("WatchdogTimestampMonotonic"))
        wait_until(
            lambda: int(service.show("WatchdogTimestampMonotonic")) > first + 3_000_000, "three seconds of answers"
        )
        assert service.show("NRestarts") == "0"


def test_it_stops_in_time(service: Service) -> None:
    service.machine.run("systemctl", "stop", service.unit)
    assert (service.show("Result"), service.show("ExecMainStatus")) == ("success", "0")


def test_a_wrong_config_is_not_tried_again(service: Service) -> None:
    config = service.machine.path(CONFIG)
    right = config.read_text()
    config.write_text(f"{right}misspelt = 1\n")
    failed = service.machine.attempt("systemctl", "restart", service.unit)
    config.write_text(right)
    assert failed.returncode != 0
    assert (service.show("ExecMainStatus"), service.show("NRestarts")) == ("78", "0")
    assert service.show("ActiveState") == "failed"


async def test_its_journal_holds_json_lines_without_a_secret(service: Service, client: AsyncClient) -> None:
    before = len(service.journal())
    service.machine.run("systemctl", "restart", service.unit)
    sent = await client.send(TO, "a body that nobody logs")
    await client.wait(sent.client_message_id, 60)
    service.machine.run("systemctl", "stop", service.unit)
    events = [json.loads(line) for line in service.journal()[before:]]
    admin_token = service.machine.path("/etc/postroom/broker-admin.token").read_text()
    assert "listening" in {event["event"] for event in events}
    assert not [event for event in events if admin_token in str(event) or "nobody logs" in str(event)]


def test_it_runs_as_a_user_of_the_moment_and_its_config_is_roots_alone(service: Service) -> None:
    config = service.machine.path(CONFIG).stat()
    assert service.show("UID") != "0"
    assert (config.st_uid, config.st_mode & 0o777) == (0, 0o600)
