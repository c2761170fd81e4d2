"""From Arrow batches to messages: one `SendRequest` for each row, with its id, in slices of `batch_size` rows.

Fails with `InvalidMessage` that names the row or the column where a row has no id, no destination, or a value that
can't be sent; nothing of that slice has been sent then. With `on_refused` only that row is left out, and reported.

The form of the values of Spark's types in JSON, and in an id (docs/spark.md, "Types"), is exact and independent of the
session: a timestamp is in UTC in any session time zone, a decimal keeps its digits as text, bytes are base64, and
doubles that JSON cannot express (NaN, Infinity) are text.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import msgspec
from pyspark import TaskContext
from pyspark.sql import types
from pyspark.sql.pandas.types import to_arrow_type

from postroom._wire.ids import MAX_ID_LENGTH
from postroom._wire.message import SendRequest, refuse_duplicate_keys
from postroom.errors import InvalidMessage
from postroom.spark.options import WritePlan

if TYPE_CHECKING:
    import pyarrow as pa

_TAG_DIGITS: Final = 16  # of the namespace's hash
_READABLE: Final = re.compile(rf"[A-Za-z0-9._:-]{{1,{MAX_ID_LENGTH - _TAG_DIGITS - 1}}}")
Refuse: TypeAlias = Callable[[tuple[str, ...], InvalidMessage], None]

_COLUMNS_SHOWN: Final = 5  # of a row that has no key

Convert = Callable[[Any], Any]

_NOT_FINITE: Final = {math.inf: "Infinity", -math.inf: "-Infinity"}

_encode = msgspec.json.Encoder().encode


class RowIds:
    """Makes the ids of one namespace: `<hash of the namespace>:<the columns' texts, joined by colons>` (`SPARK_ID`).

    Ids that follow the key stay readable, and keep the order of the keys, which is good for the outbox's index. Texts
    that an id cannot hold, or that are too long for it, are hashed: `<hash>:~<hash of the texts>`. No two keys share an
    id, since a readable text has neither a colon nor a tilde.
    """

    def __init__(self, namespace: str) -> None:
        self._tag = hashlib.sha256(namespace.encode()).hexdigest()[:_TAG_DIGITS] + ":"

    def id_of(self, texts: Sequence[str]) -> str:
        """Return the `client_message_id` of the row whose id columns hold `texts`."""
        joined = ":".join(texts)
        if _READABLE.fullmatch(joined) and joined.count(":") == len(texts) - 1:
            return self._tag + joined
        return f"{self._tag}~{hashlib.sha256(msgspec.json.encode(list(texts))).hexdigest()}"


class Row(NamedTuple):
    """One row on its way: the texts of its id columns, and its message."""

    key: tuple[str, ...]
    request: SendRequest


class RowReader:
    """Makes the messages of a write."""

    def __init__(self, plan: WritePlan, refuse: Refuse | None = None) -> None:
        """Hand each row that can't be sent to `refuse`, with its key (empty where it has none) and why."""
        self._plan = plan
        self._refuse = refuse
        self._read = 0  # rows of the task before those that are being read
        self._ids = RowIds(plan.namespace)
        self._schema = plan.schema.toNullable()  # Arrow has no type for `array()`: nulls that may not be null
        self._converters = {field.name: converter(field.dataType) for field in plan.schema}

    def slices(self, batch: pa.RecordBatch) -> Iterator[list[Row]]:
        """Yield the rows of a batch, `batch_size` at a time, so that not all large bodies are in memory twice."""
        for start in range(0, batch.num_rows, self._plan.options.batch_size):
            part = batch.slice(start, self._plan.options.batch_size)
            try:
                rows = self._rows(_Columns(part, self._schema, self._converters, self._read))
                self._read += part.num_rows
            except InvalidMessage:
                if self._refuse is None:
                    raise
                rows = list(self._one_by_one(part, self._refuse))
            yield rows

    def _one_by_one(self, part: pa.RecordBatch, refuse: Refuse) -> Iterator[Row]:
        """Yield the rows of a slice that can be sent."""
        for index in range(part.num_rows):
            columns = _Columns(part.slice(index, 1), self._schema, self._converters, self._read)
            try:
                yield from self._rows(columns)
            except InvalidMessage as error:
                try:
                    key = self._keys(columns)[0]
                except InvalidMessage:  # it has none
                    key = ()
                refuse(key, error)
            self._read += 1

    def _rows(self, columns: _Columns) -> list[Row]:
        priority = self._plan.priority_column
        keys = self._keys(columns)
        texts, encoded = self._bodies(columns)
        return [
            Row(
                key,
                SendRequest(
                    to=to,
                    body=text,
                    body_base64=data,
                    meta=meta,
                    priority=urgency,
                    client_message_id=self._ids.id_of(key),
                ),
            )
            for key, to, text, data, meta, urgency in zip(
                keys,
                self._destinations(columns, keys),
                texts,
                encoded,
                self._metas(columns, keys),
                repeat(self._plan.options.priority)
                if priority is None
                else ("next" if each is None else each for each in columns.raw(priority)),
                strict=False,  # what is the same for all rows repeats without end
            )
        ]

    def _keys(self, columns: _Columns) -> list[tuple[str, ...]]:
        ids = self._plan.ids
        values = [columns.raw(name) for name in ids]
        for name, column in zip(ids, values, strict=True):
            if None in column:
                row = columns.place(column.index(None))
                raise _unusable(f"a row has no id: its `{name}`, which the option `id` names, is null. It is {row}")
        return list(zip(*([id_text(value) for value in column] for column in values), strict=True))

    def _destinations(self, columns: _Columns, keys: Sequence[tuple[str, ...]]) -> Iterator[str]:
        if self._plan.options.to_column is None:
            return repeat(self._plan.options.to or "")
        destinations = columns.raw(self._plan.options.to_column)
        if None in destinations:
            row = key_text(self._plan, keys[destinations.index(None)])
            raise _unusable(f"the row {row} has no destination: its `{self._plan.options.to_column}` is null")
        return iter(destinations)

    def _bodies(self, columns: _Columns) -> tuple[Iterator[str | None], Iterator[str | None]]:
        """Return the bodies as text and as base64; a row has one of them, or none where its column is null."""
        name = self._plan.options.body
        if name is None:
            names = columns.names
            rows = zip(*map(columns.json, names), strict=True)
            return iter([_encode(dict(zip(names, row, strict=True))).decode() for row in rows]), repeat(None)
        match self._plan.schema[name].dataType:
            case types.StringType():
                return iter(columns.raw(name)), repeat(None)
            case types.BinaryType():
                values = columns.raw(name)
                return repeat(None), iter([None if v is None else base64.b64encode(v).decode() for v in values])
        return iter([None if v is None else _encode(v).decode() for v in columns.json(name)]), repeat(None)

    def _metas(self, columns: _Columns, keys: Sequence[tuple[str, ...]]) -> Iterator[dict[str, Any] | None]:
        name = self._plan.options.meta
        if name is None:
            return repeat(None)
        if isinstance(self._plan.schema[name].dataType, types.StringType):
            return iter([self._meta(key, text) for key, text in zip(keys, columns.raw(name), strict=True)])
        return iter(msgspec.to_builtins(columns.json(name)))

    def _meta(self, key: tuple[str, ...], text: str | None) -> dict[str, Any] | None:
        if text is None:
            return None
        try:
            meta: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
            refuse_duplicate_keys(text.encode())
        except (msgspec.DecodeError, RecursionError, InvalidMessage) as error:
            row = key_text(self._plan, key)
            raise _unusable(f"`{self._plan.options.meta}` of the row {row} is not a JSON object: {error}") from error
        return meta


