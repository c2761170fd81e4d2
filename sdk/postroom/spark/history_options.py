"""The options of the source `postroom_history`, checked before anything is read (docs/contract/spark.md#spark-12).

The source reads from Postgres, not through the broker: the broker's history route answers one page of JSON after the
other, each with what a member may see. That is a fraction of the rate, on the machine that has to accept meanwhile; and
a job over the whole history is an operator's, who has the address of the database.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from uuid import UUID

from postroom._wire.message import parse_destination
from postroom._wire.names import check_name
from postroom.spark.database import chosen_url, refuse

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter


_PARTITION_ROWS: Final = 50_000  # by default: about half a second of one task
_CONNECTIONS: Final = 16  # by default: Postgres has 100 by its own default, and the brokers want most of them
_EQUALS: Final = ("mesh", "sender", "to", "destination_kind", "client_message_id", "broker_message_id")
_LAST: Final = 2**63 - 1
_EARLIEST: Final = datetime(1, 1, 2, tzinfo=UTC)  # the very first of the times has none before it
_NUMBER: Final = re.compile("[0-9]{1,10}")


class HistoryOptions(NamedTuple):
    """What to read, and from where."""

    database_url: str
    mesh: str | None  # None: every mesh
    to: str | None  # a destination, as topic:orders; None: every one
    since: datetime | None
    until: datetime | None  # exclusive
    partition_rows: int  # numbers of the history that one task reads
    max_connections: int  # that tasks hold at once, and so tasks; the driver has one more
    max_rows_per_batch: int | None  # of a stream; None: no limit
    fail_on_data_loss: bool  # of a stream: where messages were deleted before it read them
    push_filters: bool  # apply the query's filters too; for a DataFrame of one query


# In the style of Spark's own sources where those have the option too.
_NAMES: Final = [name.replace("fail_on_data_loss", "failOnDataLoss") for name in HistoryOptions._fields]


def read_options(options: Mapping[str, str], *, streaming: bool) -> HistoryOptions:
    """Check the options of a read; raises `InvalidMessage` that names the wrong one and its allowed values."""
    given = {name.lower(): value for name, value in options.items()}
    for name in given.keys() - {known.lower() for known in _NAMES}:
        refuse(name, f"postroom_history has no option {name!r}: it has {', '.join(_NAMES)}")
    for name in (name for name, value in given.items() if not value.strip()):
        refuse(name, f"the option {name} is empty")
    text, mesh = given.get("to"), given.get("mesh")
    if text is not None:
        parse_destination(text)
    if mesh is not None:
        check_name("mesh", mesh)
    found = HistoryOptions(
        database_url=chosen_url(given.get("database_url"), "to read"),
        mesh=mesh,
        to=text,
        since=_moment(given, "since"),
        until=_moment(given, "until"),
        partition_rows=_count(given, "partition_rows") or _PARTITION_ROWS,
        max_connections=_count(given, "max_connections") or _CONNECTIONS,
        max_rows_per_batch=_count(given, "max_rows_per_batch"),
        fail_on_data_loss=_switch(given, "failOnDataLoss", default="true"),
        push_filters=_switch(given, "push_filters"),
    )
    if not streaming and "failondataloss" in given:
        refuse("failOnDataLoss", "failOnDataLoss is for streams: omit it, or read with spark.readStream")
    if streaming and found.until is not None:
        refuse("until", "a stream has no end: omit the option until, or read with spark.read")
    if streaming and found.push_filters:
        refuse("push_filters", "Spark pushes no filters into a stream: omit push_filters; mesh and since are options")
    if not streaming and found.max_rows_per_batch is not None:
        refuse("max_rows_per_batch", "max_rows_per_batch is for streams: omit it, or read with spark.readStream")
    if found.since is not None and found.until is not None and found.since >= found.until:
        refuse("until", "the option until is not after since, so there is nothing to read")
    return found


def _moment(options: Mapping[str, str], name: str) -> datetime | None:
    """Read a time of ISO 8601; one without a zone is in UTC."""
    text = options.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
        return max(moment.astimezone(UTC) if moment.tzinfo else moment.replace(tzinfo=UTC), _EARLIEST)
    except (ValueError, OverflowError):
        refuse(
            name, f"the option {name} is {text!r}: use a day or a time, such as 2026-11-01 or 2026-11-01T08:00:00+01:00"
        )


def _count(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (_NUMBER.fullmatch(text) and 0 < int(text) < 2**31):
        refuse(name, f"the option {name} is {text!r}: use a whole number, 1 or more")
    return int(text)


def _switch(options: Mapping[str, str], name: str, *, default: str = "false") -> bool:
    text = options.get(name.lower(), default).lower()
    if text not in ("true", "false"):
        refuse(name, f"the option {name} is {text!r}: use true or false")
    return text == "true"


class Conditions(NamedTuple):
    """Bounds that every wanted row keeps; None: no bound.

    Spark evaluates every filter once more, so a condition may let through too much but must never leave out a row.
    """

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
        """Return these conditions with those of `filters` that they can express."""
        found = self
        for filter_ in filters:
            kind, value = type(filter_).__name__, getattr(filter_, "value", None)
            column = ".".join(getattr(filter_, "attribute", ()))
            if column in _RANGES:
                if isinstance(value, datetime) and value.tzinfo is None:
                    value = value.replace(tzinfo=UTC)
                least, most, bounded = _RANGES[column]
                if isinstance(value, bounded):
                    bounds = {least: _tighter(max, getattr(found, least), value)} if kind in _LOWER else {}
                    bounds |= {most: _tighter(min, getattr(found, most), value)} if kind in _UPPER else {}
                    found = found._replace(**bounds)
            elif kind == "EqualTo" and column in _EQUALS and isinstance(value, str) and getattr(found, column) is None:
                equal: dict[str, Any] = {column: value}
                is_valid = _is_uuid(value) if column == "broker_message_id" else "\0" not in value
                found = found._replace(**equal) if is_valid else found
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
