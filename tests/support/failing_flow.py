"""A flow whose one step fails at its only attempt."""

from __future__ import annotations

from typing import Any

from postroom.flow import Context, Flow
from postroom.retry_policy import RetryPolicy

flow = Flow("failing")


@flow.activity(retry_policy=RetryPolicy(max_attempts=1, backoff_ms=1))
async def work(_ctx: Context, _request: Any) -> None:
    """Fail."""
    raise ValueError("the request cannot be done")
