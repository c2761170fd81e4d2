"""A Postgres of a test's own, without the second that making a new cluster takes."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from embedded import EmbeddedPostgres

PostgresIn = Callable[[Path], EmbeddedPostgres]


@pytest.fixture(scope="session")
def _cluster(session_directory: Path) -> Path:
    server = EmbeddedPostgres(session_directory / "cluster", durable=False)
    server.start()
    server.stop()
    return server.data_directory


@pytest.fixture
def postgres_in(_cluster: Path) -> PostgresIn:
    """Return a function that makes a server over a fresh copy of a cluster that was never used."""

    def make(directory: Path) -> EmbeddedPostgres:
        directory.mkdir()
        subprocess.run(["/bin/cp", "--archive", "--reflink=auto", str(_cluster), str(directory)], check=True)
        return EmbeddedPostgres(directory, durable=False)

    return make
