"""Doing something once: the durable idempotency registry (docs/contract/delivery.md#delivery-68).

    from postroom.once import open_registry

    async with open_registry("postgresql://…", group="billing") as registry:
        async with registry.once(tenant, topic, key) as claim:
            if claim.first:
                claim.result = await charge_card(order)

One `Registry`, three stores: `PostgresStore` (`postroom.once.postgres`), `SqliteStore` (`postroom.once.sqlite`) and
`MemoryStore`.
"""

from postroom.once.claim import Claim
from postroom.once.errors import KeyHeld, LeaseLost
from postroom.once.memory import MemoryStore
from postroom.once.model import Begun, Done, Held, Result, Run, Scope
from postroom.once.registry import Registry, open_registry
from postroom.once.store import Store

__all__ = [
    "Begun",
    "Claim",
    "Done",
    "Held",
    "KeyHeld",
    "LeaseLost",
    "MemoryStore",
    "Registry",
    "Result",
    "Run",
    "Scope",
    "Store",
    "open_registry",
]
