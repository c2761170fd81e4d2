"""Users' code in a process of ours: whatever it raises is an error, and never ends the process."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from postroom._wire.retry import error_text

T = TypeVar("T")


class HandlerEnded(Exception):
    """A handler raised what would have ended its worker, or was cancelled by something that it awaited."""


async def contained(work: Awaitable[T]) -> T:
    """Await a handler; whatever would end its worker is an error like any other: raises `HandlerEnded`."""
    try:
        return await work
    except Exception:
        raise
    except BaseException as error:
        current = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and current is not None and current.cancelling():
            raise  # its worker is being stopped
        raise HandlerEnded(f"the handler ended with {error_text(error)}") from error
