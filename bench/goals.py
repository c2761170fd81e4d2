"""What each benchmark has to show: its figure's name, and the goal for the median of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bench.report import Goal

GOALS: Final[Mapping[str, Mapping[str, Goal]]] = {
    "send": {
        "64 connections, of decode only": Goal(0.9),
        "one connection, of raw one-row commits": Goal(0.5),
        "64 connections, p99": Goal(25, at_most=True),
    },
    "clients": {
        "one task, of JetStream": Goal(0.8),
        "64 tasks, of JetStream": Goal(2),
        "64 tasks, relay at work, of JetStream": Goal(1),
        "64 tasks: CPU of both": Goal(200, at_most=True),
        "64 tasks: CPU of both, of JetStream's": Goal(1, at_most=True),
    },
    "batch": {"of raw SQLite, 256 rows a commit": Goal(0.7)},
    "backlog": {
        "1,000,000 rows, sends of the empty outbox": Goal(0.7),
        "3,000,000 rows, sends of the empty outbox": Goal(0.7),
        "3,000,000 rows, resident memory": Goal(150, at_most=True),
        "1,000,000 rows, a claim's transaction, p99": Goal(5, at_most=True),
    },
    "accept": {"fresh, of the bare statement": Goal(0.4), "duplicates, of fresh": Goal(2)},
    "brokers": {"two brokers, of one": Goal(1.7)},
    "relay": {"of the broker's own batches": Goal(0.5)},
    "full": {"Postroom, of dramatiq": Goal(1), "Postroom: CPU per message": Goal(1300, at_most=True)},
    "steady": {
        "Postroom: CPU per message": Goal(2800, at_most=True),
        "Postroom: p50, of JetStream's": Goal(5, at_most=True),
    },
    "lone": {"Postroom: p50, of JetStream's": Goal(4, at_most=True)},
    "publish": {"of nats-py, pipelined": Goal(0.5)},
    "consume": {"of the bare consumer": Goal(0.6)},
    "agent": {"an agent whose `receive` does nothing": Goal(3000)},
    "jobs": {"of dbos steps": Goal(1.5)},
    "commands": {
        "postroom send: CPU": Goal(0.15, at_most=True),
        "postroom status: CPU": Goal(0.3, at_most=True),
        "postroom --help: CPU": Goal(0.12, at_most=True),
    },
    "idle": {"the stack: CPU": Goal(0.5, at_most=True)},
    "console": {"with ten pages, of without": Goal(0.98)},
    "spark-sink": {"of the batch route": Goal(0.4)},
    "history": {"whole messages of 1 KiB": Goal(100_000)},
}
