"""`python -m broker [run|migrate|orphan-check|restored] --config FILE`: the broker's program.

Each command is one call that returns an exit code, and imports what it alone needs: `postroom up` waits for the
migration before it starts the servers.
"""

import argparse
import sys
from collections.abc import Callable, Coroutine, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from broker.config import BrokerConfig, events_kept, load_config
from broker.database import QUERIES, check_version, migrate
from postroom._wire.words import counted
from postroom.chassis import logs, postgres, runtime, tracing
from postroom.chassis.exits import Exit, Fatal
from postroom.worker.orphans import Violation, check


async def run_broker(config: BrokerConfig) -> Exit:
    """Serve until a signal says stop."""
    from broker.server import run  # noqa: PLC0415

    with tracing.exporting("postroom-broker"):
        await run(config)
    return Exit.OK


async def migrate_database(config: BrokerConfig) -> Exit:
    """Bring the schema to this program's version, and say what was applied."""
    applied = await migrate(config.database_url)
    for name in applied:
        sys.stdout.write(f"applied {name}\n")
    if not applied:
        sys.stdout.write("the schema is up to date\n")
    return Exit.OK


async def begin_incarnation(config: BrokerConfig) -> Exit:
    """Record that the database was restored: daemons compare what they sent, readers learn where to resume."""
    from broker.operator import keep_log  # noqa: PLC0415

    async with postgres.connected(config.database_url) as connection:
        await check_version(connection)
        async with connection.transaction():
            why = "an operator restored the database"
            incarnation = await connection.fetchval(QUERIES["begin_incarnation"], why)
            await keep_log(connection, postgres.acting(connection), "restore", "database", str(incarnation), reason=why)
    sys.stdout.write(
        f"incarnation {incarnation} began: each daemon now compares what it sent with the database, and "
        "`postroom status` shows what is missing; `postroom outbox resend --missing` sends it again\n"
    )
    return Exit.OK


async def find_orphans(url: str, *, events_kept: timedelta) -> list[Violation]:
    """Return every violation of accept's atomicity in the database at `url`, and record them where it is writable.

    Raises `Fatal`, also where its schema is not this program's.
    """
    async with postgres.connected(url) as connection:
        await check_version(connection)
        return (await check(connection, events_kept)).violations


async def check_orphans(config: BrokerConfig) -> Exit:
    """Print every violation of accept's atomicity; exit code 1 where there is one."""
    violations = await find_orphans(config.database_url, events_kept=events_kept(config.retention))
    for kind, rows, examples in violations:
        sys.stdout.write(f"{kind}: {counted(rows, 'row')}, such as {', '.join(map(str, examples))}\n")
    if not violations:
        sys.stdout.write("every accepted message has all its rows, and every row its message\n")
    return Exit.FAILED if violations else Exit.OK


COMMANDS: Final[Mapping[str, Callable[[BrokerConfig], Coroutine[Any, Any, Exit]]]] = {
    "run": run_broker,
    "migrate": migrate_database,
    "orphan-check": check_orphans,
    "restored": begin_incarnation,
}


def main(command: str, config_file: Path | None) -> int:
    """Load the config and run one of `COMMANDS`; a `Fatal` becomes one sentence and its exit code."""
    try:
        config = load_config(config_file)
        logs.configure(config.log_level)
        return int(runtime.run(COMMANDS[command](config)))
    except Fatal as fatal:
        return fatal.report("postroom broker")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m broker", description="The accept service of Postroom.")
    parser.add_argument("command", nargs="?", default="run", choices=sorted(COMMANDS))
    parser.add_argument("--config", type=Path, help="a TOML file; POSTROOM_BROKER_… override it")
    options = parser.parse_args()
    sys.exit(main(options.command, options.config))
