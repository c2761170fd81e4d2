"""The daemon as a process: its socket, its start and stop, its exit codes (docs/contract/send.md#send-77)."""

from __future__ import annotations

import grp
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from broker_client.features import DEFAULT_DEDUPE, KeptFeatures
from postroom._wire.accept import Features


def test_it_accepts_while_the_broker_is_away_and_stops_in_order(daemon: Any) -> None:
    daemon.start().ready()
    assert daemon.send("a") == 202
    assert daemon.ask("GET", "/v1/sends/a")[1]["status"] in ("pending", "inflight")
    assert daemon.stop() == 0
    assert not daemon.socket.exists()


def test_a_signal_that_its_parent_has_blocked_stops_it(daemon: Any) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        daemon.start(umask=0o022)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert daemon.ready().stop() == 0, daemon.said()


def test_it_runs_without_standard_streams(daemon: Any) -> None:
    daemon.write()
    command = ["sh", "-c", 'exec "$@" 0<&- 1>&- 2>&-', "sh", sys.executable, "-m", "daemon", "--config", daemon.file]
    daemon.process = subprocess.Popen(command, cwd=daemon.directory)
    assert daemon.ready().stop() == 0
    daemon.file.unlink()
    daemon.process = subprocess.Popen(command, cwd=daemon.directory)
    assert daemon.ended() == 78


def test_what_was_acknowledged_outlives_a_kill(daemon: Any) -> None:
    daemon.start().ready()
    for number in range(20):
        assert daemon.send(f"k{number}") == 202
    daemon.stop(signal.SIGKILL)
    assert daemon.socket.exists()
    daemon.start().ready()
    for number in range(20):
        assert daemon.ask("GET", f"/v1/sends/k{number}")[0] == 200
    assert daemon.ask("GET", "/v1/health")[1]["rows"]["pending"] == 20


def test_a_clock_behind_what_was_installed_dates_no_row_before_that(daemon: Any) -> None:
    token = daemon.directory / "token"
    later = int(time.time()) + 3600
    os.utime(token, (later, later))
    daemon.start().ready()
    assert daemon.send("a") == 202
    assert daemon.ask("GET", "/v1/sends/a")[1]["enqueued_at"] >= f"{datetime.fromtimestamp(later, UTC):%FT%T}"


def test_a_stale_socket_is_replaced(daemon: Any) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(daemon.socket))
    daemon.start().ready()
    assert daemon.stop() == 0


def test_a_socket_that_was_removed_under_a_daemon_degrades_its_health(daemon: Any) -> None:
    daemon.start().ready()
    moved, lost = daemon.socket.rename(daemon.directory / "moved.sock"), daemon.socket
    daemon.socket = moved
    health = daemon.ask("GET", "/v1/health")[1]
    assert f"the socket {lost} was removed or replaced" in " ".join(health["reasons"])
    lost.touch()  # another's
    assert health["reasons"] == daemon.ask("GET", "/v1/health")[1]["reasons"]
    assert daemon.stop() == 0
    assert lost.exists()


def test_a_second_daemon_says_that_one_is_already_running(daemon: Any, second: Any) -> None:
    daemon.start().ready()
    assert second.start().ended() == 69
    assert "already running" in second.said()
    assert daemon.send("a") == 202


def test_a_state_directory_has_one_daemon_whatever_their_sockets(daemon: Any, second: Any) -> None:
    daemon.start().ready()
    second.socket = daemon.directory / "other.sock"
    second.lines["socket"] = [f'path = "{second.socket}"']
    assert second.start().ended() == 69
    assert "in use" in second.said()
    assert not second.socket.exists()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_the_socket_is_private_whatever_the_umask(daemon: Any, umask: int) -> None:
    daemon.start(umask=umask)
    daemon.ready()
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(daemon.state.stat().st_mode) == 0o700
    for file in daemon.state.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0, file


def test_a_group_may_be_let_in(daemon: Any) -> None:
    group = os.getgid()
    daemon.lines["socket"].append(f'group = "{grp.getgrgid(group).gr_name}"')
    daemon.start().ready()
    assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
    assert daemon.socket.stat().st_gid == group


@pytest.mark.parametrize("obstacle", ["a plain file", "a directory", "a symbolic link", "a dangling link"])
def test_whatever_else_lies_in_the_way_is_left_alone(daemon: Any, obstacle: str) -> None:
    if obstacle == "a plain file":
        daemon.socket.write_text("mine")
    elif obstacle == "a directory":
        daemon.socket.mkdir()
    else:
        target = daemon.directory / "target"
        if obstacle == "a symbolic link":
            target.write_text("mine")
        daemon.socket.symlink_to(target)
    before = daemon.socket.lstat()
    assert daemon.start().ended() == 78
    assert str(daemon.socket) in daemon.said()
    assert "Traceback" not in daemon.said()
    assert daemon.socket.lstat().st_ino == before.st_ino


