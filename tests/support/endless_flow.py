"""A flow whose one step has no end, in a way that its request names, for workers that are to stop all the same."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

from postroom.flow import Context, Flow

flow = Flow("endless")


@flow.activity
async def work(_ctx: Context, request: dict[str, str]) -> None:
    """Note that it runs, and go on for ever."""
    endless = threading.Event()
    if request["how"] == "a thread of its own":
        threading.Thread(target=endless.wait).start()
    Path(request["begun"]).touch()
    if request["how"] == "a thread of asyncio's":
        await asyncio.to_thread(endless.wait)
    while request["how"] == "refusing to be cancelled":
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue
