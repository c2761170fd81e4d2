"""The tables of the pipelines: a schema of their own in the broker's database, since all can be rebuilt."""

from __future__ import annotations

from typing import Final

from postroom.chassis import postgres

ROOM: Final = "pipeline"


async def migrate(url: str) -> list[str]:
    """Bring the tables to this program's version and return what was applied; raises `Fatal`."""
    return await postgres.migrate(url, ROOM)
