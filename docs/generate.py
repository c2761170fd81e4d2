"""`make docs`: write the pages that follow from the code. A test fails when they are not what this writes."""

from pathlib import Path

from broker.config import PREFIX as BROKER_PREFIX
from broker.config import BrokerConfig
from console.config import PREFIX as CONSOLE_PREFIX
from console.config import ConsoleConfig
from daemon.config import PREFIX as DAEMON_PREFIX
from daemon.config import DaemonConfig
from postroom._wire.dead_letters import DEAD_LETTERS
from postroom._wire.jobs import JOBS
from postroom._wire.once import KEYS
from postroom._wire.operations import VERBS as ROW_VERBS
from postroom._wire.unpublished import CONSUMERS, SOURCES, UNPUBLISHED
from postroom.chassis.config import reference
from postroom.delivery.settings import StreamSettings
from postroom.worker.config import (
    AGENT_PREFIX,
    CONSUMER_PREFIX,
    AgentConfig,
    ConsumerConfig,
    SourceSection,
    WorkerConfig,
)
from postroom.worker.config import PREFIX as WORKER_PREFIX

CONFIGURATION = Path(__file__).with_name("configuration.md")
VERBS = Path(__file__).with_name("verbs.md")
NOUNS = (DEAD_LETTERS, *UNPUBLISHED.values(), SOURCES, CONSUMERS, JOBS, KEYS)

_VERBS = """# What operators can do

Each verb takes a reason, which is kept with who did it (`postroom log` shows it), means things by their ids or by a
filter, and says with `dry_run` which, before anything changes.

This page is written by `make docs` from the tables that routes, clients and commands follow from.

## Rows of the daemon

On its socket: `POST /v1/outbox/{{id}}/<verb>` for one row, `POST /v1/outbox/<verb>` for many.

| verb | of rows that are | what it does |
|---|---|---|
{rows}
## What is shared

At the broker: `GET` lists, `POST` changes.

| thing | route | who | verb | of those that are | what it does |
|---|---|---|---|---|---|
{nouns}"""

_CONFIGURATION = """# Configuration

One TOML file per process, given with `--config`. A dotted key is a table and a key: `outbox.max_bytes` is
`max_bytes` under `[outbox]`. The variable of a setting overrides the file; write a list there as comma-separated
words. An unknown key, a misspelt variable, a wrong type or a value out of range is refused with its path, and the
process exits with 78. The variables that `postroom up` writes (`POSTROOM_NATS_URL`, `POSTROOM_DATABASE_URL`,
`POSTROOM_MESH`) are the defaults of an agent's and a worker's settings: a config file and
an option override them.
Paths may begin with `~` and contain variables such as `${{CREDENTIALS_DIRECTORY}}`. Keep secrets in files that only
their reader may read.

`postroom daemon check` prints the effective settings and tries every dependency.

This page is written by `make docs` from the types that decode the files.

## The daemon

{daemon}
## The broker

{broker}
## The console

{console}
## The worker

{worker}
## A consumer

`postroom consumer run` can derive most of it from `--context`, `--name` and `--handler`. A worker takes the same
settings in a table of `[[consumers]]`, without those of the process (`nats`, `listen_host`, `listen_port`,
`log_level`), and with the worker's `database_url` unless the table has its own.

{consumer}
## An agent

A worker takes the same settings in a table of `[[agents]]`, without those of the process.

{agent}
## Streams

`streams` of the worker and of a consumer is a list of tables, each `[[streams]]`. A variable cannot set it.

{stream}
## Sources

`sources` of the worker is a list of tables, each `[[sources]]`: databases of applications, each with an outbox of its
own ([applications.md](applications.md)). A variable cannot set it.

{source}"""


def configuration() -> str:
    """Return docs/configuration.md."""
    return _CONFIGURATION.format(
        daemon=reference(DaemonConfig, DAEMON_PREFIX),
        broker=reference(BrokerConfig, BROKER_PREFIX),
        console=reference(ConsoleConfig, CONSOLE_PREFIX),
        worker=reference(WorkerConfig, WORKER_PREFIX),
        consumer=reference(ConsumerConfig, CONSUMER_PREFIX),
        agent=reference(AgentConfig, AGENT_PREFIX),
        stream=reference(StreamSettings, None),
        source=reference(SourceSection, None),
    )


def verbs() -> str:
    """Return docs/verbs.md."""
    held = {None: "", True: ", held", False: ", not held"}
    rows = "".join(
        f"| `{name}` | {' or '.join(sorted(verb.states))}{held[verb.held]} | {verb.effect} |\n"
        for name, verb in ROW_VERBS.items()
    )
    who = {"repair": "`repair` in the mesh", "broker_repair": "`repair` in every mesh"}
    nouns = "".join(
        f"| {noun.name} | `{noun.path}` | {who[noun.changes]} | `{name}` |"
        f" {' or '.join(sorted(verb.states)) or 'any'} | {verb.effect} |\n"
        for noun in NOUNS
        for name, verb in noun.verbs.items()
    )
    return _VERBS.format(rows=rows, nouns=nouns)


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration(), "utf-8")
    VERBS.write_text(verbs(), "utf-8")
