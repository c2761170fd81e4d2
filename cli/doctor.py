"""`postroom doctor`: looks at everything that Postroom needs on this machine, and says what to do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from cli.findings import show_findings
from cli.noun import Json, Socket, TokenFile, Url, noun

if TYPE_CHECKING:
    from postroom.chassis.exits import Finding

app = noun()


@app.command()
def doctor(*, as_json: Json = False, socket: Socket = None, url: Url = None, token_file: TokenFile = None) -> None:
    """Check files, SQLite, sockets, permissions and every dependency, and show what to do."""
    from cli.checkup import look_at_everything  # noqa: PLC0415

    async def collect() -> list[Finding]:
        return [finding async for finding in look_at_everything(socket, url, token_file)]

    show_findings(asyncio.run(collect()), as_json=as_json)
