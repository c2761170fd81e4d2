"""How the values of Spark's types stand in JSON, and in an id (docs/spark.md, "Types").

Every rule is exact and independent of the session: a timestamp is in UTC whatever the session's time zone, a decimal
keeps its digits as text, bytes are base64, what a double has and JSON has not (NaN, Infinity) is text.
"""

import math
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    NullType,
    ShortType,
    StringType,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from postroom.errors import InvalidMessage

Convert = Callable[[Any], Any]

_EXACT: Final = (
    StringType,
    ByteType,
    ShortType,
    IntegerType,
    LongType,
    BooleanType,
    DateType,
    TimestampType,
    TimestampNTZType,
    DecimalType,
)
_PLAIN: Final = (*_EXACT, FloatType, DoubleType, BinaryType, NullType)
_NOT_FINITE: Final = {math.inf: "Infinity", -math.inf: "-Infinity"}


def check_type(name: str, kind: DataType) -> None:
    """Raise `InvalidMessage` where the column `name` holds, at any depth, what has no place in JSON."""
    match kind:
        case ArrayType():
            check_type(name, kind.elementType)
        case StructType():
            for field in kind:
                check_type(f"{name}.{field.name}", field.dataType)
        case MapType():
            check_type(name, kind.valueType)
            if not isinstance(kind.keyType, _EXACT):
                raise _unsupported(name, f"maps with keys of type {kind.keyType.simpleString()}")
        case _ if not isinstance(kind, _PLAIN):
            raise _unsupported(name, f"the type {kind.simpleString()}")


def check_id_type(name: str, kind: DataType) -> None:
    """Raise `InvalidMessage` where the column can't name a row: it has to have one exact text for each value."""
    if not isinstance(kind, _EXACT):
        detail = (
            f"the column `{name}` of the option `id` has the type {kind.simpleString()}: use text, "
            "whole numbers, decimals, booleans, dates and times, which are the same text each time"
        )
        raise InvalidMessage.of("invalid_option", detail, field="id")


def converter(kind: DataType) -> Convert | None:
    """Return what turns a value as Arrow gives it into one that the JSON encoder writes by the rules; None: nothing."""
    match kind:
        case ArrayType():
            convert = converter(kind.elementType)
            return None if convert is None else _unless_null(lambda items: [convert(item) for item in items])
        case MapType():
            return _unless_null(_map(converter(kind.valueType)))
        case StructType():
            converters = {field.name: convert for field in kind if (convert := converter(field.dataType)) is not None}
            if not converters:
                return None
            return _unless_null(
                lambda value: value | {name: convert(value[name]) for name, convert in converters.items()}
            )
    return _SIMPLE.get(type(kind))


def id_text(value: Any) -> str:
    """Return the text of a value in an id: the same for the same value, whichever of the exact types holds it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Decimal):
        return _digits(value)
    if isinstance(value, datetime) and value.tzinfo is not None:
        return _in_utc(value).replace(tzinfo=None).isoformat() + "Z"
    return value.isoformat() if isinstance(value, date) else str(value)


def _in_utc(value: datetime) -> datetime:
    return value.astimezone(UTC)


def _digits(value: Decimal) -> str:
    return format(value, "f")


def _finite(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return _NOT_FINITE.get(value, "NaN")


def _unless_null(convert: Convert) -> Convert:
    return lambda value: None if value is None else convert(value)


_SIMPLE: Final[dict[type[DataType], Convert]] = {
    TimestampType: _unless_null(_in_utc),
    DecimalType: _unless_null(_digits),
    FloatType: _finite,
    DoubleType: _finite,
}


def _map(convert: Convert | None) -> Convert:
    if convert is None:
        return lambda pairs: {id_text(key): value for key, value in pairs}
    return lambda pairs: {id_text(key): convert(value) for key, value in pairs}


def _unsupported(name: str, what: str) -> InvalidMessage:
    detail = f"the column `{name}` cannot be sent: {what} cannot be written as JSON; cast it, to a string for instance"
    return InvalidMessage.of("invalid_option", detail, field=name)
