"""A NATS of the test's own, which may be stopped, and whose streams nobody else fills."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from embedded import EmbeddedNats


@pytest.fixture
def own_nats(short_directory: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(short_directory / "nats")
    server.start()
    yield server
    server.stop()
