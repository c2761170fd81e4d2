"""Start and stop of a process: named tasks, signals, and the first task that ends too early ends the process.

Every program's main reads the same way: options → build → `run_until_stopped` → close what was built.

It speaks the two protocols of systemd that a service needs, sd_notify(3) and socket activation (sd_listen_fds(3)), and
loads what `module:name` names in a user's own code. It reports its state periodically
(docs/contract/operate.md#operate-60); the program passes in where to.
"""

import asyncio
import importlib
import inspect
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.machinery import PathFinder
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import uvloop

import postroom
from postroom._wire.programs import MAX_LINE, MAX_REASONS, REPORT_SECONDS, Report, Status
from postroom.chassis import collect_rarely
from postroom.chassis.exits import Exit, Fatal, write_last
from postroom.chassis.handlers import end_within, located
from postroom.errors import PostroomError

T = TypeVar("T")

_log = structlog.get_logger(__name__)
_DESCRIPTORS_KEPT: Final = 64  # for databases, servers, logs and everything else that is opened
_CLEAN_UP_SECONDS: Final = 5.0  # that a task may take to end when it is cancelled
_FIRST_FD: Final = 3  # SD_LISTEN_FDS_START
_GLANCE_SECONDS: Final = 1.0  # between two glances at what needs no request
_STEP_SECONDS: Final = 0.5


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a program's main coroutine, on the faster event loop, and return what it returns.

    Raises `Fatal`: 78 where the process may open too few files to work, 1 where users' code stopped the loop, or a task
    or a callback that it left behind raised what ends a process.
    """
    if spare_descriptors() < 1:
        main.close()
        limit = f"its limit on open files is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
        advice = "raise it with `ulimit -n 1024`, or LimitNOFILE= of its unit"
        raise Fatal(Exit.CONFIG, f"{limit}, and it needs more than {_DESCRIPTORS_KEPT}: {advice}")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            try:
                return runner.run(main)
            except (SystemExit, KeyboardInterrupt, RuntimeError) as error:
                listens = signal.getsignal(signal.SIGINT) is not signal.default_int_handler
                if inspect.getcoroutinestate(main) == inspect.CORO_CLOSED or not listens:
                    raise  # what `main` raised itself, or Ctrl-C
                detail, advice = "users' code stopped the event loop", "remove that call of `stop`"
                if not isinstance(error, RuntimeError):
                    detail = f"a task or a callback that users' code left behind raised {located(error)}"
                    advice = "correct it there, and await what is begun"
                _log.error("loop_ended", detail=detail)
                end_within(2 * _CLEAN_UP_SECONDS, Exit.FAILED)
                runner.run(end(asyncio.all_tasks(runner.get_loop())))
                raise Fatal(Exit.FAILED, f"{detail}: {advice}") from error
    finally:
        write_last("")  # of the log


def spare_descriptors() -> int:
    """Return how many file descriptors there are for the connections of callers."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - _DESCRIPTORS_KEPT


def stop_on_signals(stop: asyncio.Event, *, patience: float | None = None) -> None:
    """Set `stop` on SIGTERM and SIGINT, and where the terminal closes, unless nohup(1) has SIGHUP ignored.

    Where users' code runs on the loop, which it may block, the process ends after some `patience` (seconds) without it.
    A program inherits the signals that its parent has blocked.
    """
    os.register_at_fork(after_in_child=_leave_to_parent)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, stop.set)
            if patience is not None:  # the loop hears of the signal all the same, once it runs
                signal.signal(number, lambda *_: end_within(patience, Exit.OK))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})


