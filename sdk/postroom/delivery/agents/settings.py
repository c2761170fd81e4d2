"""What an operator says of an agent: which class it is, and the limits of its runtime."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from postroom.agent import Agent, InvalidAgent, check_agent
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import load_named


class AgentSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The limits of one agent."""

    receive_seconds: Annotated[
        float, Meta(gt=0, description="longest time that `receive` may take for one message, in seconds")
    ] = 60
    group_messages: Annotated[
        int, Meta(ge=1, le=10_000, description="most messages that share a transaction of the event store")
    ] = 500
    group_seconds: Annotated[
        float,
        Meta(gt=0, le=60, description="age of a transaction's first message at which it is committed, in seconds"),
    ] = 0.02
    publish_seconds: Annotated[
        float, Meta(gt=0, le=300, description="longest wait for JetStream to acknowledge what was emitted, in seconds")
    ] = 5
    retry_seconds: Annotated[
        float, Meta(gt=0, le=300, description="pause before a failed publish is tried again, in seconds")
    ] = 1
    check_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="pause between two comparisons of streams and store, in seconds")
    ] = 10
    horizon_days: Annotated[
        float, Meta(gt=0, description="age up to which a message that a stream lost is published again, in days")
    ] = 7
    keep_days: Annotated[
        float,
        Meta(
            gt=0,
            description="how long the store records where a message was published, in days; at least `horizon_days`",
        ),
    ] = 30


def load_agent(name: str) -> type[Agent[Any]]:
    """Import `module:Agent`, also from the current directory; raises `Fatal` with what its author has to change."""
    agent = load_named(name, what="an agent", example="module:Agent, as in shop.agents:Pricing")
    try:
        check_agent(agent)
    except InvalidAgent as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    found: type[Agent[Any]] = agent
    return found
