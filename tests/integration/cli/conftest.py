"""A user at a terminal, with and without a real daemon, whose broker never answers."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mailroom import LoneDaemon
from support.terminal import Terminal
from support.zygote import Zygote

from cli import connect
from cli.noun import BrokerPlace


@pytest.fixture(scope="module")
def shared_daemon(session_directory: Path, zygote: Zygote) -> Iterator[LoneDaemon]:
    """A daemon that the tests of a module share, each under ids of its own."""
    directory = session_directory / "shared"
    directory.mkdir()
    running = LoneDaemon(directory, zygote=zygote)
    asyncio.run(running.start())
    yield running
    running.stop()
    shutil.rmtree(directory)


@pytest.fixture
def terminal(daemon: LoneDaemon) -> Terminal:
    """A user who talks to the daemon."""
    return Terminal(daemon.socket)


@pytest.fixture
def nobody(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A user without a daemon, and without patience."""
    monkeypatch.setitem(BrokerPlace.ask.__kwdefaults__, "patience", 0.1)
    monkeypatch.setitem(connect.with_daemon.__kwdefaults__, "patience", 0.1)
    return Terminal(short_directory / "nobody.sock")
