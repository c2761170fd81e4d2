"""`python -m daemon --config FILE`: options → build → named tasks → wait → stop (docs/contract/operate.md#operate-3).

Exit codes: 0 stopped, 69 already running, 74 the disk failed under a commit, 78 the config or the broker cannot be
used, 1 anything else. The first task that dies ends the process.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog

from daemon.config import DaemonConfig, load_config
from daemon.postroomd import Postroomd
from postroom.chassis import logs, runtime, tracing
from postroom.chassis.exits import Exit, Fatal

UMASK: Final = 0o077

_log = structlog.get_logger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the daemon that `--config FILE` describes; returns its exit code."""
    parser = argparse.ArgumentParser(prog="postroomd", description="The Postroom daemon of one mesh.")
    parser.add_argument("--config", type=Path, help="TOML file; without it the environment alone is used")
    parser.add_argument("--accept-lost-ids", action="store_true", help="start with an outbox that lost rows")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config)
    except Fatal as fatal:
        return fatal.report("postroomd")
    return run(config, accept_lost_ids=options.accept_lost_ids)


def run(config: DaemonConfig, *, accept_lost_ids: bool = False) -> int:
    """Run the daemon until it is stopped; returns its exit code, after writing any error to standard error."""
    os.umask(UMASK)
    logs.configure(config.log_level)
    try:
        with tracing.exporting("postroom-daemon"):
            runtime.run(serve(config, accept_lost_ids=accept_lost_ids))
    except Fatal as fatal:
        return fatal.report("postroomd")
    return Exit.OK


async def serve(config: DaemonConfig, *, accept_lost_ids: bool = False) -> None:
    """Build the daemon, run it until SIGTERM or SIGINT, and close it; raises `Fatal`."""
    stop = asyncio.Event()
    runtime.stop_on_signals(stop)
    daemon = await Postroomd.open(config, accept_lost_ids=accept_lost_ids)

    async def wind_down() -> None:
        runtime.notify("STOPPING=1\nSTATUS=finishing running requests")
        await daemon.wind_down()

    try:
        runtime.notify("READY=1")  # sends are accepted
        _log.info("ready", mesh=config.mesh)
        await runtime.run_until_stopped(daemon.tasks(), stop, wind_down)
    finally:
        await daemon.close()
    _log.info("stopped", mesh=config.mesh)


if __name__ == "__main__":
    sys.exit(main())
