"""Workers as processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from embedded.processes import tethered


@contextmanager
def worker(
    *arguments: str, ready: str = "publishing", **environment: str
) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run a worker, and yield it with the log line that says that it is `ready`."""
    process = subprocess.Popen(
        tethered([sys.executable, "-m", "postroom.worker", "run", *arguments]),
        stderr=subprocess.PIPE,
        text=True,
        env={"PATH": os.environ["PATH"], "POSTROOM_WORKER_LISTEN_PORT": "0", **environment},
    )
    assert process.stderr is not None
    try:
        started: dict[str, Any] = {}
        while started.get("event") != ready:
            line = process.stderr.readline()
            assert line, "the worker ended"
            started = json.loads(line)
        yield process, started
    finally:
        process.kill()
        process.communicate()