def test_a_socket_path_of_108_bytes_is_a_clear_error(daemon: Any) -> None:
    daemon.socket = daemon.directory / ("s" * (107 - len(os.fsencode(daemon.directory))))
    daemon.lines["socket"] = [f'path = "{daemon.socket}"']
    assert len(os.fsencode(daemon.socket)) == 108
    assert daemon.start().ended() == 78
    assert "108 bytes" in daemon.said()


def test_a_socket_passed_in_is_used_as_it_is(daemon: Any) -> None:
    """As under systemd: the socket was there before the daemon, and a send that came too early is answered."""
    with socket.socket(socket.AF_UNIX) as sock, socket.socket(socket.AF_UNIX) as early:
        sock.bind(str(daemon.socket))
        sock.listen(16)
        early.settimeout(30)
        early.connect(str(daemon.socket))
        early.sendall(b"GET /v1/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        mode = daemon.socket.stat().st_mode
        daemon.inherit.append(sock)
        daemon.start()
        assert early.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert daemon.stop() == 0
        assert daemon.socket.stat().st_mode == mode
    assert daemon.socket.exists()


def test_a_tcp_port_passed_in_is_refused_since_whoever_reaches_it_would_need_no_token(daemon: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as port:
        daemon.inherit = [port]
        assert daemon.start().ended() == 78
    assert "descriptor 3 is not a Unix socket that listens" in daemon.said()


def test_what_is_passed_in_and_is_not_a_unix_socket_that_listens_is_refused(daemon: Any) -> None:
    with (
        socket.socket(socket.AF_UNIX) as silent,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as packets,
        daemon.directory.joinpath("file").open("w") as file,
    ):
        packets.bind(str(daemon.directory / "packets.sock"))
        packets.listen()
        for passed in (silent, packets, file):
            daemon.inherit = [passed]
            assert daemon.start().ended() == 78, daemon.said()
    assert daemon.said().count("descriptor 3 is not a Unix socket that listens") == 3


def test_it_tells_the_service_manager_what_it_does(daemon: Any, service_manager: Callable[[str], str]) -> None:
    daemon.environ["WATCHDOG_USEC"] = "200000"
    daemon.start()
    assert service_manager("READY=1") == "READY=1"
    assert daemon.send("a") == 202
    assert "waiting" in service_manager("STATUS=")
    for _ in range(3):
        assert service_manager("WATCHDOG=1") == "WATCHDOG=1"
    assert daemon.process is not None
    daemon.process.terminate()
    service_manager("STOPPING=1")
    assert daemon.ended() == 0


def test_a_request_in_hand_is_answered_at_a_stop(daemon: Any) -> None:
    daemon.start().ready()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(daemon.socket))
        body = b'{"to":"topic:orders","client_message_id":"late"}'
        sock.sendall(
            b"POST /v1/send HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body)
        )
        assert sock.recv(100).startswith(b"HTTP/1.1 100 ")
        daemon.process.terminate()
        sock.sendall(body)
        assert sock.recv(65536).startswith(b"HTTP/1.1 202 ")
    assert daemon.ended() == 0
    daemon.start().ready()
    assert daemon.ask("GET", "/v1/sends/late")[0] == 200


def test_a_wait_does_not_hold_up_a_stop(daemon: Any) -> None:
    daemon.start().ready()
    daemon.send("a")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        sock.connect(str(daemon.socket))
        sock.sendall(b"GET /v1/sends/a?wait=60 HTTP/1.1\r\nHost: x\r\n\r\n")
        while daemon.ask("GET", "/v1/metrics")[1].find(b"postroom_daemon_requests_in_flight 2.0") < 0:
            pass
        daemon.process.terminate()
        assert b'"status":"' in sock.recv(65536)
    assert daemon.ended() == 0


BAD_CONFIGS = {
    "an unknown key": ("", "colour = 1", "colour"),
    "a wrong type": ("limits", "requests_in_flight = 'many'", "limits.requests_in_flight"),
    "a value out of range": ("limits", "requests_in_flight = 0", "limits.requests_in_flight"),
    "an unknown table": ("paint", "x = 1", "paint"),
    "a key twice": ("", 'mesh = "other"', "daemon.toml"),
    "an unknown group": ("socket", 'group = "no-such-group"', "no-such-group"),
    "a TCP port without a token": ("tcp", "port = 12345", "rotate-token"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_wrong_config_ends_with_78_and_names_what_is_wrong(daemon: Any, name: str) -> None:
    table, line, named = BAD_CONFIGS[name]
    daemon.lines.setdefault(table, []).append(line)
    assert daemon.start().ended() == 78
    assert named in daemon.said()
    assert "Traceback" not in daemon.said()


def test_a_token_that_others_can_read_is_refused(daemon: Any) -> None:
    token = daemon.directory / "local.token"
    token.write_text("0123456789abcdef0123456789abcdef")
    token.chmod(0o644)
    daemon.lines["tcp"] = ["port = 12345", f'token_file = "{token}"']
    assert daemon.start().ended() == 78
    assert "can be read by others" in daemon.said()


def test_a_token_of_the_broker_that_others_can_read_is_refused(daemon: Any) -> None:
    token = daemon.directory / "token"
    token.chmod(0o604)
    assert daemon.start().ended() == 78
    assert f"broker.token_file {token}" in daemon.said()
    assert "chmod 600" in daemon.said()


def test_the_outbox_of_another_mesh_is_refused(daemon: Any) -> None:
    """Its rows would be sent into the wrong one."""
    seen = Features(mesh="other", member="ann", max_batch=500, client_message_id_dedupe=DEFAULT_DEDUPE)
    daemon.state.mkdir(mode=0o700)
    KeptFeatures(daemon.state).save(seen)
    assert daemon.start().ended() == 78
    assert f"{daemon.state} holds the outbox of the mesh 'other'" in daemon.said()


def test_without_a_home_or_a_runtime_directory_the_config_has_to_say(daemon: Any) -> None:
    daemon.lines["socket"].clear()
    daemon.environ["XDG_RUNTIME_DIR"] = str(daemon.directory / "run")
    daemon.socket = daemon.directory / "run" / "postroom" / "demo.sock"
    daemon.start().ready()
    assert daemon.stop() == 0


@pytest.mark.parametrize("content", [None, "", "[", "directory"])
def test_a_config_that_cannot_be_read_is_a_sentence(daemon: Any, content: str | None) -> None:
    daemon.write = lambda: _put(daemon.file, content)
    assert daemon.start().ended() == 78
    assert str(daemon.file) in daemon.said() or "mesh" in daemon.said()
    assert "Traceback" not in daemon.said()


def _put(file: Path, content: str | None) -> None:
    if content == "directory":
        file.mkdir()
    elif content is not None:
        file.write_text(content)


def test_a_disk_that_fails_under_a_commit_ends_the_daemon_with_74(daemon: Any) -> None:
    """No file may grow any more: the write-ahead log cannot be written, and whether the commit took is not known."""
    daemon.log = Path("/dev/null")  # the one file that may still be written
    daemon.start().ready()
    assert daemon.send("kept") == 202
    assert daemon.process is not None
    _, hard = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (0, hard))
    status, problem = daemon.ask("POST", "/v1/send", {"to": "topic:orders", "client_message_id": "lost"})
    assert (status, problem["code"], problem["retryable"]) == (503, "outcome_unknown", True)
    assert daemon.ended() == 74
    daemon.start().ready()
    assert daemon.ask("GET", "/v1/sends/kept")[0] == 200
    assert daemon.send("lost") == 202


@pytest.mark.parametrize("replaced", [False, True])
def test_an_outbox_that_is_moved_under_a_daemon_ends_it_with_74(daemon: Any, *, replaced: bool) -> None:
    daemon.start().ready()
    assert daemon.send("kept") == 202
    file, aside = daemon.state / "outbox.db", daemon.state / "aside"
    shutil.copyfile(file, daemon.state / "copy")
    file.rename(aside)
    if replaced:
        (daemon.state / "copy").rename(file)
        assert daemon.send("lost") == 503  # the next start would not know of it
    assert daemon.ended() == 74
    assert "it was removed or replaced while it was open" in daemon.said()
    aside.rename(file)
    daemon.start().ready()
    assert daemon.ask("GET", "/v1/sends/kept")[0] == 200


def test_a_limit_on_open_files_under_which_nobody_could_connect_is_refused(daemon: Any) -> None:
    daemon.write()
    begin = 'ulimit -n 32; exec "$0" -m daemon --config "$1"'
    command = ["sh", "-c", begin, sys.executable, str(daemon.file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "its limit on open files is 32" in done.stderr) == (78, True), done.stderr


def test_daemons_that_start_at_once_in_one_directory_of_sockets_all_run(daemon: Any, second: Any) -> None:
    second.socket, second.state = daemon.directory / "other.sock", daemon.directory / "state-2"
    second.file, second.log = daemon.directory / "other.toml", daemon.directory / "log-2"
    second.lines[""][1] = f'state_directory = "{second.state}"'
    second.lines["socket"] = [f'path = "{second.socket}"']
    daemon.start()
    second.start().ready()
    daemon.ready()
    assert (daemon.stop(), second.stop()) == (0, 0)


@pytest.mark.parametrize("name", ["outbox.db", "outbox.db-wal", "outbox.lock"])
def test_a_file_of_the_state_that_is_a_link_is_refused(daemon: Any, name: str) -> None:
    daemon.state.mkdir(mode=0o700)
    target = daemon.directory / "target"
    (daemon.state / name).symlink_to(target)
    assert daemon.start().ended() == 78
    assert "is a symbolic link: remove it" in daemon.said()
    assert not target.exists()


@pytest.mark.parametrize("which", ["state", "sockets"])
def test_a_directory_that_others_may_write_to_is_refused(daemon: Any, which: str) -> None:
    daemon.state.mkdir(mode=0o700)
    sockets = daemon.directory / "sockets"
    sockets.mkdir(mode=0o700)
    daemon.lines["socket"] = [f'path = "{sockets / "d.sock"}"']
    (daemon.state if which == "state" else sockets).chmod(0o777)
    assert daemon.start().ended() == 78
    assert "others may write to it: chmod go-w" in daemon.said()
    assert "; configure another" not in daemon.said()  # which that says already
