"""`/v1/relay/pause` and `/v1/relay/resume`: holding the relay back, whole or for one destination, and letting it go.

The controls lie in the outbox, so that they outlive the process; the relay is told that they have changed.
"""

from __future__ import annotations

from aiohttp import web

from ipc.answers import JSON, json_answer
from ipc.request import BodyReader, Request, check_media, decode_body
from ipc.services import Services
from postroom._wire.message import parse_destination
from postroom._wire.operations import PauseRequest, ResumeRequest


class RelayDesk:
    """The handlers of the relay; the route table lets only operators in."""

    def __init__(self, services: Services) -> None:
        self._outbox = services.outbox
        self._relay = services.relay
        self._read = BodyReader(services.limits, services.budget).read

    async def pause(self, request: Request) -> web.StreamResponse:
        """Stop relaying until a resume; answers what the relay does now."""
        check_media(request, JSON)
        asked = decode_body(await self._read(request), PauseRequest)
        return await self._set(request, asked.destination, asked.reason, paused=True, rate_per_second=None)

    async def resume(self, request: Request) -> web.StreamResponse:
        """Relay again, at a rate where one is given; answers what the relay does now."""
        check_media(request, JSON)
        asked = decode_body(await self._read(request), ResumeRequest)
        return await self._set(
            request, asked.destination, asked.reason, paused=False, rate_per_second=asked.rate_per_second
        )

    async def _set(
        self, request: Request, destination: str | None, reason: str, *, paused: bool, rate_per_second: float | None
    ) -> web.StreamResponse:
        if destination is not None:
            parse_destination(destination)
        await self._outbox.set_relay_control(
            destination, paused=paused, rate_per_second=rate_per_second, caller=request.caller, reason=reason
        )
        await self._relay.controls_changed()
        return json_answer(self._relay.status())