def _leave_to_parent() -> None:
    """Let SIGTERM end a forked child, which would write each signal to the loop of its parent: that one would stop."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


async def run_until_stopped(
    tasks: Mapping[str, Coroutine[Any, Any, None]],
    stop: asyncio.Event,
    wind_down: Callable[[], Awaitable[None]] | None = None,
    *,
    patience: float | None = None,
) -> None:
    """Run the named `tasks` until `stop` is set or one of them ends; cancel the rest and wait for them.

    `wind_down` runs before that, with `stop` set, while the tasks still run: what has begun can finish. A process that
    runs users' code has some `patience` (seconds) with the rest, and then ends at once.

    A task that ends before `stop` raises `Fatal` (its own, or exit code 1), since the process would be crippled
    without it. A service manager's watchdog is answered too, unless one of the tasks does.
    """
    collect_rarely()
    if "watchdog" not in tasks and (seconds := watchdog_seconds()) is not None:
        tasks = {**tasks, "watchdog": answer_watchdog(seconds / 2)}
    running = {asyncio.create_task(task, name=name) for name, task in tasks.items()}
    stopping: asyncio.Task[Any] = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait({*running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    stop.set()
    fatal: Fatal | None = None
    for task in done - {stopping}:
        error = task.exception() if not task.cancelled() else None
        if isinstance(error, Fatal):
            fatal = error
            break
        _log.error("task_ended", task=task.get_name(), exc_info=error)
        fatal = Fatal(Exit.FAILED, f"{task.get_name()!r} ended: {error!r}; see the log" if error else task.get_name())
    if wind_down is not None:
        await wind_down()
    if patience is not None:
        end_within(patience, Exit.OK if fatal is None else fatal.exit_code)
    await end(running)
    if fatal is not None:
        raise fatal


async def end(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and return when all have ended; their results stay with them.

    A task whose clean-up fails has lost its cancellation to that error: a loop that survives errors then goes on, for
    example where Postgres hangs. So it is cancelled again, until it has ended.
    """
    while running := {task for task in tasks if not task.done()}:
        for task in running:
            task.cancel()
        await asyncio.wait(running, timeout=_CLEAN_UP_SECONDS)


def managed(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a service manager expects notifications of this process."""
    return bool(environ.get("NOTIFY_SOCKET"))


def notify(message: str, environ: Mapping[str, str] = os.environ, *, patience: float = 1.0) -> None:
    """Send `READY=1`, `STATUS=…`, `WATCHDOG=1` or `STOPPING=1` to the service manager, if there is one.

    One that does not listen is waited for, for `patience` seconds, and then not notified. Periodic notifications have
    no patience, since the loop is blocked meanwhile.
    """
    if not managed(environ):
        return
    address = environ["NOTIFY_SOCKET"]
    # It fails for an inherited address, as in a container, and a manager that restarts or hangs: no reason to end.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.settimeout(patience)
        sock.connect("\0" + address[1:] if address.startswith("@") else address)
        sock.sendall(message.encode())


def watchdog_seconds(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return how often the service manager expects `WATCHDOG=1`, or None where it does not."""
    usec = environ.get("WATCHDOG_USEC")
    return None if usec is None or _is_foreign("WATCHDOG_PID", environ) else int(usec) / 1e6


async def answer_watchdog(interval: float) -> None:
    """Answer every `interval` seconds, for ever; a task, so that a loop that hangs is noticed.

    An unreachable server is no reason to die, so none is asked here.
    """
    while True:
        notify("WATCHDOG=1", patience=0)
        await asyncio.sleep(interval)


def in_step(seconds: float) -> float:
    """Return about `seconds`, so that all waits by it end at the same moments: an idle process wakes less often.

    It is never more, and less than half a second less.
    """
    now = asyncio.get_running_loop().time()
    return seconds if seconds < _STEP_SECONDS else (now + seconds) // _STEP_SECONDS * _STEP_SECONDS - now


async def within(seconds: float, event: asyncio.Event) -> bool:
    """Wait for an event, `seconds` at most; return whether it is set."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


def listen_sockets(environ: Mapping[str, str] = os.environ) -> list[socket.socket]:
    """Return the Unix sockets that the service manager opened for this process, in order; usually none.

    Raises `Fatal` (78) for any other: the peers of a TCP port have no uid, and would be taken for this process' user.
    """
    count = environ.get("LISTEN_FDS")
    if count is None or _is_foreign("LISTEN_PID", environ):
        return []
    if not count.isdecimal():
        raise Fatal(Exit.CONFIG, f"LISTEN_FDS is {count!r}, which is not a number of sockets: let systemd alone set it")
    sockets = []
    for fd in range(_FIRST_FD, _FIRST_FD + int(count)):
        with suppress(OSError):  # it is not a socket, or not open
            sock = socket.socket(fileno=fd)
            listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens and (sock.family, sock.type) == (socket.AF_UNIX, socket.SOCK_STREAM):
                sockets.append(sock)
                continue
        detail = f"LISTEN_FDS passes in {count}, but descriptor {fd} is not a Unix socket that listens"
        raise Fatal(Exit.CONFIG, f"{detail}: give ListenStream= of the .socket unit a path")
    return sockets


def _is_foreign(variable: str, environ: Mapping[str, str]) -> bool:
    return environ.get(variable, str(os.getpid())) != str(os.getpid())


def load_named(name: str, check: Callable[[Any], None], *, what: str, example: str) -> Any:
    """Import `module:name`: from the current directory first, then from `PYTHONPATH`.

    Raises `Fatal`: 2 where `name` has another form, with `what` it should name, and 78 where it can't be imported, or
    `check` refuses it.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute) or module_name.startswith("."):
        raise Fatal(Exit.USAGE, f"{name!r} does not name {what}: pass {example}")
    check_library_is_visible()
    if sys.path[0] != str(Path.cwd()):
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, attribute, None)  # which a module's `__getattr__` may import
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script without a guard ends itself
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            places = f"it is looked for in {Path.cwd()}, in PYTHONPATH and in {sys.prefix}"
            raise Fatal(Exit.CONFIG, f"cannot import {module_name}: {error}; {places}: pass {example}") from error
        detail = f"cannot import {module_name}: it raised {located(error)}; correct it there"
        raise Fatal(Exit.CONFIG, detail) from error
    if found is None:
        file = getattr(module, "__file__", None)
        where = f": look into {file}" if file else ", which is a directory or a part of Python: name the module"
        raise Fatal(Exit.CONFIG, f"there is no {attribute} in {module_name}{where}")
    try:
        check(found)
    except PostroomError as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    return found


