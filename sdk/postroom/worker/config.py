"""The config of a worker: one TOML file, whose keys `POSTROOM_WORKER_<KEY>` overrides (docs/configuration.md).

A consumer or an agent can have a process and a file of its own: a worker with that one section, whose keys
`POSTROOM_CONSUMER_<KEY>` or `POSTROOM_AGENT_<KEY>` overrides.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from postroom._wire.names import MESH, WORD
from postroom.agent import Agent, agent_name
from postroom.chassis.config import SECRET, Days, Host, LogLevel, load, state_home
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.settings import (
    AGENT_MAX_DELIVER,
    AckWaitSeconds,
    AgentSettings,
    BackoffSettings,
    ConsumerSettings,
    HandlerSettings,
    InboxSettings,
    MaxAckPending,
    MaxDeliver,
    Name,
    NatsSettings,
    PublisherSettings,
    RecordSettings,
    StreamDefaults,
    StreamSettings,
    WebhookSettings,
    check_inbox,
    check_timeout,
    networks_of,
)
from postroom.delivery.streams import default_streams
from postroom.delivery.subjects import DEFAULT_WORKSPACE, stream_name
from postroom.errors import InvalidMessage
from postroom.once.registry import KEEP_DAYS
from postroom.worker.orphans import OrphanCheckSettings

PREFIX: Final = "POSTROOM_WORKER_"
CONSUMER_PREFIX: Final = "POSTROOM_CONSUMER_"
AGENT_PREFIX: Final = "POSTROOM_AGENT_"

_NATS_URL: Final = "POSTROOM_NATS_URL"  # `postroom up` writes these, for every verb
_DATABASE_URL: Final = "POSTROOM_DATABASE_URL"
_DIRECT: Final = {  # settings of a consumer without a config, and the option that each is put into
    "CONTEXT": "--context",
    "CONSUMER_STREAM": "--stream",
    "CONSUMER_DURABLE": "--name",
    "CONSUMER_FILTER_SUBJECTS": "--subject",
    "HANDLER_URL": "--handler",
    "HANDLER_SECRET_FILE": "--secret-file",
}
_WORKER_SHARED: Final = {_DATABASE_URL: "DATABASE_URL", _NATS_URL: "NATS_URL"}
_AGENT_SHARED: Final = {_NATS_URL: "NATS_URL", "POSTROOM_MESH": "TENANT"}


# What each process has once, with any parts.
ListenHost = Annotated[Host, Meta(description="address of /health, /ready and /metrics")]
ListenPort = Annotated[
    Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="port of these pages; 0: a free one; unset: none")
]
StopSeconds = Annotated[
    float,
    Meta(
        gt=0,
        le=600,
        description="longest wait for what is in hand at a stop, in seconds; 5 for a Postgres that does not answer",
    ),
]


class ConsumerSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A consumer with an HTTP handler; any number of them with the same `consumer.durable` share its work."""

    context: Annotated[
        str, Meta(pattern=MESH.schema, description="the mesh that consumes, and that the dead letters belong to")
    ]
    database_url: Annotated[
        str | None, SECRET, Meta(description="Postgres with the inbox, postgresql://…; unset: the worker's")
    ] = None
    connections: Annotated[int, Meta(ge=1, le=100, description="Postgres connections")] = 3
    consumer: ConsumerSettings
    handler: HandlerSettings
    inbox: InboxSettings = msgspec.field(default_factory=InboxSettings)
    streams: Annotated[
        list[StreamSettings], Meta(description="streams that this process declares at its start, as `[[streams]]`")
    ] = []

    @property
    def stream(self) -> StreamSettings | None:
        """The declaration of the consumer's stream: here, or the context's default of that name."""
        known = [*self.streams, *default_streams(self.context)]
        return next((stream for stream in known if stream.name == self.consumer.stream), None)


class ConsumerConfig(ConsumerSection, kw_only=True, forbid_unknown_fields=True):
    """The config of a process that runs one consumer."""

    database_url: Annotated[str, SECRET, Meta(description="Postgres with the inbox, postgresql://…")]
    nats: NatsSettings
    listen_host: ListenHost = "127.0.0.1"
    listen_port: ListenPort = None
    log_level: LogLevel = "info"
    stop_seconds: StopSeconds = 45


class AgentSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An agent; those of one agent on one host share its store and its work."""

    tenant: Annotated[str, Meta(pattern=MESH.schema, description="the mesh that the agent works in")]
    workspace: Annotated[str, Meta(pattern=WORD.schema, description="its workspace there")] = DEFAULT_WORKSPACE
    agent_class: Annotated[
        str | None, Meta(description="the agent, as in shop.agents:Pricing, if the command does not name one")
    ] = None
    state_directory: Annotated[
        Path | None,
        Meta(
            description="directory of `events.db`; unset: `agents/<tenant>.<workspace>.<agent>` below `POSTROOM_STATE` "
            "(which `postroom up` sets), otherwise below `$XDG_STATE_HOME/postroom`"
        ),
    ] = None
    durable: Annotated[Name | None, Meta(description="the durable consumer; unset: {agent}_consumer")] = None
    ack_wait_seconds: AckWaitSeconds = 30
    max_deliver: MaxDeliver = AGENT_MAX_DELIVER
    max_ack_pending: MaxAckPending = 1000
    start_seconds: Annotated[
        float, Meta(ge=0, le=600, description="longest wait for NATS and the streams at a start, in seconds")
    ] = 20
    stop_seconds: Annotated[
        float, Meta(gt=0, le=600, description="longest wait for running messages at a stop, in seconds")
    ] = 10
    backoff: BackoffSettings = msgspec.field(default_factory=BackoffSettings)
    agent: AgentSettings = msgspec.field(default_factory=AgentSettings)

    def consumer(self, agent: type[Agent[Any]]) -> ConsumerSettings:
        """Return the durable consumer of `agent`; its stream is replaced by those that have its subjects."""
        return ConsumerSettings(
            stream="any",
            durable=self.durable or f"{agent_name(agent)}_consumer",
            ack_wait_seconds=self.ack_wait_seconds,
            max_deliver=self.max_deliver,
            max_ack_pending=self.max_ack_pending,
            backoff=self.backoff,
        )


class AgentConfig(AgentSection, kw_only=True, forbid_unknown_fields=True):
    """The config of a process that runs one agent."""

    nats: NatsSettings
    listen_host: ListenHost = "127.0.0.1"
    listen_port: ListenPort = None
    log_level: LogLevel = "info"

    def name_agent(self, given: str | None) -> str:
        """Return the name of the class, `given` or the config's; raises `Fatal` (2) where neither is set."""
        name = given or self.agent_class
        if name is None:
            sentence = (
                "no agent is named: pass MODULE:AGENT, as in shop.agents:Pricing, or set agent_class in the config"
            )
            raise Fatal(Exit.USAGE, sentence)
        return name


class JobSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a worker runs the steps of its flows."""

    steps_at_once: Annotated[int, Meta(ge=1, le=1000, description="most steps that run at once, in all flows")] = 16
    lease_seconds: Annotated[
        float,
        Meta(
            ge=0.5, le=3600, description="lease of a step, in seconds: how long a worker that died keeps others from it"
        ),
    ] = 30
    keep_days: Annotated[
        Days,
        Meta(
            description="how long completed and cancelled jobs of this database are kept, also "
            "those of other flows, in days"
        ),
    ] = 90
    check_seconds: Annotated[
        float, Meta(gt=0, le=60, description="pause between two checks for new meshes and overdue answers, in seconds")
    ] = 1


class OnceSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long the keys of `postroom.once` are kept."""

    keep_days: Annotated[
        Days, Meta(description="how long finished keys of `postroom.once` are kept in this database, in days")
    ] = KEEP_DAYS


class SourceSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """An application's own database, whose events the worker publishes too."""

    name: Annotated[str, Meta(pattern=WORD.schema, description="what the log, the metrics and the status call it")]
    database_url: Annotated[
        str,
        SECRET,
        Meta(description="the application's Postgres, postgresql://…, where `postroom outbox install` has been run"),
    ]


class WorkerConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The config of one worker; any number of them share a Postgres and a JetStream."""

    database_url: Annotated[
        str | None,
        SECRET,
        Meta(
            description="Postgres 16 or newer, postgresql://…; required, except for a worker that has only "
            "sources, consumers or agents"
        ),
    ] = None
    nats: NatsSettings
    listen_host: ListenHost = "127.0.0.1"
    listen_port: ListenPort = None
    log_level: LogLevel = "info"
    stop_seconds: StopSeconds = 45
    declare_streams: Annotated[
        bool,
        Meta(description="whether to create the default streams of each mesh where no other stream has their subjects"),
    ] = True
    stream_defaults: StreamDefaults = msgspec.field(default_factory=StreamDefaults)
    streams: Annotated[list[StreamSettings], Meta(description="further streams to create and update")] = []
    sources: Annotated[
        list[SourceSection], Meta(description="databases of applications to publish from too, as `[[sources]]`")
    ] = []
    events: PublisherSettings = msgspec.field(default_factory=PublisherSettings)
    deliveries: PublisherSettings = msgspec.field(default_factory=PublisherSettings)
    record: RecordSettings = msgspec.field(default_factory=RecordSettings)
    once: OnceSettings = msgspec.field(default_factory=OnceSettings)
    webhooks: WebhookSettings = msgspec.field(default_factory=WebhookSettings)
    flows: Annotated[list[str], Meta(description="flows whose jobs this worker runs, as in nightly_export:flow")] = []
    orphan_check: OrphanCheckSettings = msgspec.field(default_factory=OrphanCheckSettings)
    jobs: JobSettings = msgspec.field(default_factory=JobSettings)
    consumers: Annotated[
        list[ConsumerSection], Meta(description="consumers that this worker runs too, as `[[consumers]]`")
    ] = []
    agents: Annotated[list[AgentSection], Meta(description="agents that this worker runs too, as `[[agents]]`")] = []

    @property
    def database(self) -> str:
        """The database that it publishes from; raises `Fatal` (78) where it has none."""
        if self.database_url is None:
            raise Fatal(Exit.CONFIG, "database_url is not set: set it, or this worker publishes nothing")
        return self.database_url


def load_config(
    file: Path | None, environ: Mapping[str, str] = os.environ, *, flows: Sequence[str] = ()
) -> WorkerConfig:
    """Read and check the config, and add `flows` to its own; raises `Fatal` (78) with the path of what is wrong."""
    config = load(WorkerConfig, file, prefix=PREFIX, environ=environ, shared=_WORKER_SHARED if file is None else None)
    config.flows += flows
    if config.database_url is None and (config.flows or not (config.sources or config.consumers or config.agents)):
        variable = f"{PREFIX}DATABASE_URL"
        raise Fatal(Exit.CONFIG, f"database_url is not set: give one with --config FILE, or set {variable}")
    horizon = "record.horizon_days", config.record.horizon_days
    _check_kept("record.keep_days", config.record.keep_days, *horizon)
    networks_of(config.webhooks)
    check_inbox(config.webhooks.inbox)
    check_timeout(config.webhooks, config.webhooks)
    _check_kept("once.keep_days", config.once.keep_days, *horizon, "handled")
    inbox = config.webhooks.inbox
    _check_kept("webhooks.inbox.horizon_days", inbox.horizon_days, *horizon, "posted")
    for number, consumer in enumerate(config.consumers):
        _check_consumer(consumer)
        if consumer.database_url is None and config.database_url is None:
            detail = f"consumers[{number}].database_url is not set, and neither is database_url: set one"
            raise Fatal(Exit.CONFIG, detail)
    for number, agent in enumerate(config.agents):
        _check_agent(agent)
        if agent.agent_class is None:
            raise Fatal(Exit.CONFIG, f"agents[{number}].agent_class is not set: name it, as in shop.agents:Pricing")
    durables = [consumer.consumer.durable for consumer in config.consumers]
    check_distinct(durables, "consumers: two have the same consumer.durable; give one a worker of its own")
    check_distinct([source.name for source in config.sources], "sources: two have the same name; rename one")
    return config


def load_consumer_config(
    file: Path | None, environ: Mapping[str, str] = os.environ, options: Mapping[str, str] | None = None
) -> ConsumerConfig:
    """Read and check the config of a consumer's process; raises `Fatal` as `load` does."""
    config = load(ConsumerConfig, file, prefix=CONSUMER_PREFIX, environ=environ, options=options)
    _check_consumer(config)
    return config