class _Columns:
    """The columns of a slice as Python values; `before` rows of the task precede it."""

    def __init__(
        self, batch: pa.RecordBatch, schema: types.StructType, converters: dict[str, Any], before: int
    ) -> None:
        self._batch = batch
        self._schema = schema
        self._converters = converters
        self._before = before
        self.names = list(converters)

    def raw(self, name: str) -> list[Any]:
        """Return the values of a column as Arrow returns them, times in UTC."""
        try:
            return self._values(name, 0, self._batch.num_rows)
        except (ValueError, OverflowError) as error:
            index = next((each for each in range(self._batch.num_rows) if not self._is_readable(name, each)), 0)
            sentence = f"a value of the column `{name}` cannot be represented: {error}"
            raise _unusable(f"{sentence}. It is in {self.place(index)}") from error

    def place(self, index: int) -> str:
        """Say which row it is, by its position and what its first columns hold, for one that has no key."""
        task = TaskContext.get()
        partition = "its partition" if task is None else f"the partition {task.partitionId()}"
        first = (name for name in self.names[:_COLUMNS_SHOWN] if self._is_readable(name, index))
        values = ((name, self._values(name, index, 1)[0]) for name in first)
        held = ", ".join(f"{name}={reprlib.repr(value)}" for name, value in values if value is not None)
        return f"row {self._before + index + 1} of {partition}" + (f", with {held}" if held else "")

    def _values(self, name: str, start: int, length: int) -> list[Any]:
        # Python has no times beyond the years 1 to 9999 in any zone: in the session's it would lack some that UTC has
        kind = to_arrow_type(self._schema[name].dataType, timezone="UTC")
        return list(self._batch.column(name).slice(start, length).cast(kind).to_pylist())

    def _is_readable(self, name: str, index: int) -> bool:
        try:
            self._values(name, index, 1)
        except (ValueError, OverflowError):
            return False
        return True

    def json(self, name: str) -> list[Any]:
        """Return the values of a column, ready for the JSON encoder."""
        convert = self._converters[name]
        return self.raw(name) if convert is None else [convert(value) for value in self.raw(name)]


