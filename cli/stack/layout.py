"""Where a stack keeps its files: everything below one state directory."""

import errno
import hashlib
import json
import os
import re
import secrets
import shlex
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

from embedded.server import socket_directory
from postroom.chassis.config import state_home
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import is_there, private_directory, replace_private, why_refused

MESH: Final = "demo"
SENDER: Final = "alice"  # the member whose token the daemon has
_NAME: Final = "postroom-up"
_MARK: Final = "postroom-up"  # the file that marks the directory as a stack's, and names the SQL of its tables
_TABLES: Final = ("broker", "postroom.delivery", "postroom.ledger", "outbox", "inbox")  # the rooms whose SQL that is
_SOCKET: Final = f"{MESH}.sock"


class Layout:
    """The names of a stack's files, all of them below `state`."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.env_file = state / "env"  # the variables that every verb reads from the environment (mode 0600)
        self.pid_file = state / "up.pid"  # who supervises the stack
        self.lock_file = state / "up.lock"  # locked for as long as a supervisor lives
        self.log_file = state / "up.log"  # what a detached supervisor says
        self.admin_token_file = self.token_file("admin")  # of the broker-wide administrator
        self.daemon_directory = state / "daemon"
        self.outbox_file = self.daemon_directory / "outbox.db"  # opened by the daemon alone while it runs

    @classmethod
    def of(cls, state: Path | None) -> Self:
        """Return that of a directory, or of the one in the XDG state directory; of root, in `/var/lib`.

        Postgres may not enter root's home. The default is not the directory called `postroom`: that is where services
        of this machine keep theirs.
        """
        if state is None:
            state = state_home(os.environ, "set a directory with --state DIR") / _NAME
        return cls(state.absolute())

    def token_file(self, member: str) -> Path:
        """Return the file with a member's token."""
        return self.state / "tokens" / member

    @property
    def socket(self) -> Path:
        """The daemon's socket."""
        return socket_directory(self.daemon_directory, _SOCKET) / _SOCKET

    def create(self) -> None:
        """Make the directory and mark it as a stack's.

        One that holds anything else, or other tables (docs/contract/operate.md#operate-54), is refused, and so is one
        whose name Postgres cannot use.
        """
        if {"\n", "\r"} & set(str(self.state)):
            raise Fatal(Exit.USAGE, f"{str(self.state)!r} has a line break in its name: choose another directory")
        mark = self.state / _MARK
        try:
            private_directory(self.state)
            if not mark.exists() and any(self.state.iterdir()):
                raise Fatal(Exit.USAGE, f"{self.state} has other files: choose an empty or a new directory")
            tables = tables_sql()
            if mark.exists():
                made = json.loads(mark.read_text("utf-8") or "{}") or dict.fromkeys(tables)  # nothing: an earlier one's
                if other := [name for name, digest in tables.items() if made.get(name, digest) != digest]:
                    raise Fatal(
                        Exit.CONFIG,
                        f"{self.state} was made by another version of Postroom, whose tables differ "
                        f"({', '.join(other)}): start in another directory with --state DIR, or remove this one, with "
                        f"every message in it, by `postroom down --wipe --state {shlex.quote(str(self.state))}`",
                    )
            replace_private(mark, f"{json.dumps(tables)}\n")
            if os.geteuid() == 0:
                self.state.chmod(0o711)  # Postgres passes through as another user; what lies inside is closed itself
            self.admin_token_file.parent.mkdir(mode=0o700, exist_ok=True)
            if not self.admin_token_file.exists():
                replace_private(self.admin_token_file, f"{secrets.token_urlsafe(32)}\n")
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise Fatal(
                Exit.TRY_AGAIN if full else Exit.CONFIG,
                f"cannot use the state directory {self.state}: "
                + why_refused(error, "free some space there" if full else "choose another with --state DIR"),
            ) from error

    def wipe(self) -> list[Path]:
        """Remove the state directory, also behind a link; one that no stack made is refused.

        Of a mount point what is in it is removed. The mark goes last, so that what was interrupted can be repeated.
        Links in it are removed too; what they lead to stays, and is returned.
        """
        if not is_there(self.state):
            return []
        self.check()
        state = self.state.resolve()
        linked = {Path(os.path.realpath(link)) for link in state.rglob("*") if link.is_symlink()}
        for entry in sorted(state.iterdir(), key=lambda entry: entry.name == _MARK):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
        if self.state.is_symlink():
            self.state.unlink()
        if not state.is_mount():
            state.rmdir()
        return sorted(filter(Path.exists, linked))

    def check(self) -> None:
        """Refuse a directory that no stack made."""
        if not is_there(self.state / _MARK):
            raise Fatal(
                Exit.NOT_FOUND, f"`postroom up` has no files in {self.state}: name its directory with --state DIR"
            )


def tables_sql() -> dict[str, str]:
    """Return each SQL file that makes a stack's tables, with the digest of what it says, its comments left out.

    A released migration never changes: a change is a further migration. Before the first release they are rewritten.
    """
    found = {}
    for room in _TABLES:
        spec = find_spec(room)  # the room itself need not be imported
        for directory in map(Path, spec.submodule_search_locations or () if spec else ()):
            for file in (*directory.glob("schema.sql"), *sorted(directory.glob("migrations/*.sql"))):
                said = re.sub(r"--.*", "", file.read_text("utf-8")).split()
                found[f"{room}/{file.name}"] = hashlib.sha256(" ".join(said).encode()).hexdigest()
    return found
