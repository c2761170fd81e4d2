"""`python -m console --config FILE`: config → sessions → HTTP → wait → stop in the opposite order."""

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import structlog

from console.app import build
from console.config import ConsoleConfig, load_config
from console.sessions import Sessions
from postroom.chassis import logs, runtime
from postroom.chassis.config import trusting
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.listener import listening, running

_log = structlog.get_logger(__name__)

_SHUTDOWN_SECONDS: Final = 1.0  # for answers at work; a live page is cut off, and its browser reconnects


async def run(config: ConsoleConfig) -> Exit:
    """Serve until SIGTERM or SIGINT; raises `Fatal`: 69 where the port is taken, 78 for authorities that are none."""
    trusting(config.broker_ca_file, "broker_ca_file")
    stop = asyncio.Event()
    runtime.stop_on_signals(stop)
    async with AsyncExitStack() as stack:
        sessions = await stack.enter_async_context(Sessions(config))
        served = running(
            build(sessions),
            _SHUTDOWN_SECONDS,
            most=runtime.spare_descriptors(),
            on_drop=lambda reason: _log.info("connection_dropped", reason=reason),
        )
        runner = await stack.enter_async_context(served)
        url = await listening(runner, config.listen_host, config.listen_port)
        _log.info("listening", url=url, broker=config.broker_url)
        runtime.notify(f"READY=1\nSTATUS=on {url}")
        await runtime.run_until_stopped({"sessions": sessions.sweep()}, stop)
        runtime.notify("STOPPING=1")
    return Exit.OK


def main(config_file: Path | None) -> int:
    """Load the config and run; a `Fatal` becomes one sentence and its exit code."""
    try:
        config = load_config(config_file)
        logs.configure(config.log_level)
        return int(runtime.run(run(config)))
    except Fatal as fatal:
        return fatal.report("postroom console")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m console", description="A page for the operators of Postroom.")
    parser.add_argument("--config", type=Path, help="a TOML file; POSTROOM_CONSOLE_… override it")
    sys.exit(main(parser.parse_args().config))