def check_library_is_visible() -> None:
    """Raise `Fatal` (78) if a user's module `postroom` would be imported instead of the library."""
    for entry in (".", *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))):
        found = PathFinder.find_spec("postroom", [str(Path(entry).absolute())])
        if found is None or found.origin is None:
            continue  # a directory without modules hides nothing
        if not Path(found.origin).samefile(postroom.__file__):
            raise Fatal(Exit.CONFIG, f"{found.origin} hides the library `postroom`: rename it")


class Reporter:
    """Builds the reports of a process of a `distribution`, which starts now."""

    def __init__(self, distribution: str, address: str | None) -> None:
        self._version = version(distribution)
        self._address = address
        self._started_at = datetime.now(UTC)

    def report(self, reasons: Sequence[str], *, status: Status | None = None, **more: Any) -> Report:
        """Build a report of the current state: `degraded` where there are reasons, and no other status is given."""
        return Report(
            host=socket.gethostname(),
            pid=os.getpid(),
            version=self._version,
            started_at=self._started_at,
            at=datetime.now(UTC),
            status=status or ("degraded" if reasons else "ok"),
            reasons=lines(reasons),
            address=self._address,
            **more,
        )


def lines(reasons: Sequence[str]) -> list[str]:
    """Return as many and as much of the reasons as a report has room for."""
    return [reason[:MAX_LINE] for reason in reasons[:MAX_REASONS]]


async def keep_reporting(
    look: Callable[[], Awaitable[Report]], send: Callable[[Report], Awaitable[None]], glance: Callable[[], Hashable]
) -> None:
    """Report for ever, every ten seconds, and soon after what `glance` returns has changed.

    A report that cannot be made or sent (`PostroomError`) is left out: the next one follows.
    """
    while True:
        seen = glance()
        with suppress(PostroomError):
            await send(await look())
        for _ in range(round(REPORT_SECONDS / _GLANCE_SECONDS)):
            await asyncio.sleep(in_step(_GLANCE_SECONDS))
            if glance() != seen:
                break
