"""Run a command that ends when the process that started it ends, however that one ends (`kill -9` too).

    python -I -S tether.py PARENT SIGNAL UID GID COMMAND…

The kernel sends SIGNAL (a number) to the command when the *thread* that started this program dies (prctl(2),
PR_SET_PDEATHSIG), so start it from a thread that lives as long as the process: the main one. With a UID other than -1
the command runs with that uid and gid and no other groups. The command keeps the pid of this program.

It is a program and not a `preexec_fn`, which may deadlock in a parent that has threads. The order below matters:
modules are imported while they are still readable, and the kernel drops the signal when the uid changes.
"""

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1
_KEEP = -1


def main(arguments: list[str]) -> None:
    """Drop privileges, bind this process to its parent, and become the command."""
    parent, number, uid, gid = map(int, arguments[:4])
    libc = ctypes.CDLL(None, use_errno=True)
    if uid != _KEEP:
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
    if libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before the signal was set
        sys.exit("the process that started this one has ended")
    os.umask(0o077)
    os.execv(arguments[4], arguments[4:])  # noqa: S606 - becoming that command is the purpose


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"cannot run {sys.argv[5]}: {error.strerror}")
