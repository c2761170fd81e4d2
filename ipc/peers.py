"""Who is at the other end of a connection, and what they may do (docs/contract/send.md#send-5).

The uid and gid of a Unix peer are read once, when the connection is accepted, from the kernel (`SO_PEERCRED`): they are
those of the process that called connect(2). Whoever presents the local token over TCP can read a file that only the
daemon's user can read, and counts as that user.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Collection
from typing import Final

from outbox.model import Caller
from postroom.chassis.ownership import user_name

_UCRED: Final = struct.Struct("3i")  # struct ucred: pid, uid, gid
_ROOT: Final = 0


def peer_of(sock: socket.socket) -> Caller:
    """Return the peer of a connected socket."""
    if sock.family != socket.AF_UNIX:
        return Caller(os.getuid(), os.getgid(), "local token")
    _, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Caller(uid, gid, user_name(uid))


class Policy:
    """Who may connect and who may operate.

    Without a list everyone that the socket's mode allows may call, and root and the daemon's own user may operate.
    """

    def __init__(self, allow_uids: Collection[int] = (), operators: Collection[int] = ()) -> None:
        self._allowed = frozenset(allow_uids)
        self._operators = frozenset(operators) or frozenset({_ROOT, os.getuid()})

    def may_call(self, caller: Caller) -> bool:
        """Tell whether this peer may use the socket at all; an operator always may."""
        return not self._allowed or caller.uid in self._allowed or caller.uid in self._operators

    def may_operate(self, caller: Caller) -> bool:
        """Tell whether this peer may see and repair everybody's rows."""
        return caller.uid in self._operators
