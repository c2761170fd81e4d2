"""`make docs`: write the pages that follow from the code. A test fails when they are not what this writes."""

from pathlib import Path

from broker.config import PREFIX as BROKER_PREFIX
from broker.config import BrokerConfig
from chassis.reference import reference
from daemon.config import PREFIX as DAEMON_PREFIX
from daemon.config import DaemonConfig

CONFIGURATION = Path(__file__).with_name("configuration.md")

_CONFIGURATION = """# Configuration

One TOML file per process, given with `--config`. A dotted key is a table and a key: `outbox.max_bytes` stands as
`max_bytes` under `[outbox]`. The variable beside a setting overrides the file; a list is given there as comma-separated
words. An unknown key, a wrong type or a value out of range is refused with its path, and the process exits with 78.
Paths may begin with `~` and hold variables such as `${{CREDENTIALS_DIRECTORY}}`. Secrets stand in files that only their
reader may read.

`postroom daemon check` prints what is in force and tries every dependency.

This page is written by `make docs` from the types that decode the files.

## The daemon

{daemon}
## The broker

{broker}"""


def configuration() -> str:
    """Return docs/configuration.md."""
    return _CONFIGURATION.format(
        daemon=reference(DaemonConfig, DAEMON_PREFIX), broker=reference(BrokerConfig, BROKER_PREFIX)
    )


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration(), "utf-8")
