"""The options of the sink `postroom`: read, checked against the DataFrame's schema, and ready for the executors.

Everything is checked on the driver, before a row is sent: an option that is unknown, missing or contradictory, or a
column that is missing or of a type that its option can't use, raises `InvalidMessage` with the option as `field`.
"""

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Annotated, Final, Literal, NoReturn, get_args
from uuid import UUID

import msgspec
from pyspark.sql import types

from postroom._wire.message import Priority, parse_destination
from postroom.spark.database import chosen_url, refuse

Wait = Literal["queued", "accepted"]

FAIL: Final = "fail"  # the other values of `on_conflict` and `on_refused` are directories, with a slash
MAX_BATCH_SIZE: Final = 10_000

_MESH: Final = "POSTROOM_MESH"
_SPARKS_OWN: Final = frozenset({"checkpointlocation", "queryname"})  # options of Spark that it passes on unchanged
_TAG_DIGITS: Final = 16  # of a hash
_ID_REQUIRED: Final = (
    "set the option `id` to the column, or comma-separated columns, that name a row: Spark may write a row more than "
    "once (a task that is retried, a speculative one, a job run again), and only an id that is the same each time "
    "keeps it one message. There is no safe default: a row's place changes from run to run, and equal rows may be two"
)

_NO_OPTIONS: Final = (
    "the write has no options: it needs `to` and `id` at least. Spark does not pass on those of a table in SQL: "
    "write CREATE TEMPORARY VIEW in place of CREATE TABLE, or name them in the statement, as in INSERT INTO orders "
    "WITH (to = 'topic:orders', id = 'order_id') SELECT …"
)

_EXPECTED: Final = {  # of the options that are more than text
    "batch_size": f"a number of rows from 1 to {MAX_BATCH_SIZE}",
    "wait": "`queued` or `accepted`",
}


_EXACT: Final = (
    types.StringType,
    types.ByteType,
    types.ShortType,
    types.IntegerType,
    types.LongType,
    types.BooleanType,
    types.DateType,
    types.TimestampType,
    types.TimestampNTZType,
    types.DecimalType,
)
_PLAIN: Final = (*_EXACT, types.FloatType, types.DoubleType, types.BinaryType, types.NullType)


