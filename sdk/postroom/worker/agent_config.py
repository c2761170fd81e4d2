"""What `postroom agent run` can be told: one TOML file; `POSTROOM_AGENT_<KEY>` overrides a key.

`POSTROOM_NATS_URL` and `POSTROOM_MESH`, which `postroom up` writes, stand in for `nats.url` and `tenant` where neither
says them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, field

from postroom.agent import Agent, agent_name
from postroom.chassis.config import load
from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.agents.settings import AgentSettings
from postroom.delivery.settings import BackoffSettings, ConsumerSettings, Name, NatsSettings
from postroom.delivery.subjects import DEFAULT_WORKSPACE

PREFIX: Final = "POSTROOM_AGENT_"
_SHARED: Final = {"POSTROOM_NATS_URL": "NATS_URL", "POSTROOM_MESH": "TENANT"}


class AgentConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The config of one agent process; those of one agent on one host share its store and its work."""

    tenant: Annotated[str, Meta(pattern="^[a-z][a-z0-9_]{0,63}$", description="the mesh that the agent works in")]
    workspace: Annotated[str, Meta(pattern="^[a-z][a-z0-9_-]{0,63}$", description="its workspace there")] = (
        DEFAULT_WORKSPACE
    )
    nats: NatsSettings
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
    ack_wait_seconds: Annotated[
        float,
        Meta(
            ge=0.1, description="time without an acknowledgement after which a message is delivered again, in seconds"
        ),
    ] = 30
    max_deliver: Annotated[int, Meta(ge=1, description="attempts after which a message is dead-lettered")] = 5
    max_ack_pending: Annotated[int, Meta(ge=1, description="most messages that this process has claimed")] = 1000
    start_seconds: Annotated[
        float, Meta(ge=0, le=600, description="longest wait for NATS and the streams at a start, in seconds")
    ] = 20
    stop_seconds: Annotated[
        float, Meta(gt=0, le=600, description="longest wait for running messages at a stop, in seconds")
    ] = 10
    listen_host: Annotated[str, Meta(description="address of /health, /ready and /metrics")] = "127.0.0.1"
    listen_port: Annotated[
        Annotated[int, Meta(ge=0, le=65535)] | None, Meta(description="port of these pages; 0: a free one; unset: none")
    ] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="lowest level that is logged")
    ] = "info"
    backoff: BackoffSettings = field(default_factory=BackoffSettings)
    agent: AgentSettings = field(default_factory=AgentSettings)

    def name_agent(self, given: str | None) -> str:
        """Return which class is meant, `given` before the config's; raises `Fatal` (2) where neither says."""
        name = given or self.agent_class
        if name is None:
            sentence = "which agent? Give MODULE:AGENT, as in shop.agents:Pricing, or agent_class in the config"
            raise Fatal(Exit.USAGE, sentence)
        return name

    def consumer(self, agent: type[Agent[Any]]) -> ConsumerSettings:
        """Return the durable consumer of `agent`, on whichever stream keeps its subjects."""
        return ConsumerSettings(
            stream="any",
            durable=self.durable or f"{agent_name(agent)}_consumer",
            ack_wait_seconds=self.ack_wait_seconds,
            max_deliver=self.max_deliver,
            max_ack_pending=self.max_ack_pending,
            backoff=self.backoff,
        )


def load_config(
    file: Path | None,
    *,
    tenant: str | None = None,
    workspace: str | None = None,
    environ: Mapping[str, str] = os.environ,
) -> AgentConfig:
    """Read and check the config; the arguments win. Raises `Fatal` (78) with the path of what is wrong."""
    told = {"TENANT": tenant, "WORKSPACE": workspace}
    given = {PREFIX + key: value for key, value in told.items() if value is not None}
    config = load(AgentConfig, file, prefix=PREFIX, environ={**environ, **given}, shared=_SHARED)
    if config.agent.keep_days < config.agent.horizon_days:
        raise Fatal(
            Exit.CONFIG,
            f"agent.keep_days ({config.agent.keep_days:g}) is shorter than agent.horizon_days "
            f"({config.agent.horizon_days:g}): messages that may have to be published again must be kept",
        )
    return config


def state_directory(config: AgentConfig, agent: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return where the store of the agent of that name lies; raises `Fatal` (78) where nothing says."""
    return config.state_directory or _state_home(environ) / "agents" / f"{config.tenant}.{config.workspace}.{agent}"


def _state_home(environ: Mapping[str, str]) -> Path:
    if stack := environ.get("POSTROOM_STATE"):
        return Path(stack)  # `postroom down --wipe` removes it with the rest
    if state := environ.get("XDG_STATE_HOME"):
        return Path(state) / "postroom"
    if os.getuid() == 0:
        return Path("/var/lib/postroom")
    if home := environ.get("HOME"):
        return Path(home) / ".local" / "state" / "postroom"
    raise Fatal(Exit.CONFIG, "HOME is not set: set state_directory (POSTROOM_AGENT_STATE_DIRECTORY)")
