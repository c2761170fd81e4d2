"""The idempotency registry in the worker's database: keys whose time is over are forgotten.

Handlers create it (`postroom.once`), where they do; no other program of ours looks after it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import structlog
from msgspec import Meta

from postroom.chassis.postgres import Pool
from postroom.once.postgres import PostgresStore
from postroom.once.registry import KEEP_DAYS, Registry

_log = structlog.get_logger(__name__)


class OnceSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long it is known what was done once."""

    keep_days: Annotated[
        float,
        Meta(gt=0, description="how long finished keys of `postroom.once` are kept in this database, in days"),
    ] = KEEP_DAYS


class OnceRetention:
    """Forgets old keys of every tenant, topic and group."""

    def __init__(self, pool: Pool, settings: OnceSettings) -> None:
        self._store = PostgresStore(pool)
        self._registry = Registry(self._store)
        self._settings = settings

    async def forget(self) -> None:
        """Forget what ended longer ago than it is kept; nothing where there is no registry. Raises `PostroomError`."""
        if not await self._store.is_there():
            return
        if forgotten := await self._registry.forget_old(self._settings.keep_days):
            _log.info("keys_forgotten", keys=forgotten)