class SinkOptions(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options from the user, all of them text (docs/spark.md, "Options")."""

    to: str | None = None
    to_column: str | None = None
    id: str | None = None
    body: str | None = None
    meta: str | None = None
    priority: str = "next"
    socket: str | None = None
    batch_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_BATCH_SIZE)] = 1000
    wait: Wait = "queued"
    namespace: str | None = None
    on_conflict: str = FAIL  # or a directory; the next one likewise
    on_refused: str = FAIL
    job: str | None = None
    mesh: str | None = None
    database_url: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteJob:
    """The job of the ledger that a write is; without `database_url` the driver uses that of its environment."""

    id: UUID
    mesh: str
    database_url: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritePlan:
    """What an executor needs to write rows: the options, and what follows from them."""

    schema: types.StructType
    options: SinkOptions
    ids: tuple[str, ...]
    namespace: str
    job: WriteJob | None

    @property
    def target(self) -> str:
        """Where the rows go, in words."""
        return self.options.to or f"the destinations in `{self.options.to_column}`"

    @property
    def priority_column(self) -> str | None:
        """The column with each row's priority; None where the option is one of the three words."""
        return None if self.options.priority in get_args(Priority) else self.options.priority


def plan_write(options: Mapping[str, str], schema: types.StructType) -> WritePlan:
    """Check the options of a write of rows of `schema`; the `InvalidMessage` that it raises says what to change."""
    given = {name.lower(): value for name, value in options.items()}
    if not given:
        refuse("id", _NO_OPTIONS)
    chosen = _decode({name: value for name, value in given.items() if name not in _SPARKS_OWN})
    ids = tuple(filter(None, (name.strip() for name in (chosen.id or "").split(","))))
    if not ids:
        refuse("id", _ID_REQUIRED)
    if (chosen.to is None) == (chosen.to_column is None):
        refuse("to", "set either `to`, one destination for all rows, or `to_column`, the column with each row's")
    if chosen.to is not None:
        parse_destination(chosen.to)
    for option, directory in (("on_conflict", chosen.on_conflict), ("on_refused", chosen.on_refused)):
        if directory != FAIL and "/" not in directory:  # a word that may be meant for what to do, as `ignore`
            advice = f"give `{FAIL}`, or a directory with a slash, such as ./{directory.strip()}"
            refuse(option, f"the option `{option}` is {directory!r}: {advice}")
    target = chosen.to or f"column {chosen.to_column}"  # it does not depend on how the rows are cut into tasks
    plan = WritePlan(
        schema=schema,
        options=chosen,
        ids=ids,
        namespace=chosen.namespace or " ".join(filter(None, [target, given.get("queryname")])),
        job=_job(chosen),
    )
    _check_columns(plan)
    return plan


def stream_tag(plan: WritePlan, query: str) -> str:
    """Return an id of a stream, derived from its namespace and the id of its `query`.

    A restart keeps the latter, which Spark has in the checkpoint; a new checkpoint, whose batches begin at 0 again, has
    another one.
    """
    return hashlib.sha256(msgspec.json.encode([plan.namespace, query])).hexdigest()[:_TAG_DIGITS]


def _decode(given: dict[str, str]) -> SinkOptions:
    if unknown := given.keys() - set(SinkOptions.__struct_fields__):
        known = ", ".join(SinkOptions.__struct_fields__)
        refuse(min(unknown), f"the sink has no option `{min(unknown)}`; it has {known}")
    if empty := [name for name, value in given.items() if not value.strip() and name != "id"]:
        refuse(empty[0], f"the option `{empty[0]}` is empty")
    try:
        return msgspec.convert(given, SinkOptions, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).partition("$.")[2].rstrip("`")
        refuse(name, f"the option `{name}` is {given[name]!r}: give {_EXPECTED[name]}")


def _job(chosen: SinkOptions) -> WriteJob | None:
    """Return the job that the write is, if it is one; checks that its database is configured."""
    if chosen.job is None:
        for option, text in (("mesh", chosen.mesh), ("database_url", chosen.database_url)):
            if text is not None:
                refuse(option, f"the option `{option}` is only for a write with `job`: set `job` too, or omit it")
        return None
    chosen_url(chosen.database_url, "has the job")
    mesh = chosen.mesh or os.environ.get(_MESH)
    if not mesh:
        refuse("mesh", f"the job has no mesh: set {_MESH}, or the option `mesh`")
    try:
        return WriteJob(id=UUID(chosen.job), mesh=mesh, database_url=chosen.database_url)
    except ValueError:
        advice = "choose a UUID for the write, and use it again whenever the write runs again"
        refuse("job", f"the option `job` is {chosen.job!r}: {advice}")


def _check_columns(plan: WritePlan) -> None:
    """Check that every column exists once, and has a type that its option can use."""
    names, meta, body = plan.schema.fieldNames(), plan.options.meta, plan.options.body
    if twice := {name for name in names if names.count(name) > 1}:
        refuse(None, f"the DataFrame has more than one column `{min(twice)}`: rename one")
    for name in plan.ids:
        _check_id_type(name, _column(plan, "id", name))
    for option, text in (("to_column", plan.options.to_column), ("priority", plan.priority_column)):
        if text is not None and not isinstance(_column(plan, option, text), types.StringType):
            refuse(option, f"the column `{text}` of the option `{option}` must be text")
    if meta is not None and not isinstance(kind := _column(plan, "meta", meta), types.StringType):
        if not isinstance(kind, (types.StructType, types.MapType)):
            expected = "must be a struct, a map, or text with JSON objects"
            refuse("meta", f"the column `{meta}` of the option `meta` {expected}")
        check_type(meta, kind)
    if body is None:
        for field in plan.schema:
            check_type(field.name, field.dataType)
    elif not isinstance(kind := _column(plan, "body", body), (types.StringType, types.BinaryType)):
        check_type(body, kind)


def _column(plan: WritePlan, option: str, name: str) -> types.DataType:
    if name not in plan.schema.fieldNames():
        names = plan.schema.fieldNames()
        there = f"has: {', '.join(names)}" if names else "has no column"
        hint = ", nor is it now, next or low" if option == "priority" else ""
        refuse(option, f"`{name}` of the option `{option}` is not a column{hint}; the DataFrame {there}")
    return plan.schema[name].dataType


def check_type(name: str, kind: types.DataType) -> None:
    """Raise `InvalidMessage` where the column `name` holds, at any depth, a type that JSON cannot express."""
    match kind:
        case types.ArrayType():
            check_type(name, kind.elementType)
        case types.StructType():
            for field in kind:
                check_type(f"{name}.{field.name}", field.dataType)
        case types.MapType():
            check_type(name, kind.valueType)
            if not isinstance(kind.keyType, _EXACT):
                _unsupported(name, f"maps with keys of type {kind.keyType.simpleString()}")
        case _ if not isinstance(kind, _PLAIN):
            _unsupported(name, f"the type {kind.simpleString()}")


def _check_id_type(name: str, kind: types.DataType) -> None:
    """Raise `InvalidMessage` where the column can't name a row: it has to have one exact text for each value."""
    if not isinstance(kind, _EXACT):
        expected = "text, whole numbers, decimals, booleans, dates and times, which are the same text each time"
        refuse("id", f"the column `{name}` of the option `id` has the type {kind.simpleString()}: use {expected}")


def _unsupported(name: str, what: str) -> NoReturn:
    refuse(
        name, f"the column `{name}` cannot be sent: {what} cannot be written as JSON; cast it, to a string for instance"
    )
