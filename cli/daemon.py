"""`postroom daemon …`: run the daemon, check what it needs, renew its local token."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cli.noun import Config, Json, noun
from cli.output import fields, json_line, line, show_findings
from postroom.chassis.exits import Fatal

if TYPE_CHECKING:
    from daemon.config import DaemonConfig
    from postroom.chassis.exits import Finding

AcceptLostIds = Annotated[
    bool, typer.Option("--accept-lost-ids", help="Start with an outbox that lost rows: their ids may be used again.")
]

app = noun("Run and check the daemon.")


@app.command()
def run(*, config: Config = None, accept_lost_ids: AcceptLostIds = False) -> None:
    """Accept, keep and relay until a signal says stop."""
    from daemon.main import run as run_daemon  # noqa: PLC0415

    raise SystemExit(run_daemon(daemon_config(config), accept_lost_ids=accept_lost_ids))


@app.command()
def rotate_token(*, config: Config = None) -> None:
    """Write a new local token for the TCP port; the old one is valid for another 60 s."""
    from daemon.postroomd import rotate_token as rotate  # noqa: PLC0415

    line(f"the new token is in {rotate(daemon_config(config))}")


@app.command()
def check(*, config: Config = None, as_json: Json = False) -> None:
    """Show the effective config with secrets masked, and try every server and file in it."""
    from daemon.checks import check as find  # noqa: PLC0415
    from postroom.chassis.config import effective  # noqa: PLC0415

    loaded = daemon_config(config)
    settings = {".".join(setting.path): value for setting, value in effective(loaded)}

    async def collect() -> list[Finding]:
        return [finding async for finding in find(loaded)]

    if as_json:
        json_line({"config": settings})
    else:
        fields(settings.items())
        line("")
    show_findings(asyncio.run(collect()), as_json=as_json)


def daemon_config(file: Path | None) -> DaemonConfig:
    """Read the config; where none was named, and `postroom up` wrote one, the refusal says where that lies."""
    from cli.stack.layout import Layout  # noqa: PLC0415
    from daemon.config import load_config  # noqa: PLC0415

    try:
        return load_config(file)
    except Fatal as fatal:
        state = os.environ.get("POSTROOM_STATE")
        written = None if state is None else Layout(Path(state)).daemon_directory / "daemon.toml"
        if file is not None or written is None or not written.exists():
            raise
        raise Fatal(fatal.exit_code, f"{fatal}; that of `postroom up` is {written}") from fatal
