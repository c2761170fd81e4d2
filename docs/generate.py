"""`make docs`: write the pages that follow from the code. A test fails when they are not what this writes."""

from pathlib import Path

from broker.config import PREFIX as BROKER_PREFIX
from broker.config import BrokerConfig
from daemon.config import PREFIX as DAEMON_PREFIX
from daemon.config import DaemonConfig
from postroom.chassis.config import reference
from postroom.delivery.settings import StreamSettings
from postroom.worker.agent_config import PREFIX as AGENT_PREFIX
from postroom.worker.agent_config import AgentConfig
from postroom.worker.config import PREFIX as WORKER_PREFIX
from postroom.worker.config import WorkerConfig
from postroom.worker.consumer_config import PREFIX as CONSUMER_PREFIX
from postroom.worker.consumer_config import ConsumerConfig

CONFIGURATION = Path(__file__).with_name("configuration.md")

_CONFIGURATION = """# Configuration

One TOML file per process, given with `--config`. A dotted key is a table and a key: `outbox.max_bytes` stands as
`max_bytes` under `[outbox]`. The variable beside a setting overrides the file; a list is given there as comma-separated
words. An unknown key, a misspelt variable, a wrong type or a value out of range is refused with its path, and the
process exits with 78. The variables that `postroom up` writes (`POSTROOM_NATS_URL`, `POSTROOM_DATABASE_URL`,
`POSTROOM_MESH`) stand in for an agent's and a worker's settings where nothing else says them: a file that is named, and
an option that is given, win over them.
Paths may begin with `~` and hold variables such as `${{CREDENTIALS_DIRECTORY}}`. Secrets stand in files that only their
reader may read.

`postroom daemon check` prints what is in force and tries every dependency.

This page is written by `make docs` from the types that decode the files.

## The daemon

{daemon}
## The broker

{broker}
## The worker

{worker}
## A consumer

`postroom consumer run` makes most of it from `--context`, `--name` and `--handler`.

{consumer}
## An agent

{agent}
## Streams

`streams` of the worker and of a consumer is a list of tables, `[[streams]]` each. A variable cannot set it.

{stream}"""


def configuration() -> str:
    """Return docs/configuration.md."""
    return _CONFIGURATION.format(
        daemon=reference(DaemonConfig, DAEMON_PREFIX),
        broker=reference(BrokerConfig, BROKER_PREFIX),
        worker=reference(WorkerConfig, WORKER_PREFIX),
        consumer=reference(ConsumerConfig, CONSUMER_PREFIX),
        agent=reference(AgentConfig, AGENT_PREFIX),
        stream=reference(StreamSettings, None),
    )


if __name__ == "__main__":
    CONFIGURATION.write_text(configuration(), "utf-8")
