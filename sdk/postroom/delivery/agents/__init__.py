"""The agent runtime: one consumer handler, one SQLite event store, and the chain of hashes over it.

One name on one host: any number of processes share the store, the state and the work. They take turns at the store
(turns.py), and each applies what the others stored before it handles anything, so every message is handled once and the
log is one. That is for availability more than for speed: an agent handles one message after another.

One name on two hosts: each host has a store and a state of its own, and the durable consumer hands each message to one
of them. What an agent emits is still one message by its id, since ids follow from the message that caused it. But a
host that dies after its commit and before its ack leaves a message that the other host, which cannot see that store,
handles again. So give the agents of two hosts different workspaces, or subjects that do not overlap; or guard what must
happen once among hosts with the idempotency registry in Postgres (`postroom.once`).
"""

from pathlib import Path
from typing import Any

from postroom.agent import Agent, check_agent
from postroom.chassis.runtime import load_named


def load_agent(name: str) -> type[Agent[Any]]:
    """Import `module:Agent`, also from the current directory; the `Fatal` that it raises says what to change."""
    example = "module:Agent, as in shop.agents:Pricing"
    found: type[Agent[Any]] = load_named(name, check_agent, what="an agent", example=example)
    return found


def database(directory: Path) -> Path:
    """Return the path of the event store in a state directory."""
    return directory.resolve() / "events.db"
