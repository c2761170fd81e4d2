"""What a query asks of the history, as far as Postgres can leave rows out for it.

Spark evaluates every filter once more, so that a condition may let through too much but must never leave out a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import UUID

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter

_EQUALS: Final = ("mesh", "sender", "to", "destination_kind", "client_message_id", "broker_message_id")
_LAST: Final = 2**63 - 1


class Conditions(NamedTuple):
    """Bounds that every wanted row keeps; None: no bound."""

    first: int = 0  # history_id
    last: int = _LAST
    since: datetime | None = None  # accepted_at
    until: datetime | None = None  # inclusive
    mesh: str | None = None
    sender: str | None = None
    to: str | None = None
    destination_kind: str | None = None
    client_message_id: str | None = None
    broker_message_id: str | None = None

    def narrowed(self, filters: Iterable[Filter]) -> Self:
        """Return these conditions with those of `filters` that one of them can say."""
        found = self
        for filter_ in filters:
            found = found._and(filter_)
        return found

    def arguments(self, mesh_id: int, after: int, last: int) -> list[Any]:
        """Return the arguments of `read_history` and `read_messages` for a range of a mesh's numbers."""
        return [
            mesh_id,
            max(after, self.first - 1),
            min(last, self.last),
            self.since,
            self.until,
            self.sender,
            self.to,
            self.destination_kind,
            self.client_message_id,
            self.broker_message_id,
        ]

    def _and(self, filter_: Filter) -> Self:
        kind, value = type(filter_).__name__, getattr(filter_, "value", None)
        column = ".".join(getattr(filter_, "attribute", ()))
        if column in _RANGES:
            return self._bounded(column, value, lower=kind in _LOWER, upper=kind in _UPPER)
        if kind == "EqualTo" and column in _EQUALS and isinstance(value, str) and getattr(self, column) is None:
            return self._with(**{column: value}) if column != "broker_message_id" or _is_uuid(value) else self
        return self

    def _bounded(self, column: str, value: Any, *, lower: bool, upper: bool) -> Self:
        if isinstance(value, datetime) and value.tzinfo is None:
            value = value.replace(tzinfo=UTC)
        least, most, kind = _RANGES[column]
        if not isinstance(value, kind):
            return self
        bounds = {least: _tighter(max, getattr(self, least), value)} if lower else {}
        bounds |= {most: _tighter(min, getattr(self, most), value)} if upper else {}
        return self._with(**bounds)

    def _with(self, **values: Any) -> Self:
        return self._replace(**values)


# The filters that bound a value from below, and from above.
_LOWER: Final = ("GreaterThan", "GreaterThanOrEqual", "EqualTo")
_UPPER: Final = ("LessThan", "LessThanOrEqual", "EqualTo")
_RANGES: Final[dict[str, tuple[str, str, type]]] = {
    "history_id": ("first", "last", int),
    "accepted_at": ("since", "until", datetime),
}


def _tighter(choose: Callable[[Any, Any], Any], present: Any, value: Any) -> Any:
    return value if present is None else choose(present, value)


def _is_uuid(text: str) -> bool:
    try:
        return str(UUID(text)) == text
    except ValueError:
        return False
