import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from support.waiting import wait_until

from postroom.chassis import runtime
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import in_step, run_until_stopped, stop_on_signals


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("cleaned")


async def test_the_stop_event_ends_every_task_and_waits_for_its_cleanup():
    stop, ended = asyncio.Event(), []
    running = asyncio.create_task(run_until_stopped({"one": forever(ended), "two": forever(ended)}, stop))
    await asyncio.sleep(0)
    stop.set()
    await running
    assert ended == ["cleaned", "cleaned"]


async def test_a_task_that_loses_its_cancellation_to_an_error_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_CLEAN_UP_SECONDS", 0.01)
    lost: list[OSError] = []

    async def looping() -> None:
        while True:
            try:
                try:
                    await asyncio.Event().wait()
                finally:
                    if len(lost) < 2:
                        raise OSError("the peer does not answer")
            except OSError as error:
                lost.append(error)

    stop = asyncio.Event()
    running = asyncio.create_task(run_until_stopped({"looping": looping()}, stop))
    await asyncio.sleep(0)
    stop.set()
    await running
    assert len(lost) == 2


async def test_a_task_that_fails_ends_the_others_and_the_process_with_exit_code_1():
    async def failing() -> None:
        raise RuntimeError("disk on fire")

    ended: list[str] = []
    with pytest.raises(Fatal, match="disk on fire") as fatal:
        await run_until_stopped({"failing": failing(), "other": forever(ended)}, asyncio.Event())
    assert fatal.value.exit_code is Exit.FAILED


async def test_a_task_that_returns_too_early_is_a_failure():
    async def short() -> None:
        return

    with pytest.raises(Fatal, match="short"):
        await run_until_stopped({"short": short()}, asyncio.Event())


async def test_a_fatal_error_of_a_task_keeps_its_exit_code():
    async def misconfigured() -> None:
        raise Fatal(Exit.CONFIG, "max_age is longer than the window")

    with pytest.raises(Fatal, match="max_age") as fatal:
        await run_until_stopped({"check": misconfigured()}, asyncio.Event())
    assert fatal.value.exit_code is Exit.CONFIG


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_signal_sets_the_stop_event(number):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = asyncio.Event()
    try:
        stop_on_signals(stop)
        os.kill(os.getpid(), number)
        await asyncio.wait_for(stop.wait(), 10)
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, before)


BLOCKED = """
import asyncio, time
from postroom.chassis.runtime import run, stop_on_signals

async def block() -> None:
    stop_on_signals(asyncio.Event(), patience=0.1)
    print("blocked", flush=True)
    time.sleep(600)

run(block())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_program_whose_event_loop_users_code_blocks(number):
    with subprocess.Popen([sys.executable, "-c", BLOCKED], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"blocked\n"
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert said == b"postroom: users' code does not end: the process ends without it (threads: none)\n"


def test_a_signal_ends_a_program_whose_users_code_prints_what_nobody_reads():
    printing = BLOCKED.replace("time.sleep(600)", "print('.' * 10**6, flush=True)")
    buffering = [sys.executable, "-E", "-c", printing]  # whatever PYTHONUNBUFFERED says
    with subprocess.Popen(buffering, bufsize=0, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:

        def waiting() -> int:
            return int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, bytes(4)), sys.byteorder)

        try:
            wait_until(lambda: waiting() > 60_000)  # bytes: the pipe is full, and the program in its write
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


FORKING = """
import asyncio, multiprocessing
from postroom.chassis.runtime import run, stop_on_signals

def wait(begun) -> None:
    begun.set()
    multiprocessing.Event().wait()

async def fork() -> None:
    stop = asyncio.Event()
    stop_on_signals(stop, patience=60)
    begun = multiprocessing.Event()
    child = multiprocessing.get_context("fork").Process(target=wait, args=(begun,))
    child.start()
    begun.wait()
    child.terminate()
    child.join(10)
    child.kill()
    await asyncio.sleep(0.1)  # what the child has written to the loop would be read now
    print(child.exitcode, stop.is_set())

run(fork())
"""


def test_a_signal_to_a_process_that_users_code_has_forked_ends_that_one_alone() -> None:
    ended = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == (b"-15 False\n", b"")


LEFT_BEHIND = """
import asyncio, sys
from postroom.chassis import runtime
from postroom.chassis.exits import Fatal
from postroom.chassis.runtime import stop_on_signals

runtime._CLEAN_UP_SECONDS = 0.1

def interrupt() -> None:
    raise KeyboardInterrupt

ENDS = {"exit": sys.exit, "interrupt": interrupt, "stop": lambda: asyncio.get_running_loop().stop()}

async def looping(cancellations: int) -> None:
    while cancellations:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancellations -= 1

async def main() -> None:
    loop = asyncio.get_running_loop()
    left = [loop.create_task(looping(int(sys.argv[1])))]
    stop_on_signals(asyncio.Event())
    await asyncio.sleep(0)
    loop.call_soon(ENDS[sys.argv[2]])
    await asyncio.Event().wait()

try:
    runtime.run(main())
except Fatal as fatal:
    sys.exit(fatal.report("test"))
"""


@pytest.mark.parametrize("cancellations", [2, 1_000_000])
@pytest.mark.parametrize(
    ("how", "reported"),
    [
        ("exit", "a task or a callback that users' code left behind raised SystemExit"),
        ("interrupt", "a task or a callback that users' code left behind raised KeyboardInterrupt"),
        ("stop", "users' code stopped the event loop"),
    ],
)
def test_what_ends_the_loop_ends_the_process_whatever_other_tasks_do_and_is_reported(
    how: str, reported: str, cancellations: int
):
    command = [sys.executable, "-c", LEFT_BEHIND, str(cancellations), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert reported in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


UNWRITTEN = """
import structlog
from postroom.chassis import logs, runtime

async def main() -> None:
    structlog.get_logger().info("lost")

logs.configure()
runtime.run(main())
"""


def test_a_program_whose_log_cannot_be_written_ends_as_it_would_with_one():
    command, environment = [sys.executable, "-c", UNWRITTEN], os.environ | {"PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("wb") as full:
        assert subprocess.run(command, env=environment, stderr=full, check=False).returncode == 0


async def test_a_hangup_stops_no_program_that_ignores_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup(1) does
    try:
        stop_on_signals(asyncio.Event())
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_those_who_wait_in_step_wake_together_and_none_late():
    loop = asyncio.get_running_loop()
    for seconds in (0.5, 1.0, 10.0):
        waited = in_step(seconds)
        halves = (loop.time() + waited) * 2
        assert 0 < waited <= seconds
        assert halves == pytest.approx(round(halves), abs=0.01)
        await asyncio.sleep(0.001)
    assert in_step(0.01) == 0.01
