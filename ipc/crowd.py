"""The crowd at the socket: who has how many connections, and which one goes where there is no room for one more.

The uid with the most connections gives one up, the one that has idled longest; where none of them idles, and the
newcomer is somebody else, the one that has been busy longest. Every step takes as long among thousands as among two.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from ipc.connection import Connection

_LOOKS: Final = 8  # at connections that count as idle but still write their answer

Row = dict[Connection, None]  # in the order in which they joined it


class Crowd:
    """All connections, by uid; at most `cap` of them stay."""

    def __init__(self, cap: int) -> None:
        self.cap = cap
        self.count = 0
        self._idle: defaultdict[int, Row] = defaultdict(dict)
        self._busy: defaultdict[int, Row] = defaultdict(dict)
        self._sizes: dict[int, int] = {}  # connections by uid
        self._having: defaultdict[int, dict[int, None]] = defaultdict(dict)  # uids by their number of connections
        self._most = 0

    @property
    def is_full(self) -> bool:
        """Whether one more would be one too many."""
        return self.count >= self.cap

    def enter(self, newcomer: Connection) -> Connection | None:
        """Count a connection, which idles; returns the one that has to go, where there is none too many None."""
        uid = newcomer.caller.uid
        self._idle[uid][newcomer] = None
        self._resize(uid, 1)
        if self.count <= self.cap:
            return None
        (greediest, *_) = self._having[self._most]
        idle, busy = self._idle[greediest], self._busy[greediest]
        for guest in list(_first(idle, _LOOKS)):
            if guest is not newcomer and guest.idle_since is not None:
                return guest
            idle[guest] = idle.pop(guest)  # to the end of the row
        return newcomer if greediest == uid or not busy else next(iter(busy))

    def leave(self, guest: Connection) -> None:
        """Forget a connection; a second call does nothing."""
        uid = guest.caller.uid
        for rows in (self._idle, self._busy):
            if guest in rows.get(uid, ()):
                del rows[uid][guest]
                if not rows[uid]:
                    del rows[uid]
                self._resize(uid, -1)

    def begins(self, guest: Connection) -> None:
        """Note that a request of this connection is being answered."""
        uid = guest.caller.uid
        if guest in self._idle.get(uid, ()):
            del self._idle[uid][guest]
            self._busy[uid][guest] = None

    def ends(self, guest: Connection) -> None:
        """Note that it has been."""
        uid = guest.caller.uid
        if guest in self._busy.get(uid, ()):
            del self._busy[uid][guest]
            self._idle[uid][guest] = None

    def _resize(self, uid: int, by: int) -> None:
        before = self._sizes.get(uid, 0)
        now = before + by
        self.count += by
        self._having[before].pop(uid, None)
        if not self._having[before]:
            del self._having[before]
        if now:
            self._sizes[uid] = now
            self._having[now][uid] = None
        else:
            del self._sizes[uid]
        if now > self._most or (before == self._most and before not in self._having):
            self._most = now


def _first(row: Row, count: int) -> list[Connection]:
    return [guest for guest, _ in zip(row, range(count), strict=False)]
