"""How a verb reaches JetStream: it hands over a coroutine function, and gets its result back."""

from __future__ import annotations

import asyncio
import getpass
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

import typer

from chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from nats.js import JetStreamContext

T = TypeVar("T")

PATIENCE: Final = 5.0  # seconds that a person waits for NATS

NatsUrl = Annotated[
    str | None, typer.Option("--nats-url", envvar="POSTROOM_NATS_URL", help="The NATS servers.", metavar="URL")
]
Credentials = Annotated[
    Path | None,
    typer.Option(
        "--nats-credentials-file",
        envvar="POSTROOM_NATS_CREDENTIALS_FILE",
        help="A file with user:password, or a token [default: what the address holds].",
        readable=False,  # reading it says better what is wrong
        metavar="FILE",
    ),
]


def with_jetstream(url: str | None, credentials: Path | None, work: Callable[[JetStreamContext], Awaitable[T]]) -> T:
    """Run `work` with a context of JetStream at `url` and return what it returns."""
    from delivery.nats import connect  # noqa: PLC0415
    from delivery.settings import NatsSettings  # noqa: PLC0415

    if url is None:
        raise Fatal(Exit.USAGE, "say where NATS is: set POSTROOM_NATS_URL, or --nats-url")
    settings = NatsSettings(url=url, credentials_file=credentials)

    async def run() -> T:
        connection = await connect(settings, name=f"postroom of {getpass.getuser()}", patience=PATIENCE, logged=False)
        try:
            return await work(connection.jetstream())
        finally:
            await connection.close()

    return asyncio.run(run())
