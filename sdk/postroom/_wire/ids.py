"""Identifiers: minting ULIDs, checking the ids that callers bring, and the mesh that a subject names.

A `client_message_id` is never released once a row holds it (docs/contract/send.md#send-30), so its form is checked
before anything is written. Minted ids are ULIDs in time order, which keeps every index append-only.
"""

import os
import secrets
import time
from threading import RLock
from typing import Final

MAX_ID_LENGTH: Final = 128  # characters
ID_RULE: Final = f"1 to {MAX_ID_LENGTH} characters of A-Za-z0-9._:~-"
_CROCKFORD: Final = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # base 32 without the letters that look like digits
_PAIRS: Final = [high + low for high in _CROCKFORD for low in _CROCKFORD]  # 10 bits each


def now_ms() -> int:
    """Return the time in ms since the epoch."""
    return time.time_ns() // 1_000_000


class _Mint:
    """Mints ULIDs that grow strictly within a process: fresh randomness each millisecond, plus one within it.

    So ids sort in the order they were made in, also where the clock is set back, and only one id per millisecond pays
    for randomness and its encoding. A forked process starts over, or it would mint its parent's next ids.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._lock = RLock()  # taken again by a signal handler or a destructor that sends amid a send
        self._next = (-1, "", 0)  # a millisecond, and its next id in two parts: the 16 characters that encode the time
        # and the upper 30 bits of randomness, and the lower 50 bits

    def take(self, count: int) -> tuple[str, int]:
        """Take so many ids that follow one another; returns the head of all of them, and the tail of the first."""
        now = now_ms()
        with self._lock:
            while True:
                found = millisecond, head, tail = self._next
                if now > millisecond:  # else it is the same, or the clock was set back
                    chance = secrets.randbits(79)
                    upper = now << 30 | chance >> 49
                    head = "".join([_PAIRS[upper >> shift & 1023] for shift in range(70, -1, -10)])
                    tail = chance & (1 << 49) - 1  # the top bit stays free, so that counting up never overflows
                after = (max(now, millisecond), head, tail + count)
                if self._next is found:  # else such a handler took some meanwhile; none can come before the next line
                    self._next = after
                    return head, tail


_mint: Final = _Mint()
os.register_at_fork(after_in_child=_mint.reset)


def new_id() -> str:
    """Mint a ULID: 26 characters of Crockford base 32, in the order they were made in."""
    head, tail = _mint.take(1)
    return f"{_stem(head, tail)}{_PAIRS[tail & 1023]}"


def new_ids(count: int) -> list[str]:
    """Mint so many, each right after the one before."""
    head, tail = _mint.take(count)
    minted: list[str] = []
    while len(minted) < count:
        stem, lowest = _stem(head, tail), tail & 1023
        last = _PAIRS[lowest : lowest + count - len(minted)]
        minted += [stem + pair for pair in last]
        tail += len(last)
    return minted


def _stem(head: str, tail: int) -> str:
    """Return all but the last two characters of an id."""
    pairs = _PAIRS
    return f"{head}{pairs[tail >> 40]}{pairs[tail >> 30 & 1023]}{pairs[tail >> 20 & 1023]}{pairs[tail >> 10 & 1023]}"


def ulid_number(ulid: str) -> int:
    """Return the number (128 bits) that a ULID writes."""
    number = 0
    for digit in ulid:
        number = number << 5 | _CROCKFORD.index(digit)
    return number


def ulid_of(number: int) -> str:
    """Write a number of 128 bits as a ULID."""
    return "".join([_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5)])


def context_of(subject: str) -> str:
    """Return the mesh of a subject: the first word, or the second where the subject is a command's."""
    words = subject.split(".")
    return words[1] if words[0] == "cmd" and len(words) > 1 else words[0]
