"""The tables of jobs: bringing a database to this program's version.

They stand beside delivering's: what a step sends goes through the event outbox, in the same transaction.
"""

from __future__ import annotations

from typing import Final

from chassis import postgres

ROOMS: Final = ("delivery", "ledger")


async def migrate(url: str) -> list[str]:
    """Bring the database to this program's version and return the names of what was applied, in order.

    Raises `Fatal` as `chassis.postgres.migrate` does.
    """
    return await postgres.migrate(url, *ROOMS)
