"""A flow whose step takes its worker's life, each time."""

from __future__ import annotations

import os
import signal
from typing import Any

from postroom.flow import Context, Flow
from postroom.retry_policy import RetryPolicy

flow = Flow("deadly")


@flow.activity(retry_policy=RetryPolicy(max_attempts=2, backoff_ms=1))
async def work(_ctx: Context, _request: Any) -> None:
    """Die."""
    os.kill(os.getpid(), signal.SIGKILL)
