from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from lone_daemon import LoneDaemon
from terminal import Terminal


@pytest.fixture
async def daemon(short_directory: Path) -> AsyncIterator[LoneDaemon]:
    """A real daemon whose broker never answers."""
    running = LoneDaemon(short_directory)
    await running.start()
    yield running
    running.stop()


@pytest.fixture
def terminal(daemon: LoneDaemon) -> Terminal:
    """A user who talks to the daemon."""
    return Terminal(daemon.socket)


@pytest.fixture
def nobody(short_directory: Path) -> Terminal:
    """A user without a daemon."""
    return Terminal(short_directory / "nobody.sock")
