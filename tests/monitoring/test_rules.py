"""Prometheus' own checker reads the files, and each rule fires by its figures, by the clock of the rules."""

from __future__ import annotations

import json
import runpy
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.monitoring

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "monitoring" / "generate.py"))
ALERTS = {row["alert"]: row for row in GENERATOR["table"]("Alerts")}
MINUTES = 45  # longer than any rule waits
DURABLE = '{job="postroom-worker", instance="w", stream="DEMO_EVENTS", consumer="billing"}'
SOURCE = '{job="postroom-worker", instance="w", source="events"}'
# Series of a value a minute, in promtool's notation: `7x60` stays, `0+60x60` rises, `1-1x60` falls.
FIRING = {
    "ProgramDown": {'up{job="postroom-broker", instance="b"}': "0x60"},
    "BrokerUnreachable": {"postroom_daemon_relay_degraded": "1x60"},
    "OutboxLate": {"postroom_daemon_outbox_due_seconds": "0+60x60"},
    "RelayPaused": {"postroom_daemon_relay_paused": "1x60"},
    "OutboxFilling": {"postroom_daemon_outbox_waiting_bytes": "81x60", "postroom_daemon_outbox_max_bytes": "100x60"},
    "OutboxFull": {"postroom_daemon_outbox_waiting_bytes": "95x60", "postroom_daemon_outbox_max_bytes": "100x60"},
    "DiskLow": {"postroom_daemon_disk_free_bytes": "1000000000x60"},
    "OutboxLogGrows": {"postroom_daemon_outbox_wal_bytes": "70000000x60"},
    "DeadRows": {'postroom_daemon_outbox_rows{status="dead"}': "1x60"},
    "MessagesMissing": {"postroom_daemon_outbox_missing": "3x60"},
    "ClockWrong": {"postroom_daemon_clock_ahead_seconds": "-61x60"},
    "InboxStopped": {"postroom_daemon_inbox_receiving": "0x60"},
    "PostgresUnreachable": {"postroom_broker_postgres_reachable": "0x60"},
    "RedisUnreachable": {"postroom_broker_limiter_degraded": "1x60"},
    "PublishingBlocked": {f"postroom_worker_publishing{SOURCE}": "0x60"},
    "UnpublishedLate": {f"postroom_worker_backlog_age_seconds{SOURCE}": "0+60x60"},
    "UnpublishedFail": {f"postroom_worker_backlog_failing_messages{SOURCE}": "1x60"},
    "StreamLost": {f"postroom_worker_requeued_total{SOURCE}": "0x30 5x30"},
    "Orphans": {"postroom_worker_orphans": "2x60"},
    "OrphanCheckMissed": {"postroom_worker_orphan_check_timestamp_seconds": "-93600x60"},
    "ConsumerStopped": {
        f"postroom_worker_durable_waiting_messages{DURABLE}": "1x60",
        f"postroom_worker_durable_asking{DURABLE}": "0x60",
        f"postroom_worker_durable_seen_timestamp_seconds{DURABLE}": "-60x60",
    },
    "ConsumerBehind": {f"postroom_worker_durable_waiting_messages{DURABLE}": "1001x60"},
    "ConsumerPaused": {
        f"postroom_worker_durable_waiting_messages{DURABLE}": "1x60",
        f"postroom_worker_durable_paused{DURABLE}": "1x60",
    },
    "HandlerUnreachable": {"postroom_worker_webhooks_unreachable": "1x60"},
    "AttemptsWait": {"postroom_consumer_backlog_oldest_seconds": "0+60x60"},
    "DeadLetters": {'postroom_agent_deliveries_total{what="dead_lettered"}': "0x30 1x30"},
    "JobsFailed": {'postroom_worker_job_messages_total{flow="f", outcome="failed"}': "0x30 1x30"},
}
QUIET = {
    'up{job="postroom-broker", instance="b"}': "1x60",
    'up{job="another", instance="a"}': "0x60",
    "postroom_daemon_relay_degraded": "0x10 1 0x50",
    "postroom_daemon_outbox_due_seconds": "299x60",
    "postroom_daemon_relay_paused": "1x28 0x30",
    "postroom_daemon_outbox_waiting_bytes": "79x60",
    "postroom_daemon_outbox_max_bytes": "100x60",
    "postroom_daemon_disk_free_bytes": "1073741824x60",
    "postroom_daemon_outbox_wal_bytes": "67108864x60",
    'postroom_daemon_outbox_rows{status="dead"}': "0x60",
    'postroom_daemon_outbox_rows{status="pending"}': "9x60",
    "postroom_daemon_outbox_missing": "0x60",
    "postroom_daemon_clock_ahead_seconds": "-60x60",
    "postroom_daemon_inbox_receiving": "1x10 0 1x50",
    "postroom_broker_postgres_reachable": "1x60",
    "postroom_broker_limiter_degraded": "0x60",
    f"postroom_worker_publishing{SOURCE}": "1x10 0 1x50",
    f"postroom_worker_backlog_age_seconds{SOURCE}": "299x60",
    f"postroom_worker_backlog_failing_messages{SOURCE}": "1x10 0x50",
    f"postroom_worker_requeued_total{SOURCE}": "7x60",
    "postroom_worker_orphans": "0x60",
    "postroom_worker_orphan_check_timestamp_seconds": "0x60",
    f"postroom_worker_durable_waiting_messages{DURABLE}": "1000x60",
    f"postroom_worker_durable_asking{DURABLE}": "0x60",  # it has all that it may have in hand
    f"postroom_worker_durable_seen_timestamp_seconds{DURABLE}": "0+60x60",
    f"postroom_worker_durable_paused{DURABLE}": "0x60",
    "postroom_consumer_handler_reachable": "1x60",
    "postroom_worker_webhooks_unreachable": "1x4 0x56",
    "postroom_consumer_backlog_oldest_seconds": "899x60",
    'postroom_consumer_deliveries_total{outcome="dead_lettered"}': "4x60",
    'postroom_consumer_deliveries_total{outcome="done"}': "0+9x60",
    'postroom_worker_job_messages_total{flow="f", outcome="failed"}': "2x60",
}


