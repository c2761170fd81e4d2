"""postroomd@<mesh> under a real systemd: started by its socket, killed, stopped, watched, and full of work."""

import asyncio
import json
import secrets
import socket
from itertools import count

import pytest
from support.container import Machine
from support.services import Daemon, stopped
from support.waiting import wait_until

from postroom import AsyncClient, Unavailable, new_id

pytestmark = [pytest.mark.systemd, pytest.mark.timeout(900)]

TO = "queue:work"
PROGRAM = "/opt/postroom/bin/postroom"


async def test_a_send_goes_from_the_socket_to_the_broker(client: AsyncClient) -> None:
    sent = await client.send(TO, "a letter")
    assert (await client.wait(sent.client_message_id, 30)).status == "done"


def test_the_group_may_send_and_nobody_else(machine: Machine, orders: Daemon) -> None:
    ada, eve = (int(machine.run("id", "--user", name)) for name in ("ada", "eve"))
    send = [PROGRAM, "send", "--socket", f"/run/postroom/{orders.mesh}.sock", TO, "a letter"]
    machine.run(*send, user=ada)
    refused = machine.attempt(*send, user=eve)
    assert refused.returncode == 77
    assert "ermission" in refused.stderr


async def test_a_send_starts_a_daemon_that_was_stopped(orders: Daemon, client: AsyncClient) -> None:
    orders.machine.run("systemctl", "stop", orders.unit)
    assert orders.pid == "0"
    await client.send(TO, "a letter")
    assert orders.pid != "0"


async def test_a_send_waits_while_a_killed_daemon_comes_back(orders: Daemon, client: AsyncClient) -> None:
    before = orders.pid
    orders.signal("KILL")
    await client.send(TO, "a letter")
    assert orders.pid not in {"0", before}
    assert orders.show("ActiveState") == "active"


async def test_what_was_acknowledged_before_a_kill_is_there_after_it(orders: Daemon, client: AsyncClient) -> None:
    with stopped(orders.machine, "postroom-broker"):
        sent = [await client.send(TO, f"letter {number}") for number in range(50)]
        orders.signal("KILL")
        rows = [await client.get(each.client_message_id) for each in sent]
    assert [row.id for row in rows] == [each.outbox_id for each in sent]


async def test_a_daemon_that_stands_still_is_ended_by_the_watchdog_and_started_again(
    orders: Daemon, client: AsyncClient
) -> None:
    with orders.setting("WatchdogSec=2s"):
        before = orders.pid
        orders.signal("STOP")
        await client.send(TO, "a letter")
        assert orders.pid not in {"0", before}
        assert orders.show("NRestarts") == "1"
    assert any("Fatal Python error: Aborted" in line for line in orders.journal())


async def test_an_idle_daemon_lives_on_under_a_short_watchdog(orders: Daemon) -> None:
    with orders.setting("WatchdogSec=1s"):
        first = int(orders.show("WatchdogTimestampMonotonic"))
        wait_until(
            lambda: int(orders.show("WatchdogTimestampMonotonic")) > first + 3_000_000, "three seconds of answers"
        )
        assert orders.show("NRestarts") == "0"


async def test_no_send_fails_while_the_daemon_is_restarted_under_load(orders: Daemon) -> None:
    over = asyncio.Event()
    sent: list[str] = []

    async def write() -> None:
        async with AsyncClient(orders.socket) as client:
            for number in count():
                if over.is_set():
                    return
                identifier = new_id()
                await client.send(TO, f"letter {number}", client_message_id=identifier)
                sent.append(identifier)

    async with asyncio.TaskGroup() as writers:
        for _ in range(16):
            writers.create_task(write())
        for _ in range(5):
            enough = len(sent) + 100
            await asyncio.to_thread(wait_until, lambda enough=enough: len(sent) > enough, "a hundred sends more")
            await asyncio.to_thread(orders.machine.run, "systemctl", "restart", orders.unit)
        over.set()
    async with AsyncClient(orders.socket) as client:
        rows = [await client.wait(identifier, 60) for identifier in sent]
    assert {row.status for row in rows} == {"done"}
    assert len({row.broker_message_id for row in rows}) == len(sent)


async def test_a_wrong_config_is_not_tried_again_and_callers_learn_at_once(orders: Daemon) -> None:
    orders.stop()
    orders.configure("http://127.0.0.1:1", "a-token-of-nobody", more="misspelt = 1")
    assert orders.machine.attempt("systemctl", "start", orders.unit).returncode != 0
    await _refused(orders)
    assert orders.show("ExecMainStatus") == "78"
    assert orders.show("NRestarts") == "0"
    assert any("misspelt" in line for line in orders.journal())


