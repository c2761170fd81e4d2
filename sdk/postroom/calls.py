"""What both clients are made of: a transport, patience, and the two ways to call, reading and changing."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from postroom.retry import Patience, retrying, retrying_unless_arrived
from postroom.transport import Transport

T = TypeVar("T")


class Calls:
    """The base of a client: calls over one transport, tried again for `patience` seconds (0: one try)."""

    def __init__(self, transport: Transport, patience: float) -> None:
        self._transport = transport
        self._patience_seconds = patience

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection; a second call does nothing."""
        await self._transport.close()

    def _patience(self) -> Patience:
        return Patience(self._patience_seconds)

    async def _read(
        self,
        path: str,
        answer: type[T],
        *,
        query: msgspec.Struct | None = None,
        body: msgspec.Struct | None = None,
        waiting: float = 0.0,
    ) -> T:
        """Ask until it succeeds, fails for good, or patience ends: reading changes nothing, also with a body (POST)."""
        method = "GET" if body is None else "POST"
        parameters = None if query is None else to_parameters(query)
        return await retrying(
            lambda: self._transport.call(method, path, answer, query=parameters, body=body, waiting=waiting),
            self._patience(),
        )

    async def _change(self, method: str, path: str, answer: type[T], body: msgspec.Struct | None = None) -> T:
        """Ask for a change; tried again only where it surely did not happen."""
        return await retrying_unless_arrived(
            lambda: self._transport.call(method, path, answer, body=body), self._patience()
        )


def to_parameters(query: msgspec.Struct) -> dict[str, str]:
    """Encode a query struct; what is not set is left out."""
    members: dict[str, Any] = msgspec.to_builtins(query)
    return {name: _text(value) for name, value in members.items() if value is not None}


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
