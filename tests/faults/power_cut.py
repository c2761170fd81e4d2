"""A power cut, from the record of what a program did to its files: what may be on the disk afterwards.

What was synced is there. Of the rest any part may be, in any order: each write falls into the sectors of 512 bytes that
it touches, and each piece is there or not. Names (created, renamed, removed) come in order, as a journal keeps them: a
first part of those that no sync has confirmed yet.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

_SECTOR: Final = 512
_ENTRY: Final = struct.Struct("<c3xII4xqq")  # as shim.c has it: kind, lengths of the paths, offset, length
_SHARES: Final = (0.0, 0.3, 0.7, 0.95)  # of what was not synced


class _Write(NamedTuple):
    """A piece of a write within one sector, or a truncation to `offset` (no data)."""

    offset: int
    data: bytes | None


@dataclass
class _File:
    """What is on the disk for certain, and what was done to the file since."""

    synced: bytearray = field(default_factory=bytearray)
    since: list[_Write] = field(default_factory=list)

    def settle(self) -> None:
        for write in self.since:
            _apply(self.synced, write)
        self.since.clear()

    def cut(self, chance: random.Random, share: float) -> int:
        """Keep a share of what was not synced; return how many pieces are gone."""
        survivors = [write for write in self.since if chance.random() < share]
        gone = len(self.since) - len(survivors)
        self.since = survivors
        self.settle()
        return gone


class Platter:
    """The files of a directory, as they lie there now and by a record of what is done to them from now on."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._durable = {str(file): _File(bytearray(file.read_bytes())) for file in _files(directory)}
        self._named = dict(self._durable)  # as the programs see it
        self._changes: list[dict[str, _File | None]] = []  # of names, unconfirmed

    def cut(self, record: Path, chance: random.Random) -> int:
        """Leave in the directory what a power cut leaves; return how many pieces of writes it took."""
        for kind, path, other, offset, data in _entries(record):
            self._note(kind, path, other, offset, data)
        self._confirm(chance.randrange(len(self._changes) + 1))
        for file in _files(self._directory):
            file.unlink()
        share, gone = chance.choice(_SHARES), 0
        for name, file in self._durable.items():
            gone += file.cut(chance, share)
            Path(name).touch(mode=0o600)
            Path(name).write_bytes(file.synced)
        return gone

    def _note(self, kind: str, path: str, other: str, offset: int, data: bytes) -> None:
        match kind:
            case "W":
                self._named[path].since += _pieces(offset, data)
            case "T":
                self._named[path].since.append(_Write(offset, None))
            case "S":
                if path in self._named:
                    self._named[path].settle()
                self._confirm(len(self._changes))
            case "C":
                self._rename({path: _File()})
            case "R":
                self._rename({path: None, other: self._named[path]})
            case "U":
                self._rename({path: None})

    def _rename(self, change: dict[str, _File | None]) -> None:
        self._changes.append(change)
        _change(self._named, change)

    def _confirm(self, count: int) -> None:
        for change in self._changes[:count]:
            _change(self._durable, change)
        self._changes.clear()


def _change(names: dict[str, _File], change: dict[str, _File | None]) -> None:
    for name, file in change.items():
        if file is None:
            names.pop(name, None)
        else:
            names[name] = file


def _apply(content: bytearray, write: _Write) -> None:
    end = write.offset + len(write.data or b"")
    if end > len(content):
        content.extend(bytes(end - len(content)))
    if write.data is None:
        del content[write.offset :]
    else:
        content[write.offset : end] = write.data


def _pieces(offset: int, data: bytes) -> Iterator[_Write]:
    start = 0
    while start < len(data):
        end = start + _SECTOR - (offset + start) % _SECTOR
        yield _Write(offset + start, data[start:end])
        start = end


def _entries(record: Path) -> Iterator[tuple[str, str, str, int, bytes]]:
    """Yield kind, path, second path, offset and data of each operation; the last may be cut short by a kill."""
    content, at = record.read_bytes(), 0
    while at + _ENTRY.size <= len(content):
        kind, first, second, offset, length = _ENTRY.unpack_from(content, at)
        at += _ENTRY.size
        size = length if kind == b"W" else 0
        path, other = content[at : at + first].decode(), content[at + first : at + first + second].decode()
        at += first + second
        if at + size > len(content):
            return
        yield kind.decode(), path, other, offset, content[at : at + size]
        at += size


def _files(directory: Path) -> list[Path]:
    """List the regular files below a directory but for SQLite's shared memory, which survives nothing."""
    return [file for file in directory.rglob("*") if file.is_file() and not file.name.endswith("-shm")]
