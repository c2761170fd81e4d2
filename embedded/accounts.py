"""Whom Postgres runs as: it refuses to run as root, so root starts it as `nobody`."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

from embedded.errors import EmbeddedError
from embedded.processes import Account

_UNPRIVILEGED = "nobody"


def unprivileged_account() -> Account | None:
    """Return the account for a server that refuses root; None where this user is not root and runs it itself."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam(_UNPRIVILEGED)
    except KeyError:
        raise EmbeddedError(f"root starts Postgres as the user {_UNPRIVILEGED}, which this machine lacks") from None
    return Account(entry.pw_uid, entry.pw_gid, entry.pw_name)


def user_name() -> str:
    """Return this user's name; Postgres looks it up as well, so one without a name is an error."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        raise EmbeddedError(f"uid {os.geteuid()} has no entry in the user database, which Postgres needs") from None


def first_barrier(path: Path, account: Account) -> Path | None:
    """Return the first directory on the way to `path` that `account` may not enter (access lists are not read)."""
    return next((step for step in [*reversed(path.parents), path] if not _may(step, account, stat.S_IXOTH)), None)


def may_run(program: Path, account: Account) -> bool:
    """Say whether `account` reaches, reads and runs `program`."""
    real = program.resolve()
    return first_barrier(real, account) is None and _may(real, account, stat.S_IROTH)


def open_to_all(tree: Path) -> None:
    """Let everybody read a tree of programs, enter its directories, and run what its owner may run."""
    for path in (tree, *tree.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode | 0o555 if mode & stat.S_IXUSR else mode | 0o444)


def _may(path: Path, account: Account, bit: int) -> bool:
    """Check one permission, given as the bit for others, for owner, group or others: whoever the account is."""
    status = path.stat()
    shift = 6 if status.st_uid == account.uid else 3 if status.st_gid == account.gid else 0
    return bool(status.st_mode & (bit << shift))
