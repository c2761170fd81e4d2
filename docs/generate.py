"""`make docs`: write the pages that follow from the code. A test fails when they are not what this writes."""

import asyncio
import contextlib
import json
import re
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Literal, Union, get_args, get_origin
from unittest.mock import MagicMock

import msgspec
from msgspec.inspect import is_struct_type
from prometheus_client import Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric

from broker import app as broker
from broker.config import PREFIX as BROKER_PREFIX
from broker.config import BrokerConfig
from broker.items import AcceptedEvent
from broker.metrics import Metrics
from broker_client.answers import RelayCounters
from console.config import PREFIX as CONSOLE_PREFIX
from console.config import ConsoleConfig
from daemon.config import PREFIX as DAEMON_PREFIX
from daemon.config import DaemonConfig
from daemon.metrics import Metrics as DaemonMetrics
from daemon.receiver import FilingCounters
from ipc import routes as daemon
from ipc.services import Counters
from outbox import Outbox, OutboxSettings
from postroom._wire.administration import HistoryMessage
from postroom._wire.dead_letters import DEAD_LETTERS, DeadLetter
from postroom._wire.jobs import JOBS, JobCompleted, JobFailed, JobOperated, JobStarted
from postroom._wire.message import Envelope
from postroom._wire.once import KEYS
from postroom._wire.operations import VERBS as ROW_VERBS
from postroom._wire.sends import RelayStatus
from postroom._wire.unpublished import CONSUMERS, SOURCES, UNPUBLISHED
from postroom.chassis.config import settings
from postroom.chassis.routes import describe
from postroom.delivery.agents.runtime import AgentCounters
from postroom.delivery.consumer import ConsumerCounters
from postroom.delivery.http.handler import HandlerCounters, Reach
from postroom.delivery.http.inbox_messages import Backlog
from postroom.delivery.settings import StreamSettings
from postroom.handler import HandlerRequest
from postroom.worker import metrics as worker
from postroom.worker.config import (
    AGENT_PREFIX,
    CONSUMER_PREFIX,
    AgentConfig,
    ConsumerConfig,
    SourceSection,
    WorkerConfig,
)
from postroom.worker.config import PREFIX as WORKER_PREFIX

DOCS: Final = Path(__file__).parent
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
`POSTROOM_REDIS_URL`, `POSTROOM_MESH`) are the defaults of a broker's, a worker's and an agent's settings: a config
file and an option override them.
Paths may begin with `~` and contain variables such as `${{CREDENTIALS_DIRECTORY}}`; `$$` is a dollar sign.
Keep secrets in files that only their reader may read.

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
`log_level`, `stop_seconds`), and with the worker's `database_url` unless the table has its own.

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


_WORDS: Final = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Path": "path",
    "datetime": "time",
}


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


def reference(config: type[msgspec.Struct], prefix: str | None) -> str:
    """Describe every setting of `config` in a table, one row each; without a prefix no variable overrides them."""
    lines = ["| key | what it does | type | default | variable |", "|---|---|---|---|---|"]
    for setting in settings(config):
        key = ".".join(setting.path)
        words = [_setting_type(setting.type)]
        for meta in setting.meta:
            bounds = (("≥", meta.ge), (">", meta.gt), ("≤", meta.le), ("<", meta.lt))
            words += [f"{sign} {bound:,}" for sign, bound in bounds if bound is not None]
            words += [] if meta.pattern is None else [f"`{meta.pattern}`"]
        if setting.secret:
            words[-1] += " (secret)"
        default = f"`{setting.default}`"
        if setting.default is msgspec.NODEFAULT:
            default = "required"
        elif setting.default is None or setting.default == []:
            default = "-"
        elif isinstance(setting.default, bool):
            default = default.lower()
        cells = (
            f"`{key}`",
            setting.description[:1].upper() + setting.description[1:].removesuffix("."),
            ", ".join(words),
            default,
            "-" if prefix is None or _holds_tables(setting.type) else f"`{setting.variable(prefix)}`",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _setting_type(kind: Any) -> str:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return " or ".join(_setting_type(part) for part in get_args(kind) if part is not type(None))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in get_args(kind))
    if _holds_tables(kind):
        return "tables"
    if origin is list:
        return f"list of {_setting_type(get_args(kind)[0])}"
    if get_args(kind):  # Annotated
        return _setting_type(get_args(kind)[0])
    return _WORDS[kind.__name__]


