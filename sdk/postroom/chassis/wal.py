"""A write-ahead log on disk, read without SQLite: https://www.sqlite.org/fileformat2.html#walformat.

For SQLite a log ends at the first frame that is not what was written: it silently drops that one and all that follow.
That is right for what a power cut or a kill left unfinished, which was never confirmed to a caller, and wrong where a
frame was damaged later. The two differ: a transaction is on disk before the next one is written, so where a whole
transaction and the beginning of another follow the fault, the log was whole once.

In the last transaction of a log the two look the same: a damaged one like one that was never finished. Nor does a log
show that transactions were cut off its end. Only SQLite's index beside it, if a kill left that, knows how long it was.
"""

import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = 4096  # bytes: what every file of ours has
_HEADER: Final = 32  # bytes of a log
_FRAME_HEADER: Final = 24
_FRAME: Final = _FRAME_HEADER + PAGE
_INDEX: Final = struct.Struct("=16xI12x8s8x")  # https://www.sqlite.org/walformat.html: how many frames, and the salts
_BIG_ENDIAN: Final = b"\x37\x7f\x06\x83"  # begins a log whose checksums are
_GENERATIONS: Final = 2**20  # the first salt of frames that a new log has not overwritten yet may be older by so much


class Frame(NamedTuple):
    """A page that a transaction wrote; where the frame is not `sound`, it may say anything."""

    place: int  # in the log
    number: int  # of the page
    commits: bool  # it ends its transaction
    sound: bool


class Log:
    """The log of an open file descriptor, -1 for none."""

    def __init__(self, file: int) -> None:
        self._file = file

    def frames(self) -> Iterator[Frame]:
        """Yield the frames that were written since the log last started over.

        The checksum of a frame goes on from the one before. After a damaged one the next is checked by what that has
        written as its own, and by what it should have.
        """
        size = os.fstat(self._file).st_size if self._file >= 0 else 0
        places = range((size - _HEADER) // _FRAME)
        if not places:
            return
        header = read(self._file, 0, _HEADER)
        order = ">" if header[:4] == _BIG_ENDIAN else "<"
        salts = [read(self._file, _HEADER + place * _FRAME + 8, 8) for place in places]
        written, due = header[24:], _checksum(bytes(8), header[:24], order)
        current = header[16:24] if written == due else max(salts[:3], key=salts[:3].count)
        last = max((place for place in places if salts[place] == current), default=-1)
        while last + 1 < len(places) and any(salts[last + 1]) and not _is_older(salts[last + 1], current):
            last += 1  # its header is damaged
        for place in places[: last + 1]:
            frame = read(self._file, _HEADER + place * _FRAME, _FRAME)
            data = frame[:8] + frame[_FRAME_HEADER:]
            by_written = _checksum(written, data, order)
            due = by_written if due == written else _checksum(due, data, order)
            written = frame[16:24]
            sound = written in (by_written, due)
            due = written if sound else due
            number, pages = struct.unpack(">II", frame[:8])
            yield Frame(place, number, bool(pages), sound and salts[place] == current)

    def is_of_another(self, database: Path, page: int) -> bool:
        """Return whether it is another file's: the page never changes, and its last 8 bytes are each file's own."""
        if self._file < 0:
            return False
        with database.open("rb") as file:
            own = read(file.fileno(), (page - 1) * PAGE, PAGE)
        salts = read(self._file, _HEADER - 16, 8)
        for place in range((os.fstat(self._file).st_size - _HEADER) // _FRAME):
            header = read(self._file, _HEADER + place * _FRAME, _FRAME_HEADER)
            if header[8:16] == salts and int.from_bytes(header[:4], "big") == page:
                content = self.page_at(place)
                if content != own and content[:-8] == own[:-8]:
                    return True
        return False

    def frames_of_index(self, index: Path) -> int:
        """Return how many frames there were by SQLite's index of this log; 0 where the file has all of them."""
        try:
            with index.open("rb") as file:
                content = file.read(2 * _INDEX.size + 4)
            header = content[: _INDEX.size]
            frames, salts = _INDEX.unpack(header)
            (moved,) = struct.unpack_from("=I", content, 2 * _INDEX.size)
        except (OSError, struct.error):
            return 0
        own = read(self._file, _HEADER - 16, 8) if self._file >= 0 else salts
        return frames if content[_INDEX.size :].startswith(header) and salts == own and frames > moved else 0

    def page_at(self, place: int) -> bytes:
        """Return the page that a frame holds."""
        return read(self._file, _HEADER + place * _FRAME + _FRAME_HEADER, PAGE)

    @property
    def begins_soundly(self) -> bool:
        """Whether the header is what was written: where it is not, SQLite treats the log as empty."""
        header = read(self._file, 0, _HEADER)
        return _checksum(bytes(8), header[:24], ">" if header[:4] == _BIG_ENDIAN else "<") == header[24:]


def check_log(database: Path, own_page: int = 0) -> str | None:
    """Return what is wrong with the log of a file that nothing writes to, None where SQLite drops nothing of it.

    With the page that `Log.is_of_another` needs, that is looked at too: SQLite would write it into the file.
    """
    try:
        file = os.open(f"{database}-wal", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        log = Log(file)
        if own_page and log.is_of_another(database, own_page):
            return "the write-ahead log next to it is that of another file"
        fault = None if log.begins_soundly else "the header"
        on_disk = bool(fault)  # whether what precedes the frame, the header or a transaction, was on disk before it
        for frame in log.frames():
            if fault and on_disk and frame.sound:
                return f"{fault} of the write-ahead log is not what was written, and what was written later follows it"
            if not frame.sound and not fault:
                fault = f"frame {frame.place + 1}"
            on_disk = frame.commits
    finally:
        os.close(file)
    return None


def read(file: int, offset: int, size: int) -> bytes:
    """Read bytes; what the disk cannot read the second time either is zeros, and so counts as damaged."""
    for _ in range(2):
        with suppress(OSError):
            return os.pread(file, size, offset).ljust(size, b"\0")
    return bytes(size)


def _is_older(salts: bytes, current: bytes) -> bool:
    """Return whether a frame is of an older log, which this one overwrites: each log increments the first salt."""
    return 0 < int.from_bytes(current[:4], "big") - int.from_bytes(salts[:4], "big") < _GENERATIONS


def _checksum(before: bytes, data: bytes, order: str) -> bytes:
    first, second = struct.unpack(">II", before)
    for one, other in struct.iter_unpack(f"{order}II", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + other + first) & 0xFFFFFFFF
    return struct.pack(">II", first, second)
