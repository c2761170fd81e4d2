"""A flow whose leg 2 does nothing."""

from __future__ import annotations

from typing import Any

from postroom.flow import Context, Flow

flow = Flow("bench")


@flow.activity(sends="queue:bench")
async def ask(_ctx: Context, request: Any) -> Any:
    """Ask for whatever it was given."""
    return request


@ask.answered
async def _(_ctx: Context, _answer: Any) -> None:
    """Spawn nothing."""
