"""`--database`: the outbox in an application's own Postgres. It has no server to ask, so the command opens it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from cli.connect import TIMEOUT, with_broker
from cli.noun import TokenFile, Url

if TYPE_CHECKING:
    from postroom import BrokerClient
    from postroom.delivery.applications import Application

T = TypeVar("T")

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        envvar="POSTROOM_OUTBOX_DATABASE_URL",
        help="The outbox in an application's own Postgres, postgresql://…; an address with a password belongs in the "
        "environment [default: that of the broker's database].",
        metavar="URL",
    ),
]


class Place(NamedTuple):
    """Which outbox is meant: that of the broker's database, or of an application's own."""

    database: Database = None
    url: Url = None
    token_file: TokenFile = None

    def ask(
        self,
        broker: Callable[[BrokerClient], Awaitable[T]],
        own: Callable[[Application], Awaitable[T]],
        *,
        timeout: float = TIMEOUT,
    ) -> T:
        """Ask the broker, or the application's database where one is named."""
        if (database := self.database) is None:
            return with_broker(self.url, self.token_file, broker, timeout=timeout)
        import asyncio  # noqa: PLC0415

        from postroom.delivery.applications import open_application  # noqa: PLC0415

        async def run() -> T:
            async with open_application(database) as application:
                return await own(application)

        return asyncio.run(run())
