"""Every pipeline, by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from postroom.chassis.exits import Exit, Fatal


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
        """What may be said to it."""
        options: type[msgspec.Struct] = importlib.import_module(self.module).Options
        return options

    @property
    def run(self) -> Callable[[Any, Any], Outcome]:
        """What does it, in a Spark session."""
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
            Pipeline("orphan-check", "the broker's tables", "Check that every accept has all its rows."),
            Pipeline("rate-telemetry", "the history", "Count what each member sent in each window of the limiter."),
            Pipeline("audit-log", "the history, exports of outboxes", "Append each day that is over to Parquet."),
            Pipeline("search-index", "messages", "Fill the full-text index."),
            Pipeline("state-hash", "event stores of agents", "Compute each agent's chain of hashes anew."),
            Pipeline("backfill", "Parquet, CSV or JSON", "Send every row through the daemon."),
            Pipeline("delivery-report", "the history, deliveries", "Draw how long deliveries take, by topic and day."),
        )
    }
)


def find(name: str) -> Pipeline:
    """Return a pipeline; raises `Fatal` (3) where there is none of that name."""
    if name not in PIPELINES:
        raise Fatal(Exit.NOT_FOUND, f"there is no pipeline {name!r}: there are {', '.join(PIPELINES)}")
    return PIPELINES[name]
