"""How a verb reaches JetStream."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import this_user

if TYPE_CHECKING:
    from nats.js import JetStreamContext

PATIENCE: Final = 5.0  # seconds that a person waits for NATS

NatsUrl = Annotated[
    str | None, typer.Option("--nats-url", envvar="POSTROOM_NATS_URL", help="The NATS servers.", metavar="URL")
]
Credentials = Annotated[
    Path | None,
    typer.Option(
        "--nats-credentials-file",
        envvar="POSTROOM_NATS_CREDENTIALS_FILE",
        help="A file with user:password, or a token [default: as in the address].",
        readable=False,  # reading it says better what is wrong
        metavar="FILE",
    ),
]


@asynccontextmanager
async def reached(url: str | None, credentials: Path | None) -> AsyncIterator[JetStreamContext]:
    """Lend a context of JetStream at `url`; raises `Unavailable` or `NotPermitted` where a person waited in vain."""
    from postroom.delivery.nats import connect  # noqa: PLC0415
    from postroom.delivery.settings import NatsSettings  # noqa: PLC0415

    if url is None:
        raise Fatal(Exit.USAGE, "no NATS server is configured: set POSTROOM_NATS_URL, or --nats-url")
    settings = NatsSettings(url=url, credentials_file=credentials)
    connection = await connect(settings, name=f"postroom of {this_user()}", patience=PATIENCE, logged=False)
    try:
        yield connection.jetstream()
    finally:
        await connection.close()
