"""Finding the class that `module:Agent` names."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from chassis.exits import Exit, Fatal
from postroom.agent import Agent, InvalidAgent, check_agent


def load_agent(name: str) -> type[Agent[Any]]:
    """Import `module:Agent`, also from the current directory; raises `Fatal` with what its author has to change."""
    module_name, colon, class_name = name.partition(":")
    if not (module_name and colon and class_name):
        raise Fatal(Exit.USAGE, f"{name!r} names no agent: give module:Agent, as in shop.agents:Pricing")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise Fatal(Exit.CONFIG, f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    agent = getattr(module, class_name, None)
    if agent is None:
        raise Fatal(Exit.CONFIG, f"there is no {class_name} in {module_name} ({module.__file__})")
    try:
        check_agent(agent)
    except InvalidAgent as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    found: type[Agent[Any]] = agent
    return found