async def test_a_wrong_config_ends_the_wait_of_a_caller_who_started_the_daemon(orders: Daemon) -> None:
    orders.stop()
    orders.configure("http://127.0.0.1:1", "a-token-of-nobody", more="misspelt = 1")
    orders.machine.run("systemctl", "start", orders.socket_unit)
    async with AsyncClient(orders.socket, patience=0, timeout=30) as caller:
        with pytest.raises(Unavailable):
            await caller.send(TO, "a letter")
    await _refused(orders)
    assert orders.show("ActiveState") == "failed"


async def test_a_missing_token_is_not_tried_again(orders: Daemon) -> None:
    orders.stop()
    token = orders.machine.path(f"/etc/postroom/mesh/{orders.mesh}.token")
    token.rename(token.with_suffix(".away"))
    assert orders.machine.attempt("systemctl", "start", orders.unit).returncode != 0
    await _refused(orders)
    token.with_suffix(".away").rename(token)
    assert orders.show("ExecMainStatus") == "243"
    assert orders.show("NRestarts") == "0"


async def test_it_serves_again_once_the_config_is_repaired(orders: Daemon, client: AsyncClient) -> None:
    config = orders.machine.path(f"/etc/postroom/mesh/{orders.mesh}.toml")
    right = config.read_text()
    config.write_text("nonsense")
    orders.machine.attempt("systemctl", "restart", orders.unit)
    await _refused(orders)
    config.write_text(right)
    orders.machine.run("systemctl", "start", orders.unit)
    await client.send(TO, "a letter")


async def test_it_stops_in_time_with_a_broker_that_never_answers(orders: Daemon) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        orders.stop()
        orders.configure(f"http://127.0.0.1:{mute.getsockname()[1]}", "a-token-of-nobody")
        orders.machine.run("systemctl", "start", orders.unit)
        async with AsyncClient(orders.socket) as client:
            await client.send(TO, "a letter")
        mute.settimeout(30)
        mute.accept()[0].close()
        orders.stop()
    assert (orders.show("Result"), orders.show("ExecMainStatus")) == ("success", "0")


async def test_the_status_line_tells_the_backlog(orders: Daemon, client: AsyncClient) -> None:
    with stopped(orders.machine, "postroom-broker"):
        for _ in range(7):
            await client.send(TO, "a letter")
        wait_until(lambda: "7 waiting" in orders.show("StatusText"), "a status line that counts the backlog")
    wait_until(lambda: "0 waiting" in orders.show("StatusText"), "a status line without a backlog")


async def test_the_journal_holds_json_lines_without_a_secret(orders: Daemon, client: AsyncClient) -> None:
    body = f"body {secrets.token_hex(16)}"
    await client.wait((await client.send(TO, body)).client_message_id, 30)
    orders.stop()
    events = [json.loads(line) for line in orders.journal()]
    assert {"ready", "stopped"} <= {event["event"] for event in events}
    token = orders.machine.path(f"/etc/postroom/mesh/{orders.mesh}.token").read_text()
    assert not [event for event in events if token in str(event) or body in str(event)]


async def test_its_files_belong_to_it_alone(orders: Daemon, client: AsyncClient) -> None:
    await client.send(TO, "a letter")
    files = list(orders.machine.path(f"/var/lib/private/postroom/{orders.mesh}").rglob("*"))
    assert {file.stat().st_mode & 0o077 for file in files} == {0}
    assert {str(file.stat().st_uid) for file in files} == {orders.show("UID")}
    assert orders.show("UID") != "0"


async def test_an_outbox_that_root_recovered_is_the_daemons_again(orders: Daemon, client: AsyncClient) -> None:
    sent = await client.send(TO, "a letter")
    orders.stop()
    orders.machine.run(PROGRAM, "outbox", "recover", "--config", f"/etc/postroom/mesh/{orders.mesh}.toml", "--yes")
    orders.machine.run("systemctl", "start", orders.unit)
    assert (await client.get(sent.client_message_id)).id == sent.outbox_id


async def _refused(daemon: Daemon) -> None:
    """Wait until nobody listens any more: callers get an error instead of a wait."""

    def gone() -> bool:
        return daemon.machine.attempt("systemctl", "is-active", daemon.socket_unit).stdout.strip() == "inactive"

    await asyncio.to_thread(wait_until, gone, f"{daemon.socket_unit} inactive")
    with socket.socket(socket.AF_UNIX) as caller, pytest.raises((FileNotFoundError, ConnectionRefusedError)):
        caller.connect(str(daemon.socket))
