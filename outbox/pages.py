"""The pages of a damaged SQLite file, read without SQLite, which gives up at the first wrong one.

https://www.sqlite.org/fileformat2.html: a page is a leaf of a table or of an index, an interior page, an overflow page
of a long record, or free. The promise: every record of a table that is whole in the file, or in its write-ahead log, is
found, whichever other bytes are damaged. One may be found more than once, the newest first: after the pages that the
tables lead to come those that a damaged page of the log should have replaced, and those that no page leads to any more.
"""

import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from postroom.chassis.wal import PAGE, Log, read

_FREE: Final = struct.Struct(">II")  # at byte 32 of it: the first page of the free list, and how many are free
_INDEX_WAY, _TABLE_WAY, _INDEX_LEAF, _TABLE_LEAF = 0x02, 0x05, 0x0A, 0x0D
_LEAST: Final = 489  # bytes of a record that stay in its page where it has further ones
_MOST_OF_ROW: Final = 4061  # bytes of a record of a table that lies whole in its page
_MOST_OF_KEY: Final = 1002  # of an index
_FURTHER: Final = PAGE - 4  # bytes of a record in a further page
_VARINT: Final = 9  # bytes at most
_LONGEST_HEADER: Final = 127  # bytes: of a record with few columns
_INTEGERS: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}  # bytes by type
_CONSTANTS: Final = {0: None, 8: 0, 9: 1}
_REAL: Final = 7
# A cell of a table: its size, its rowid, and a header that begins with the rowid, which is NULL there.
_CELL: Final = re.compile(rb"(?=[\x80-\xff]{0,8}[\x00-\x7f][\x80-\xff]{0,8}[\x00-\x7f][\x02-\x7f]\x00)")
_BLOB: Final = 12  # and every even number above; odd ones are text

Record = tuple[Any, ...]
K = TypeVar("K", bound=Any)
Shape = int  # of a table's records: how many columns, of which the first is the rowid


class Wrong(Exception):
    """These bytes are not what they should be."""


class Row(NamedTuple):
    """A record of a table."""

    shape: Shape
    rowid: int
    values: Record