def direct_config(
    *,
    context: str,
    name: str,
    handler: str,
    stream: str | None = None,
    subjects: Sequence[str] = (),
    secret_file: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> ConsumerConfig:
    """Make the config of the consumer `name` of a context's events, with the servers of the environment.

    Raises `Fatal` (2) with the option whose value is wrong, (78) with what else is wrong or missing.
    """
    for variable in (_NATS_URL, _DATABASE_URL):
        if not environ.get(variable):
            raise Fatal(Exit.CONFIG, f"{variable} is not set: source the `env` file of `postroom up`, or use --config")
    try:
        stream = stream or stream_name(context, "events")
    except InvalidMessage as error:
        raise Fatal(Exit.USAGE, f"--context: {error}") from error
    given = {
        "CONTEXT": context,
        "DATABASE_URL": environ[_DATABASE_URL],
        "NATS_URL": environ[_NATS_URL],
        "CONSUMER_STREAM": stream,
        "CONSUMER_DURABLE": name,
        "CONSUMER_FILTER_SUBJECTS": ",".join(subjects),
        "HANDLER_URL": handler,
    }
    if secret_file is not None:
        given["HANDLER_SECRET_FILE"] = str(secret_file)
    variables = {CONSUMER_PREFIX + key: value for key, value in given.items()}
    options = {CONSUMER_PREFIX + key: option for key, option in _DIRECT.items()}
    return load_consumer_config(None, {**environ, **variables}, options)


def load_agent_config(
    file: Path | None,
    *,
    tenant: str | None = None,
    workspace: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> AgentConfig:
    """Read and check the config of an agent's process; arguments override it. Raises `Fatal` as `load` does."""
    passed = {"TENANT": tenant, "WORKSPACE": workspace}
    given = {AGENT_PREFIX + key: value for key, value in passed.items() if value is not None}
    options = {variable: f"--{variable.removeprefix(AGENT_PREFIX).lower()}" for variable in given}
    environ = {**environ, **given}
    config = load(AgentConfig, file, prefix=AGENT_PREFIX, environ=environ, shared=_AGENT_SHARED, options=options)
    _check_agent(config)
    return config


def worker_of(config: ConsumerConfig | AgentConfig) -> WorkerConfig:
    """Return the config of a worker that runs this part only."""
    return WorkerConfig(
        nats=config.nats,
        listen_host=config.listen_host,
        listen_port=config.listen_port,
        log_level=config.log_level,
        stop_seconds=config.stop_seconds,
        consumers=[config] if isinstance(config, ConsumerConfig) else [],
        agents=[config] if isinstance(config, AgentConfig) else [],
    )


def check_distinct(names: Sequence[str], twice: str) -> None:
    """Raise `Fatal` (78) with the sentence `twice` where a name is there twice."""
    if len(set(names)) < len(names):
        raise Fatal(Exit.CONFIG, twice)


def _check_consumer(config: ConsumerSection) -> None:
    check_timeout(config.handler, config.consumer)
    check_inbox(config.inbox)


def _check_agent(config: AgentSection) -> None:
    agent = config.agent
    _check_kept("agent.keep_days", agent.keep_days, "agent.horizon_days", agent.horizon_days)


def _check_kept(key: str, days: float, least_key: str, least: float, twice: str = "") -> None:
    """Raise `Fatal` (78) where days are fewer than those of another setting: messages would be `twice` again."""
    if days < least:
        why = "messages that may have to be published again must be kept"
        if twice:
            why = f"messages that are published again would be {twice} again"
        raise Fatal(Exit.CONFIG, f"{key} ({days:g}) is shorter than {least_key} ({least:g}): {why}")


def state_directory(config: AgentSection, agent: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the store of the agent of that name; raises `Fatal` (78) where none is configured."""
    if config.state_directory is not None:
        return config.state_directory
    if stack := environ.get("POSTROOM_STATE"):
        state = Path(stack)  # `postroom down --wipe` removes it with the rest
    else:
        state = state_home(environ, "set state_directory (POSTROOM_AGENT_STATE_DIRECTORY)") / "postroom"
    return state / "agents" / f"{config.tenant}.{config.workspace}.{agent}"
