"""What an operator does to the files of a daemon: renew its local token, recover its outbox."""

from __future__ import annotations

from pathlib import Path

from daemon.config import DaemonConfig, state_directory, token_file
from ipc.tokens import rotate
from outbox.recover import Recovery as Recovery  # noqa: PLC0414 - what its callers show
from outbox.recover import recover as recover_directory


def rotate_token(config: DaemonConfig) -> Path:
    """Write a new local token and return its file; a running daemon takes the old one for another 60 s."""
    file = token_file(config)
    rotate(file)
    return file


def recover(config: DaemonConfig) -> Recovery:
    """Set the damaged outbox of a stopped daemon aside and save its rows into a new one.

    Raises `Fatal`: 69 while the daemon runs, 78 where there is no outbox.
    """
    return recover_directory(state_directory(config))