class Pages:
    """A file with its write-ahead log, page by page; by `own_page` a log of another file is left out."""

    def __init__(self, database: Path, own_page: int) -> None:
        self._file = os.open(database, os.O_RDONLY | os.O_CLOEXEC)
        self._in_file = os.fstat(self._file).st_size // PAGE
        try:
            self._log_file = os.open(f"{database}-wal", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._log_file = -1
        self._log = Log(self._log_file)
        is_of_another = self._log.is_of_another(database, own_page)
        if is_of_another:
            self._log = Log(-1)
        self.damaged_frames = 0  # pages in the log that are not what was written
        self._unsound: set[int] = set()
        self._strays: list[int] = []
        self._commits: list[int] = []  # places of sound frames that end a transaction
        self._length = 0  # of the log, in frames
        self._frames = self._read_log()
        written = self._log.frames_of_index(Path(f"{database}-shm"))
        self.cut_off = is_of_another or self._length < written  # the log lacks transactions
        self.count = max(self._in_file, *self._frames, 0)
        self._newest = lru_cache(maxsize=1024)(lambda number: next(self._contents(number)))

    def close(self) -> None:
        """Close both."""
        os.close(self._file)
        if self._log_file >= 0:
            os.close(self._log_file)

    def newest(self, number: int) -> bytes:
        """Return the newest content of a page; raises `Wrong` for a page that does not exist."""
        if not 0 < number <= self.count:
            raise Wrong
        return self._newest(number)

    def older(self, number: int) -> Iterator[bytes]:
        """Yield the earlier contents of a page that is damaged in the log."""
        contents = self._contents(number)
        if any(place in self._unsound for place in self._frames.get(number, ())):
            next(contents)
            yield from contents

    def _contents(self, number: int) -> Iterator[bytes]:
        for place in reversed(self._frames.get(number, ())):
            yield self._log.page_at(place)
        if number <= self._in_file or number not in self._frames:
            yield read(self._file, (number - 1) * PAGE, PAGE)

    def is_current(self, number: int) -> bool:
        """Return whether the newest sound content of a page that every transaction writes is of the last one.

        It is not where damaged frames follow it: two together may hide the end of its transaction, and the next one.
        """
        sound = [place for place in self._frames.get(number, ()) if place not in self._unsound]
        later = {place for place in self._unsound if not sound or place > sound[-1]}
        hides_none = all(place + 1 not in later for place in later)
        return not later or bool(
            sound and hides_none and not any(sound[-1] <= end < place for end in self._commits for place in later)
        )

    def strays(self) -> Iterator[bytes]:
        """Yield the contents of frames of the log whose page number is damaged."""
        for place in self._strays:
            yield self._log.page_at(place)

    def _read_log(self) -> dict[int, list[int]]:
        """Return the places in the log of each page that it holds, the oldest first.

        What follows the last commit was never confirmed to a caller, and is left out, unless the commit itself may be
        damaged.
        """
        frames: dict[int, list[int]] = {}
        uncommitted: list[tuple[int, int]] = []
        for place, number, committed, sound in self._log.frames():
            self._length = place + 1
            if not sound:
                self._unsound.add(place)
            if sound or 0 < number <= self._in_file + self._length:
                uncommitted.append((number, place))
            else:
                self._strays.append(place)
            if committed and sound:
                self._commits.append(place)
            if committed or not sound:
                for each, where in uncommitted:
                    frames.setdefault(each, []).append(where)
                uncommitted.clear()
        self.damaged_frames = len(self._unsound)
        return frames


class Records:
    """The records in the pages that these roots lead to, and in those that no page leads to any more.

    `roots` says of each whether it is a table's; the others are indexes'.
    """

    def __init__(self, pages: Pages, roots: Mapping[int, bool], shapes: Collection[Shape]) -> None:
        self._pages = pages
        self._shapes = frozenset(shapes)
        self._leaves: list[int] = []  # of tables, or what should be one
        self._whole = True  # no page that should lead to others was damaged
        self._shape_of: dict[int, Shape] = {}  # of the rows of a page
        reached: set[int] = set()
        for root, table in roots.items():
            self._walk(root, reached, table=table)
        self._lost = self._orphans(reached)

    def rows(self, shape: Shape) -> Iterator[Row]:
        """Yield the rows of the tables whose rows have this shape, the newest of each first."""
        for number in self._leaves:
            if self._shape_of.get(number, shape) == shape:
                for row in self._rows_of(self._pages.newest(number)):
                    self._shape_of[number] = row.shape
                    if row.shape == shape:
                        yield row
        older = (content for number in self._leaves for content in self._pages.older(number))
        lost = (self._pages.newest(number) for number in self._lost)
        for content in chain(self._pages.strays(), older, lost):
            yield from (row for row in self._rows_of(content) if row.shape == shape)

    def keys(self, root: int) -> Iterator[list[Record]]:
        """Yield the keys of an index, those of one page together, as far as sound pages lead to them."""
        waiting, reached = [root], {0}
        while waiting:
            number = waiting.pop()
            if number in reached:
                continue
            reached.add(number)
            with suppress(Wrong):
                content = self._pages.newest(number)
                if content[0] == _INDEX_WAY:
                    waiting += _children(content)
                if content[0] in (_INDEX_WAY, _INDEX_LEAF):
                    yield [key for cell in _pointers(content) if (key := self._key(content, cell)) is not None]

    def _walk(self, root: int, reached: set[int], *, table: bool) -> None:
        """Find the leaves that a root leads to."""
        way, leaf = (_TABLE_WAY, _TABLE_LEAF) if table else (_INDEX_WAY, _INDEX_LEAF)
        waiting = [root]
        while waiting:
            number = waiting.pop()
            if number in reached:
                continue
            try:
                content = self._pages.newest(number)
            except Wrong:
                self._whole = False
                continue
            reached.add(number)
            if content[0] == way:
                waiting += _children(content)
            sound = content[0] == leaf or (content[0] == way and _adds_up(content))
            self._whole = self._whole and sound
            if table and (content[0] == leaf or not sound):
                self._leaves.append(number)

    def _orphans(self, reached: set[int]) -> list[int]:
        """Return the pages that may be leaves of tables, and that neither a page nor the free list leads to.

        Where all pages are led to and the free list is damaged, they are free pages.
        """
        free = self._free()
        if free is None and self._whole:
            return []
        known = reached | (free or set())
        others = (0, _INDEX_WAY, _TABLE_WAY, _INDEX_LEAF)  # 0 begins a further page of a record
        return [
            number
            for number in range(2, self._pages.count + 1)
            if number not in known and self._pages.newest(number)[0] not in others
        ]

    def _free(self) -> set[int] | None:
        """Return the free pages, None where their list is damaged."""
        free: set[int] = set()
        try:
            trunk, count = _FREE.unpack_from(self._pages.newest(1), 32)
            while trunk and trunk not in free:
                content = self._pages.newest(trunk)
                following, leaves = _FREE.unpack_from(content)
                if leaves > PAGE // 4 - 2:
                    return None
                free |= {trunk, *struct.unpack_from(f">{leaves}I", content, 8)}
                trunk = following
        except Wrong:
            return None
        return free if len(free) == count else None

    def _rows_of(self, content: bytes) -> Iterator[Row]:
        """Yield the rows of a page: those of its pointers, and where those do not add up, all that can be found."""
        found: set[int] = set()
        if content[0] == _TABLE_LEAF:
            for cell in _pointers(content):
                if (row := self._row(content, cell)) is not None:
                    found.add(cell)
                    yield row
            if _adds_up(content):
                return
        for cell in (match.start() for match in _CELL.finditer(content)):
            if cell not in found and (row := self._row(content, cell)) is not None:
                yield row

    def _row(self, content: bytes, cell: int) -> Row | None:
        """Return the row in this cell, None where it has none of these shapes."""
        try:
            size, after = _varint(content, cell)
            rowid, after = _varint(content, after)
            types, _ = _types(content, after)
            shape = len(types)
            if types[0] != 0 or shape not in self._shapes:
                return None
            if sum(map(_size, types)) + _varint(content, after)[0] != size:
                return None
            return Row(shape, rowid, _decode(self._record(content, after, size, _MOST_OF_ROW)))
        except Wrong:
            return None

    def _key(self, content: bytes, cell: int) -> Record | None:
        try:
            size, after = _varint(content, cell + (4 if content[0] == _INDEX_WAY else 0))
            return _decode(self._record(content, after, size, _MOST_OF_KEY))
        except Wrong:
            return None

    def _record(self, content: bytes, start: int, size: int, most: int) -> bytes:
        """Put a record together from its page and the further ones."""
        here = _in_page(size, most)
        if start + here > PAGE:
            raise Wrong
        record = [content[start : start + here]]
        following = int.from_bytes(content[start + here : start + here + 4], "big")
        for left in range(size - here, 0, -_FURTHER):
            further = self._pages.newest(following)
            record.append(further[4 : 4 + min(left, _FURTHER)])
            following = int.from_bytes(further[:4], "big")
        return b"".join(record)


def _count(content: bytes) -> int:
    return int.from_bytes(content[3:5], "big")


def _pointers(content: bytes) -> Iterator[int]:
    """Yield where the cells of a page begin, as far as that is within the page."""
    start = 12 if content[0] in (_TABLE_WAY, _INDEX_WAY) else 8
    for place in range(start, min(start + 2 * _count(content), PAGE - 1), 2):
        cell = int.from_bytes(content[place : place + 2], "big")
        if start <= cell < PAGE - 3:
            yield cell


def _children(content: bytes) -> Iterator[int]:
    """Yield the pages that a page leads to, the last of them first."""
    yield int.from_bytes(content[8:12], "big")
    for cell in reversed(list(_pointers(content))):
        yield int.from_bytes(content[cell : cell + 4], "big")


def _adds_up(content: bytes) -> bool:
    """Return whether a page has as many cells as it says, and each byte of its content is in a cell or free."""
    way = content[0] in (_TABLE_WAY, _INDEX_WAY)
    index = content[0] in (_INDEX_WAY, _INDEX_LEAF)
    cells = list(_pointers(content))
    try:
        used = content[7] + sum(_extent(content, cell, way=way, index=index) for cell in cells)
        free = int.from_bytes(content[1:3], "big")
        while free:
            following, size = struct.unpack_from(">HH", content, free)
            used += size
            if following and following <= free:
                return False
            free = following
    except (Wrong, struct.error):
        return False
    return len(cells) == _count(content) and used == PAGE - int.from_bytes(content[5:7], "big")


def _extent(content: bytes, cell: int, *, way: bool, index: bool) -> int:
    """Return how many bytes of its page a cell takes."""
    after = cell + (4 if way else 0)
    if way and not index:
        return _varint(content, after)[1] - cell
    size, after = _varint(content, after)
    if not index:
        _, after = _varint(content, after)
    most = _MOST_OF_KEY if index else _MOST_OF_ROW
    return max(4, after + _in_page(size, most) + (4 if size > most else 0) - cell)


def _in_page(size: int, most: int) -> int:
    """Return how many bytes of a record lie in its page, which holds a whole one of up to `most`."""
    rest = _LEAST + (size - _LEAST) % _FURTHER
    return size if size <= most else rest if rest <= most else _LEAST


def _varint(content: bytes, start: int) -> tuple[int, int]:
    value = 0
    for place in range(start, min(start + _VARINT, len(content))):
        byte = content[place]
        if place == start + _VARINT - 1:
            value = value << 8 | byte
            return value - (value >> 63 << 64), place + 1  # signed
        value = value << 7 | byte & 0x7F
        if byte < 0x80:  # noqa: PLR2004 - the last byte
            return value, place + 1
    raise Wrong


def _types(content: bytes, start: int) -> tuple[list[int], int]:
    """Return the types of a record's columns, and where its values begin."""
    size, after = _varint(content, start)
    end = start + size
    if size > _LONGEST_HEADER:
        raise Wrong
    types = []
    while after < end:
        kind, after = _varint(content, after)
        types.append(kind)
    if after != end or not types:
        raise Wrong
    return types, end


def _size(kind: int) -> int:
    if kind >= _BLOB:
        return (kind - _BLOB) // 2
    if kind in _CONSTANTS:
        return 0
    if kind == _REAL:
        return 8
    if kind not in _INTEGERS:
        raise Wrong
    return _INTEGERS[kind]


def _decode(record: bytes) -> Record:
    types, place = _types(record, 0)
    values: list[Any] = []
    for kind in types:
        content = record[place : place + _size(kind)]
        place += len(content)
        if kind in _CONSTANTS:
            values.append(_CONSTANTS[kind])
        elif kind == _REAL:
            values.append(struct.unpack(">d", content)[0])
        elif kind in _INTEGERS:
            values.append(int.from_bytes(content, "big", signed=True))
        elif kind % 2 == 0:
            values.append(content)
        else:
            try:
                values.append(content.decode())
            except UnicodeDecodeError as error:
                raise Wrong from error
    if place != len(record):
        raise Wrong
    return tuple(values)


def in_order(keys: Sequence[K]) -> list[tuple[K, bool]]:
    """Return the keys of a page, each with whether it is between its neighbours as it should be."""
    wrong = {place + step for place, (one, other) in enumerate(pairwise(keys)) if not one < other for step in (0, 1)}
    return [(key, place not in wrong) for place, key in enumerate(keys)]