def firing(series: dict[str, str], place: Path) -> set[str]:
    """Return the alerts that fire in any of the minutes, as promtool finds them."""
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count by (alertname) (count_over_time(ALERTS{{alertstate="firing"}}[{MINUTES}m]))',
                "eval_time": f"{MINUTES}m",
                "exp_samples": [{"labels": '{alertname="none"}', "value": 0}],  # promtool tells what there is instead
            }
        ],
    }
    rules = str(ROOT / "monitoring" / "postroom.rules.yaml")
    (place / "case.yaml").write_text(json.dumps({"rule_files": [rules], "evaluation_interval": "1m", "tests": [case]}))
    ran = subprocess.run(
        ["promtool", "test", "rules", place / "case.yaml"], capture_output=True, text=True, check=False
    )
    _, got, said = f"{ran.stdout}{ran.stderr}".partition("got:")
    assert got, f"{ran.stdout}{ran.stderr}"
    return {part.partition(chr(34))[0] for part in said.split(f"alertname={chr(34)}")[1:]}


def test_the_commands_of_the_page_find_nothing_wrong() -> None:
    page = (ROOT / "docs" / "monitoring.md").read_text()
    commands = [line.removeprefix("$ ") for line in page.splitlines() if line.startswith("$ ")]
    assert len(commands) == 2
    for command in commands:
        subprocess.run(command.split(), cwd=ROOT, check=True)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_fires_by_its_figures(alert: str, tmp_path: Path) -> None:
    assert alert in firing(FIRING[alert.removeprefix("Postroom")], tmp_path)


def test_no_alert_fires_just_below_its_figures(tmp_path: Path) -> None:
    assert firing(QUIET, tmp_path) == set()