def _holds_tables(kind: Any) -> bool:
    """Return whether a setting is a list of tables, as `[[streams]]`."""
    return get_origin(kind) is list and is_struct_type(get_args(kind)[0])


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


_API = """# {title}: the HTTP API

{description}

This page is written by `make docs` from the table of routes. For programs there is [{file}]({file}) (OpenAPI 3.1),
which the server itself has at `{path}`. Times are RFC 3339.

{bearer}

{operations}
## Types

{types}"""


_KINDS: Final = {"string": "text", "boolean": "true or false"}


def daemon_document() -> dict[str, Any]:
    """Return what a daemon serves at `/v1/openapi.json`."""
    return daemon.document(daemon.routes(MagicMock()), version("postroom-server"))  # no handler is called


def broker_document() -> dict[str, Any]:
    """Return what a broker serves at `/openapi.json`."""
    services = MagicMock()
    services.config.max_in_flight = 1
    return broker.document(services)


def api_page(document: Mapping[str, Any], file: str) -> str:
    """Return the page of an API."""
    components = document["components"]
    operations = [
        (method.upper(), path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    nouns = {noun: list(group) for noun, group in groupby(sorted(operations, key=_noun), key=_noun)}
    return _API.format(
        title=document["info"]["title"],
        description=_sentence(document["info"]["description"]),
        path=next(path for path in document["paths"] if path.endswith("openapi.json")),
        file=file,
        bearer=components["securitySchemes"]["token"]["description"],
        operations="".join(f"## `{noun}`\n\n{''.join(map(_operation, group))}" for noun, group in nouns.items()),
        types=_types(components["schemas"]),
    )


def _noun(operation: tuple[str, str, Mapping[str, Any]]) -> str:
    version, _, rest = operation[1].strip("/").partition("/")
    return f"/{version}/{rest.partition('/')[0]}" if rest else f"/{version}"


def _operation(operation: tuple[str, str, Mapping[str, Any]]) -> str:
    method, path, described = operation
    lines = [f"### `{method} {path}`", _sentence(described["summary"]), _sentence(described["description"])]
    if described["parameters"]:
        rows = "".join(
            f"| `{one['name']}` | {one['in']} | {_words(one['schema'])} | {_cell(one['description'])} |\n"
            for one in described["parameters"]
        )
        lines.append(f"| parameter | in | type | what it is |\n|---|---|---|---|\n{rows.rstrip()}")
    if "requestBody" in described:
        lines.append(f"Takes {_content(described['requestBody'])}.")
    answers = {}
    for status, answer in described["responses"].items():
        headers = ", ".join(f"`{name}`" for name in answer.get("headers", ()) if name != "Retry-After")
        said = _content(answer) + (f" with {headers}" if headers else "")
        answers.setdefault(said, []).append(f"`{status}`")
    lines.append("; ".join(f"{', '.join(statuses)}: {said}" for said, statuses in answers.items()) + ".")
    return "\n\n".join(lines) + "\n\n"


def _content(answer: Mapping[str, Any]) -> str:
    """Say what a body is."""
    for media, content in answer.get("content", {}).items():
        what = _words(content["schema"])
        return what if media in ("application/json", "application/problem+json") else f"{what} as `{media}`"
    return "no body"


def _types(components: Mapping[str, Any]) -> str:
    """Return a section for each type."""
    return "\n".join(_type(name, schema) for name, schema in sorted(components.items()))


def _type(name: str, schema: Mapping[str, Any]) -> str:
    needed = schema.get("required", ())
    rows = "".join(
        f"| `{field}` | {_words(shape)} | {'always' if field in needed else _default(shape)} |"
        f" {_cell(shape.get('description', ''))} |\n"
        for field, shape in schema.get("properties", {}).items()
    )
    head = "| field | type | default | what it is |\n|---|---|---|---|\n"
    return f"### `{name}`\n\n{_sentence(schema.get('description', ''))}\n\n{head}{rows}"


def _default(shape: Mapping[str, Any]) -> str:
    return f"`{json.dumps(shape['default'])}`" if shape.get("default") not in (None, [], {}) else "-"


def _words(shape: Mapping[str, Any]) -> str:
    """Say what a JSON schema takes."""
    if "$ref" in shape:
        name = shape["$ref"].rpartition("/")[2]
        return f"[`{name}`](#{name.lower()})"
    if "anyOf" in shape:
        return " or ".join(_words(one) for one in shape["anyOf"] if one.get("type") != "null")
    if "enum" in shape:
        return " or ".join(f"`{value}`" for value in shape["enum"] if value is not None)
    kind, inner = shape.get("type", "JSON"), shape.get("items") or shape.get("additionalProperties")
    if kind in ("array", "object"):
        of = f" of {_words(inner)}" if isinstance(inner, dict) and inner else ""
        return {"array": "list", "object": "object"}[kind] + of
    if "minimum" in shape and "maximum" in shape:
        return f"{kind}, {shape['minimum']:,} to {shape['maximum']:,}"
    return {"date-time": "time", "uuid": "UUID"}.get(shape.get("format", ""), _KINDS.get(kind, kind))


def _cell(text: str) -> str:
    return _sentence(text).rstrip(".").replace("|", "\\|")


def _sentence(text: str) -> str:
    """Return a text of the code as a page shows it: one line a paragraph, rules of the contract as links."""
    text = re.sub(r"\(?docs/(contract/[\w-]+\.md)(#[\w-]+)?\)?", _rule, text)
    paragraphs = [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]
    whole = "\n\n".join(paragraphs)
    whole = whole[:1].upper() + whole[1:]
    return whole if not whole or whole.endswith((".", "|")) else f"{whole}."


def _rule(found: re.Match[str]) -> str:
    page, anchor = found[1], found[2] or ""
    link = f"[{anchor.removeprefix('#') or page}]({page}{anchor})"
    return f"({link})" if found[0].startswith("(") else link


_METRICS = """# Metrics

What the programs tell Prometheus: a daemon on its socket (`GET /v1/metrics`) and, with `metrics.listen_port`, on a
port of its own; a broker, a worker, a consumer and an agent at `/metrics` of their ports.
[monitoring.md](monitoring.md) says what to watch. No label names a message, a member or a token. A worker
that runs several consumers or agents adds a label with the name of each.

Of a histogram there are `_bucket`, `_sum` and `_count`. A daemon also has the usual metrics of its process
(`process_…`).

This page is written by `make docs` from the metrics themselves.

## The daemon

{daemon}
## The broker

{broker}
## The worker

{worker}
## A consumer

{consumer}
## An agent

{agent}"""


def metrics() -> str:
    """Return docs/metrics.md."""
    return _METRICS.format(
        daemon=_table(asyncio.run(_of_daemon())),
        broker=_table(_of_broker()),
        worker=_table(
            worker.of_publication(
                [],
                SimpleNamespace(requeued={}),
                {},
                [],
                webhooks=SimpleNamespace(running={}, counters=ConsumerCounters()),
                jobs=SimpleNamespace(engines={}, running=()),
                orphan_check=SimpleNamespace(last=None, at=datetime.now(UTC)),
            )
        ),
        consumer=_table(
            worker.of_consumer(
                SimpleNamespace(
                    counters=ConsumerCounters(),
                    handler=SimpleNamespace(counters=HandlerCounters(), reach=Reach("")),
                    in_hand=0,
                ),
                Backlog(messages=0, oldest_at=None),
            )
        ),
        agent=_table(worker.of_agent(SimpleNamespace(counters=AgentCounters(), position=0), [])),
    )


async def _of_daemon() -> list[Metric]:
    relay = SimpleNamespace(counters=RelayCounters(), status=lambda: RelayStatus(state="relaying"))
    receiver = SimpleNamespace(counters=FilingCounters(), inbox=SimpleNamespace(used_bytes=0), trouble=lambda: None)
    clock = SimpleNamespace(ahead_ms=0)
    with tempfile.TemporaryDirectory() as state:
        async with await Outbox.open(Path(state), OutboxSettings()) as outbox:
            found = DaemonMetrics(
                counters=Counters(),
                outbox=outbox,
                relay=relay,
                receiver=receiver,
                clock=clock,
                max_bytes=0,
                state=Path(state),
            )
            return await found.families()


def _of_broker() -> Iterable[Metric]:
    found = Metrics()
    for metric in vars(found).values():
        if isinstance(metric, Counter | Gauge | Histogram):
            for labels in range(1, 4):  # one of these numbers fits, if it has labels
                with contextlib.suppress(ValueError):
                    metric.labels(*["…"] * labels)
    return found.registry.collect()


def _table(found: Iterable[Metric]) -> str:
    rows = "".join(
        f"| `{one.name}{'_total' * (one.type == 'counter')}` | {one.type} | {', '.join(_labels(one)) or '-'} |"
        f" {_cell(one.documentation)} |\n"
        for one in found
    )
    return f"| metric | type | labels | what it shows |\n|---|---|---|---|\n{rows}"


def _labels(metric: Metric) -> list[str]:
    if hasattr(metric, "add_metric") and not isinstance(metric, HistogramMetricFamily):
        metric.add_metric(["…"] * 9, 0)  # as many as it has labels are taken
    labels = {name: None for sample in metric.samples for name in sample.labels if name != "le"}
    return [f"`{name}`" for name in labels]


_EVENTS = """# Events and messages

What travels, and its shape: for consumers, agents and handlers in any language.
[delivery.md](delivery.md#subjects-and-streams) says which stream has which subject, and which headers a message has.

Every body is JSON, with times as RFC 3339. A field may be added in any release, so ignore those that you do not know;
no field is taken away, or given another meaning, under the same name and version. The body of an event from
`postroom.emit`, and of what an agent emits, is whatever its author puts there.

This page is written by `make docs` from the types that encode and decode, and so is [schemas.json](schemas.json)
(JSON Schema 2020-12), which has each type under `$defs`.

| body | on the subject | what it is |
|---|---|---|
{rows}
Workers that run flows also send each other `activity_spawned`, `activity_cycled` and `activity_retried`. Those are the
engine's own: do not rely on their bodies.

## Types

{types}"""


# What is published, under which subject; in the order of a message's way.
_BODIES: Final[Mapping[type, tuple[str, str]]] = MappingProxyType(
    {
        AcceptedEvent: (
            "`{mesh}.event.{topic}.v{version}`, `cmd.{mesh}.{workspace}.{agent}.{verb}`",
            "a message to a topic, or to a queue",
        ),
        HistoryMessage: ("`{mesh}.inbox.{member}`", "a message for a member's inboxes"),
        HandlerRequest: ("(a `POST` to a handler or a webhook)", "any event, as a handler gets it"),
        DeadLetter: ("`{mesh}.dlq.{event}.v{version}`", "a message that could not be handled"),
        JobStarted: ("`{mesh}.event.job_started.v1`", "a job was started"),
        JobCompleted: ("`{mesh}.event.job_completed.v1`", "a job's completion is done"),
        JobFailed: ("`{mesh}.event.job_failed.v1`", "an activity failed, and with it the job"),
        JobOperated: (
            "`{mesh}.event.job_retried.v1`, `{mesh}.event.job_cancelled.v1`",
            "an operator let a failed job go on, or ended one",
        ),
    }
)


def events_schemas() -> dict[str, Any]:
    """Return docs/schemas.json."""
    _, definitions = describe([*_BODIES, Envelope], "#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions}


def events() -> str:
    """Return docs/events.md."""
    rows = "".join(
        f"| [`{body.__name__}`](#{body.__name__.lower()}) | {subject} | {what} |\n"
        for body, (subject, what) in _BODIES.items()
    )
    return _EVENTS.format(rows=rows, types=_types(events_schemas()["$defs"]))


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


PAGES: Final[Mapping[str, Callable[[], str]]] = MappingProxyType(
    {
        "configuration.md": configuration,
        "verbs.md": verbs,
        "metrics.md": metrics,
        "events.md": events,
        "schemas.json": lambda: _json(events_schemas()),
        "daemon-api.md": lambda: api_page(daemon_document(), "openapi/daemon.json"),
        "broker-api.md": lambda: api_page(broker_document(), "openapi/broker.json"),
        "openapi/daemon.json": lambda: _json(daemon_document()),
        "openapi/broker.json": lambda: _json(broker_document()),
    }
)
"""Every page that this writes, by its path below docs/."""


if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(page(), "utf-8")
