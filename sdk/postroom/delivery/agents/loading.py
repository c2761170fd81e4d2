"""Finding the class that `module:Agent` names."""

from __future__ import annotations

from typing import Any

from postroom.agent import Agent, InvalidAgent, check_agent
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import load_named


def load_agent(name: str) -> type[Agent[Any]]:
    """Import `module:Agent`, also from the current directory; raises `Fatal` with what its author has to change."""
    agent = load_named(name, what="an agent", example="module:Agent, as in shop.agents:Pricing")
    try:
        check_agent(agent)
    except InvalidAgent as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    found: type[Agent[Any]] = agent
    return found
