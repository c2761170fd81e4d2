"""The daemon's config, for verbs that do its work themselves."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from postroom.chassis.exits import Fatal

if TYPE_CHECKING:
    from daemon.config import DaemonConfig


def daemon_config(file: Path | None) -> DaemonConfig:
    """Read the config; where none was named, and `postroom up` wrote one, the refusal says where that lies."""
    from cli.stack.layout import Layout  # noqa: PLC0415
    from daemon.config import load_config  # noqa: PLC0415

    try:
        return load_config(file)
    except Fatal as fatal:
        state = os.environ.get("POSTROOM_STATE")
        written = None if state is None else Layout(Path(state)).daemon_directory / "daemon.toml"
        if file is not None or written is None or not written.exists():
            raise
        raise Fatal(fatal.exit_code, f"{fatal}; that of `postroom up` is {written}") from fatal
