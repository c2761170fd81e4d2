import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import listen_sockets, notify, watchdog_seconds


@pytest.mark.parametrize("abstract", [False, True])
def test_notify_reaches_the_service_manager(tmp_path, abstract):
    name = f"postroom-test-{os.getpid()}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + name if abstract else name)
        notify("READY=1", {"NOTIFY_SOCKET": "@" + name if abstract else name})
        assert manager.recv(100) == b"READY=1"


def test_nobody_who_listens_is_no_reason_to_end(tmp_path):
    notify("READY=1", {})
    for nowhere in (str(tmp_path / "nowhere"), "@postroom-test-nowhere", f"{tmp_path}/{'x' * 108}"):
        notify("READY=1", {"NOTIFY_SOCKET": nowhere})


def test_a_service_manager_that_listens_no_more_holds_nobody_up(tmp_path):
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(path)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            with suppress(BlockingIOError):
                while sender.sendto(b"until nothing more fits", path):
                    pass
        for patience in (0, 0.01):
            notify("WATCHDOG=1", {"NOTIFY_SOCKET": path}, patience=patience)


def test_the_watchdog_interval_is_read_for_this_process_only():
    assert watchdog_seconds({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}) == 2.5
    assert watchdog_seconds({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}) is None
    assert watchdog_seconds({}) is None


def test_no_socket_is_taken_that_was_passed_to_another_process():
    assert listen_sockets({"LISTEN_FDS": "1", "LISTEN_PID": "1"}) == []
    assert listen_sockets({}) == []


@pytest.mark.parametrize("count", ["x", "", "-1"])
def test_what_is_not_a_number_of_sockets_is_refused(count):
    with pytest.raises(Fatal, match="LISTEN_FDS") as refused:
        listen_sockets({"LISTEN_FDS": count, "LISTEN_PID": str(os.getpid())})
    assert refused.value.exit_code is Exit.CONFIG


def test_a_passed_socket_is_taken_over(tmp_path):
    path = str(tmp_path / "passed.sock")
    script = (
        "import os; os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "from postroom.chassis.runtime import listen_sockets\n"
        "print([s.getsockname() for s in listen_sockets()])"
    )
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def hand_over() -> None:
            os.dup2(listener.fileno(), 3)

        ran = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "LISTEN_FDS": "1"},
            preexec_fn=hand_over,
            close_fds=False,
            capture_output=True,
            text=True,
            check=True,
        )
    assert ran.stdout.strip() == str([path])
