"""Doing something once: the durable idempotency registry (docs/contract/delivery.md#delivery-68).

    from postroom.once import open_registry

    async with open_registry("postgresql://…", group="billing") as registry:
        async with registry.once(tenant, topic, key) as claim:
            if claim.first:
                claim.result = await charge_card(order)

One `Registry`, two stores: `PostgresStore` (`postroom.once.postgres`) and `SqliteStore` (`postroom.once.sqlite`).
"""

from postroom.once.model import Begun, Done, Held, KeyHeld, LeaseLost, Result, Run, Scope, Store
from postroom.once.registry import Claim, Registry, open_registry

__all__ = [
    "Begun",
    "Claim",
    "Done",
    "Held",
    "KeyHeld",
    "LeaseLost",
    "Registry",
    "Result",
    "Run",
    "Scope",
    "Store",
    "open_registry",
]
