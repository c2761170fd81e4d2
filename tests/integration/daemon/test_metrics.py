"""The daemon's metrics, scraped from a running process (docs/contract/operate.md#operate-31)."""

from __future__ import annotations

import ast
import http.client
import json
import socket
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from support.waiting import wait_until

NEEDED = {
    "postroom_daemon_sends",
    "postroom_daemon_accept_seconds",
    "postroom_daemon_outbox_commits",
    "postroom_daemon_outbox_committed_operations",
    "postroom_daemon_outbox_rows",
    "postroom_daemon_outbox_oldest_pending_seconds",
    "postroom_daemon_outbox_due_seconds",
    "postroom_daemon_outbox_max_bytes",
    "postroom_daemon_disk_free_bytes",
    "postroom_daemon_relay_degraded",
    "postroom_daemon_relay_attempts",
    "postroom_daemon_relay_posts",
    "process_resident_memory_bytes",
}


def test_the_metrics_count_what_happened(daemon: Any) -> None:
    daemon.start().ready()
    daemon.send("a")
    daemon.send("a", body="other")
    families = {
        family.name: family for family in text_string_to_metric_families(daemon.ask("GET", "/v1/metrics")[1].decode())
    }
    assert families.keys() >= NEEDED
    sends = {sample.labels["outcome"]: sample.value for sample in families["postroom_daemon_sends"].samples}
    assert sends == {"queued": 1.0, "idempotency_key_reused": 1.0}
    assert sum(sample.value for sample in families["postroom_daemon_outbox_rows"].samples) == 1.0
    (counted,) = [s for s in families["postroom_daemon_accept_seconds"].samples if s.name.endswith("_count")]
    assert counted.value == 1.0


def test_the_metrics_say_what_an_operator_has_held_up_and_what_is_due(daemon: Any) -> None:
    def value(name: str) -> float:
        families = text_string_to_metric_families(daemon.ask("GET", "/v1/metrics")[1].decode())
        (found,) = [one.value for family in families for one in family.samples if one.name == f"postroom_daemon_{name}"]
        return found

    daemon.start().ready()
    assert value("relay_paused") == 0.0
    assert daemon.send("later", not_before="2100-01-01T00:00:00Z") == 202
    assert value("outbox_due_seconds") == 0.0
    assert daemon.send("now") == 202
    wait_until(lambda: value("outbox_due_seconds") > 0.0)  # it counts in milliseconds
    assert daemon.ask("POST", "/v1/relay/pause", {"destination": "topic:orders", "reason": "a test"})[0] == 200
    assert value("relay_paused") == 1.0


def scrape(address: tuple[str, int], method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """Ask the port for Prometheus, without a token."""
    connection = http.client.HTTPConnection(*address, timeout=30)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)  # as plain as a send can be
        if body is not None:
            connection.putheader("Content-Type", "application/json")
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(None if body is None else body.encode())
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_port_has_the_metrics_without_a_token_and_nothing_else(daemon: Any) -> None:
    daemon.lines["metrics"] = ["listen_port = 0"]
    daemon.start().ready()
    (line,) = [json.loads(each) for each in daemon.log.read_text().splitlines() if "listening_for_scrapes" in each]
    address = ast.literal_eval(line["address"])
    assert address[0] == "127.0.0.1"
    status, said = scrape(address, "GET", "/metrics")
    families = {family.name for family in text_string_to_metric_families(said.decode())}
    assert (status, families >= NEEDED) == (200, True)
    assert scrape(address, "HEAD", "/metrics") == (200, b"")
    message = '{"to": "topic:orders"}'
    for method, path, body, refused in (
        ("POST", "/metrics", None, 405),
        ("POST", "/v1/send", message, 404),
        ("GET", "/v1/outbox", None, 404),
        ("GET", "/v1/metrics", None, 404),
        ("GET", "/v1/health", None, 404),
    ):
        assert scrape(address, method, path, body)[0] == refused, path
    assert b'postroom_daemon_outbox_rows{status="pending"} 0.0' in scrape(address, "GET", "/metrics")[1]


def test_a_taken_port_of_the_metrics_ends_the_start(daemon: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon.lines["metrics"] = [f"listen_port = {port}"]
        daemon.start()
        assert daemon.process.wait(30) == 69
    assert f"cannot listen on 127.0.0.1:{port}" in daemon.log.read_text()


def test_there_is_no_such_port_unless_it_is_set(daemon: Any) -> None:
    daemon.start().ready()
    assert "listening_for_scrapes" not in daemon.log.read_text()
