"""Counts, times and what is wrong with JSON, as people read them, on a terminal, a page and in a log alike."""

import re
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import msgspec
from msgspec import inspect

from postroom._wire.names import in_words

_MANY: Final = re.compile(r"(?<![aeiou])y$")  # the end of a word whose plural is `…ies`
_AROUND: Final = 30  # characters that are quoted before and after
NOT_STORABLE: Final = re.compile("[\0\ud800-\udfff]")
CANNOT_STORE: Final = "contains a NUL or a lone surrogate, which no database can store"
_HALF: Final = re.compile(  # an escape that is half of a surrogate pair, without the other
    rb"\\u[Dd][89ABab][0-9A-Fa-f]{2}(?!\\u[Dd][C-Fc-f])|(?<!\\u[Dd][89ABab]..)\\u[Dd][C-Fc-f][0-9A-Fa-f]{2}", re.DOTALL
)
_LENGTH: Final = re.compile(r"Expected `str` of length ([<>])= (\d+)")  # this and what follows: sentences of msgspec
_NAMED: Final = re.compile(r"field `(.*)`", re.DOTALL)
_STEP: Final = re.compile(r"[^.\[\]]+|\.\.\.")  # of a path: a field, the place in a list, `...` for any key
_FEW, _MINUTE, _HOUR, _DAY = 10, 60, 3600, 86_400  # seconds


def counted(count: int, one: str, many: str | None = None) -> str:
    """Write a count with its noun: `1 delivery`, `2,000 deliveries`; `many` is an irregular plural."""
    return f"{count:,} {one if count == 1 else many or _MANY.sub('ie', one) + 's'}"


def span(seconds: float) -> str:
    """Write a duration or an age: `40 ms`, `3.2 s`, `12 min`, `5 h`, `9 d`."""
    for most, unit, name in (
        (1, 0.001, "ms"),
        (2 * _MINUTE, 1, "s"),
        (2 * _HOUR, _MINUTE, "min"),
        (2 * _DAY, _HOUR, "h"),
    ):
        if seconds < most:
            return f"{seconds / unit:.1f} {name}" if unit == 1 and seconds < _FEW else f"{seconds / unit:.0f} {name}"
    return f"{seconds / _DAY:.0f} d"


def ago(moment: datetime | None) -> str | None:
    """Write how long ago a moment was, as `span` does."""
    return None if moment is None else span(max(0.0, (datetime.now(UTC) - moment).total_seconds()))


def when(moment: datetime) -> str:
    """Write a moment: to the second, in UTC."""
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def not_text(error: UnicodeEncodeError) -> str:
    """Say where a text has half of a surrogate pair, as an argument of a command line does that is not UTF-8."""
    around = error.object[max(0, error.start - _AROUND) : error.end + _AROUND]
    return f"{around!r} is not UTF-8 text"


def value_fault(error: Exception) -> str:
    """Return why a value cannot be written as JSON, in words where `error` says it in Python's."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return not_text(error) if isinstance(error, UnicodeEncodeError) else str(error)


def json_fault(error: Exception, data: bytes) -> str:
    """Return what is wrong with `data`, which could not be decoded for `error`.

    msgspec takes the half of a surrogate pair for the end of the data. A program that cut a text in two wrote it, and
    would look for bytes that were lost on the way.
    """
    if not data.strip():
        return "it is empty"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        try:
            data.decode()
        except UnicodeDecodeError as fault:  # the position of `error` is one in a part of `data`
            return f"0x{data[fault.start]:02x} is not UTF-8 (byte {fault.start})"
    sentence = str(error)
    if "truncated" in sentence or "surrogate" in sentence:
        half = _HALF.search(data.replace(b"\\\\", b""))  # an escaped backslash escapes nothing
        if half is not None:
            return f"{half[0].decode()} is half of a surrogate pair: write both halves, as in \\ud83d\\ude00"
        if "truncated" in sentence:
            return f"it ends too early, after {counted(len(data), 'byte')}"
    return sentence


def shape_fault(error: msgspec.ValidationError, kind: Any) -> tuple[str | None, str]:
    """Return which field makes JSON no `kind`, and a sentence that names it and says what could be there."""
    sentence, _, path = str(error).partition(" - at `$")
    field = path.rstrip("`").lstrip(".")
    named = _NAMED.search(sentence)
    if named and sentence.startswith("Object contains unknown"):
        sentence = f"unknown field `{named[1]}`{_instead(named[1], kind, field)}"
    elif length := _LENGTH.fullmatch(sentence):
        sentence = f"Expected {'at most' if length[1] == '<' else 'at least'} {length[2]} characters"
    elif sentence.startswith("Invalid enum value"):
        values = [each.values for each in _at(kind, field) if isinstance(each, inspect.LiteralType)]
        sentence += f": one of {', '.join(map(str, chain(*values)))}"
    sentence = in_words(sentence)
    if field:
        return field, f"{field}: {sentence}"
    return named[1] if named else None, sentence


def _instead(name: str, kind: Any, field: str) -> str:
    """Say what there is instead of an unknown name."""
    structs = [each.fields for each in _at(kind, field) if isinstance(each, inspect.StructType)]
    known = [each.encode_name for each in chain(*structs)]
    close = get_close_matches(name[:_AROUND], known, n=1)
    return f"; did you mean `{close[0]}`?" if close else f"; the fields are {', '.join(known)}"


def _at(kind: Any, field: str) -> Iterator[inspect.Type]:
    """Yield what may stand at `field` of a `kind`, as `limits.rows` or `parts[0]`; each of a union."""
    return _below(_type_info(kind), _STEP.findall(field))


_type_info: Final = lru_cache(maxsize=256)(inspect.type_info)


def _below(kind: inspect.Type, steps: Sequence[str]) -> Iterator[inspect.Type]:
    match kind:
        case inspect.Metadata(type=inner):
            yield from _below(inner, steps)
        case inspect.UnionType(types=types):
            for each in types:
                yield from _below(each, steps)
        case _ if not steps:
            yield kind
        case inspect.StructType(fields=fields):
            for one in fields:
                if one.encode_name == steps[0]:
                    yield from _below(one.type, steps[1:])
        case inspect.CollectionType(item_type=inner) | inspect.DictType(value_type=inner):
            yield from _below(inner, steps[1:])
