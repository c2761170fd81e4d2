"""Who is at the other end of a connection, and what they may do (docs/contract/send.md#send-5).

The uid and gid of a Unix peer are read once, when the connection is accepted, from the kernel (`SO_PEERCRED`): they are
those of the process that called connect(2). Whoever presents the local token over TCP can read a file that only the
daemon's user can read, and counts as that user.

`DestinationRule` says which destinations the config lets callers use (docs/contract/send.md#send-19).
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Awaitable, Collection, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from outbox import Outbox
from outbox.model import AcceptedRow, Caller
from postroom._wire.message import PreparedSend
from postroom.chassis.ownership import user_name
from postroom.errors import NotPermitted, PostroomError

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


class DestinationRule:
    """Allows what matches one of its shell patterns, such as `topic:orders*`; without patterns everything."""

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)
        self._matches = lru_cache(maxsize=1024)(self._match)

    def check(self, destination: str) -> None:
        """Raise `NotPermitted` (403) for a destination that the config does not allow."""
        if not self.allows(destination):
            raise _refusal(destination)

    def accept(
        self, outbox: Outbox, sends: Sequence[PreparedSend], caller: Caller
    ) -> Awaitable[list[AcceptedRow | PostroomError]]:
        """Accept the sends that the config allows; one that is on disk already is answered, whatever it allows now.

        The others have their refusal (403) in their place.
        """
        return self._accept_allowed(outbox, sends, caller) if self._patterns else outbox.accept(sends, caller)

    async def _accept_allowed(
        self, outbox: Outbox, sends: Sequence[PreparedSend], caller: Caller
    ) -> list[AcceptedRow | PostroomError]:
        allowed = [send for send in sends if self.allows(send.destination)]
        others = [send for send in sends if not self.allows(send.destination)]
        accepted = iter(await outbox.accept(allowed, caller) if allowed else ())
        known = iter(await outbox.known(others, caller) if others else ())
        return [
            next(accepted) if self.allows(send.destination) else next(known) or _refusal(send.destination)
            for send in sends
        ]

    def allows(self, destination: str) -> bool:
        """Tell whether callers may send there."""
        return not self._patterns or self._matches(destination)

    def _match(self, destination: str) -> bool:
        return any(fnmatchcase(destination, pattern) for pattern in self._patterns)


def _refusal(destination: str) -> NotPermitted:
    detail = f"this daemon may not send to {destination} (config: allow_destinations)"
    return NotPermitted.of("destination_not_allowed", detail, field="to")