def key_text(plan: WritePlan, key: Sequence[str]) -> str:
    """Return the name of a row in messages: `order_id=17, line=2`."""
    if not key:
        return "a row without an id"
    return ", ".join(f"{name}={text}" for name, text in zip(plan.ids, key, strict=True))


def _unusable(detail: str) -> InvalidMessage:
    return InvalidMessage.of("invalid_row", detail)


def converter(kind: types.DataType) -> Convert | None:
    """Return the function that prepares a value of Arrow for the JSON encoder; None where it needs none."""
    match kind:
        case types.ArrayType():
            convert = converter(kind.elementType)
            return None if convert is None else _unless_null(lambda items: [convert(item) for item in items])
        case types.MapType():
            return _unless_null(_map(converter(kind.valueType)))
        case types.StructType():
            converters = {field.name: convert for field in kind if (convert := converter(field.dataType)) is not None}
            if not converters:
                return None
            return _unless_null(
                lambda value: value | {name: convert(value[name]) for name, convert in converters.items()}
            )
    return _SIMPLE.get(type(kind))


def id_text(value: Any) -> str:
    """Return the text of a value in an id: the same for the same value, in any of the exact types."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return _digits(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return value.astimezone(UTC).replace(tzinfo=None).isoformat() + "Z"
    return value.isoformat() if isinstance(value, date) else str(value)


def _digits(value: Decimal) -> str:
    return format(value, "f")


def _finite(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return _NOT_FINITE.get(value, "NaN")


def _unless_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


_SIMPLE: Final[dict[type[types.DataType], Convert]] = {
    types.DecimalType: _unless_null(_digits),
    types.FloatType: _finite,
    types.DoubleType: _finite,
}


def _map(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda pairs: {id_text(key): value for key, value in pairs}
    return lambda pairs: {id_text(key): convert(value) for key, value in pairs}
