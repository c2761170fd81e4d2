"""A flow as an older and a newer deployment have it: `count` is in the newer one alone."""

from __future__ import annotations

from typing import Any

from postroom.flow import Context, Flow

older, newer = Flow("deployed"), Flow("deployed")


@older.activity
async def load(_ctx: Context, _request: Any) -> None:
    """Do nothing."""


@newer.activity
async def count(_ctx: Context, _request: Any) -> None:
    """Do nothing."""
