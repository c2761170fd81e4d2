"""The types of the fixtures that let a test be the daemon: `serve` a handler, `speak` bytes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[Handler], Awaitable[Path]]
Speak = Callable[[bytes], Awaitable[Path]]
