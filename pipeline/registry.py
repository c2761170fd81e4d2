"""Every pipeline by name, and its options: words `name=value`, alike for `postroom pipeline run` and `spark-submit`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from postroom.chassis.exits import Exit, Fatal

O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options

DATABASE_URL: Final = "POSTROOM_DATABASE_URL"


class Struct(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The base of every pipeline's options; a field without a default has to be given."""


class Database(Struct):
    """Options of a pipeline that reads the broker's database."""

    database_url: Annotated[str, msgspec.Meta(description="the broker's database [default: POSTROOM_DATABASE_URL]")] = (
        ""
    )


class History(Database):
    """Options of a pipeline that reads the history, or a part of it."""

    mesh: Annotated[str | None, msgspec.Meta(description="one mesh [default: all]")] = None
    since: Annotated[str | None, msgspec.Meta(description="a day or time: what was accepted from then on")] = None
    until: Annotated[str | None, msgspec.Meta(description="a day or time: what was accepted before it")] = None


def parse(options: type[O], words: Iterable[str], name: str) -> O:
    """Read the words of one pipeline; raises `Fatal` (2) that says which is wrong, and what there is."""
    given: dict[str, str] = {}
    for word in words:
        key, separator, value = word.partition("=")
        if not separator or key in given:
            _refuse(name, options, f"{word!r} is not an option of the form name=value")
        given[key.replace("-", "_")] = value
    if DATABASE_URL in os.environ and "database_url" in options.__struct_fields__:
        given.setdefault("database_url", os.environ[DATABASE_URL])
    try:
        found = msgspec.convert(given, options, strict=False)
    except msgspec.ValidationError as error:
        _refuse(name, options, str(error))
    if isinstance(found, Database) and not found.database_url:
        raise Fatal(Exit.USAGE, f"say which database to read: set {DATABASE_URL}, or add database_url=postgresql://…")
    return found


def described(options: type[msgspec.Struct]) -> dict[str, dict[str, Any]]:
    """Return each option with what it does, and its default if it has one."""
    schema = msgspec.json.schema(options)
    known = schema["$defs"][options.__name__]
    required = known.get("required", ())
    return {
        name: {
            "description": field.get("description", ""),
            "required": name in required,
            "default": field.get("default"),
        }
        for name, field in known["properties"].items()
    }


def moment(text: str | None, option: str) -> datetime | None:
    """Read a day or time of ISO 8601, in UTC where it has no zone; raises `Fatal` (2)."""
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise Fatal(Exit.USAGE, f"{option} is {text!r}: use a day or a time, such as 2026-11-01") from error
    return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)


def _refuse(name: str, options: type[msgspec.Struct], why: str) -> Any:
    known = ", ".join(options.__struct_fields__)
    raise Fatal(Exit.USAGE, f"{name}: {why}; its options are {known} (`postroom pipeline list` describes them)")


class Pipeline(NamedTuple):
    """A pipeline: its module has `Options`, a struct, and `run(spark, options)`, which returns an `Outcome`."""

    name: str
    reads: str
    summary: str

    @property
    def module(self) -> str:
        """The module that it lives in."""
        return f"pipeline.{self.name.replace('-', '_')}"

    @property
    def options(self) -> type[msgspec.Struct]:
        """Its options."""
        options: type[msgspec.Struct] = importlib.import_module(self.module).Options
        return options

    @property
    def run(self) -> Callable[[Any, Any], Outcome]:
        """The function that runs it, in a Spark session."""
        run: Callable[[Any, Any], Outcome] = importlib.import_module(self.module).run
        return run


class Outcome(NamedTuple):
    """What a run says at its end; `failed` where it found what should not be."""

    facts: Mapping[str, Any]
    failed: bool = False


PIPELINES: Final[Mapping[str, Pipeline]] = MappingProxyType(
    {
        pipeline.name: pipeline
        for pipeline in (
            Pipeline("orphan-check", "the broker's tables", "Check that every accepted message has all its rows."),
            Pipeline("rate-telemetry", "the history", "Count what each member sent in each window of the limiter."),
            Pipeline("audit-log", "the history, exports of outboxes", "Append each day that is over to Parquet."),
            Pipeline("search-index", "messages", "Fill the full-text index."),
            Pipeline("state-hash", "event stores of agents", "Recompute each agent's chain of hashes."),
            Pipeline("backfill", "Parquet, CSV or JSON", "Send every row through the daemon."),
            Pipeline("delivery-report", "the history, deliveries", "Plot how long deliveries take, by topic and day."),
        )
    }
)


def find(name: str) -> Pipeline:
    """Return a pipeline; raises `Fatal` (3) where there is none of that name."""
    if name not in PIPELINES:
        raise Fatal(Exit.NOT_FOUND, f"there is no pipeline {name!r}: choose one of {', '.join(PIPELINES)}")
    return PIPELINES[name]
