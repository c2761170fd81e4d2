"""What systemd itself says about the units as `install-service` wrote them."""

import pytest
from support.container import Machine

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

SERVICES = (
    "postroomd@orders.service",
    "postroom-broker.service",
    "postroom-console.service",
    "postroom-worker.service",
    "postroom-consumer@billing.service",
    "postroom-agent@counter.service",
)
PIPELINE = "postroom-pipeline@audit-log"
SYSTEM_UNITS = (*SERVICES, "postroomd@orders.socket", f"{PIPELINE}.service", f"{PIPELINE}.timer")


def test_systemd_understands_every_line(machine: Machine) -> None:
    assert machine.attempt("systemd-analyze", "verify", *SYSTEM_UNITS).stderr == ""


@pytest.mark.parametrize("unit", [*SERVICES, f"{PIPELINE}.service"])
def test_the_exposure_of_each_service_is_at_most_1_3(machine: Machine, unit: str) -> None:
    machine.run("systemd-analyze", "security", "--no-pager", "--threshold=13", unit)


@pytest.mark.parametrize("unit", SERVICES)
def test_a_service_is_started_again_for_ever_but_for_a_wrong_config(machine: Machine, unit: str) -> None:
    shown = machine.run("systemctl", "show", unit).splitlines()
    assert {"Restart=always", "RestartPreventExitStatus=78 243", "StartLimitIntervalUSec=0"} <= set(shown)


def test_a_timer_starts_its_pipeline_with_its_options_and_its_failure_is_seen(machine: Machine) -> None:
    settings = "OPTIONS=output=/var/lib/postroom-pipeline/audit-log mesh=nowhere\n"
    machine.write("/etc/postroom/pipeline/audit-log.env", settings, mode=0o600)
    machine.run("systemctl", "start", f"{PIPELINE}.timer")
    timer = machine.run("systemctl", "show", f"{PIPELINE}.timer").splitlines()
    assert {"ActiveState=active", "Persistent=yes", f"Unit={PIPELINE}.service"} <= set(timer)
    assert any(line.startswith("TimersCalendar={ OnCalendar=*-*-* 04:00:00 UTC ;") for line in timer)

    assert machine.attempt("systemctl", "start", f"{PIPELINE}.service").returncode != 0
    log = machine.run("journalctl", "--no-pager", "--output=cat", "--unit", f"{PIPELINE}.service")
    assert "pipelines need Spark, which is not installed" in log  # nor is it on this machine
    assert f"{PIPELINE}.service" in machine.run("systemctl", "list-units", "--failed", "--plain", "--no-legend")
    machine.run("systemctl", "stop", f"{PIPELINE}.timer")
    machine.run("systemctl", "reset-failed", f"{PIPELINE}.service")


def test_the_group_and_the_directories_are_there(machine: Machine) -> None:
    machine.run("getent", "group", "postroom")
    assert machine.path("/etc/postroom/mesh").stat().st_mode & 0o777 == 0o755
    assert machine.path("/run/postroom").stat().st_mode & 0o777 == 0o755


def test_a_plain_user_is_told_who_may_install_system_units(machine: Machine) -> None:
    uid = int(machine.run("id", "--user", "eve"))
    refused = machine.attempt("/opt/postroom/bin/postroom", "install-service", "--system", user=uid)
    assert refused.returncode == 77
    assert "only root installs system units: run it as root, or use --user" in refused.stderr
