"""`/v1/topics…`: the topics of the mesh, passed on to the broker as the member that the daemon acts as."""

from __future__ import annotations

from aiohttp import web

from ipc.answers import Answer, json_answer
from ipc.request import Request
from ipc.services import Services


class Topics:
    """The handlers of topics."""

    def __init__(self, services: Services) -> None:
        self._desk = services.topics

    async def list(self, _request: Request) -> web.StreamResponse:
        """List the topics of the mesh."""
        return json_answer(await self._desk.topics())

    async def subscribe(self, request: Request) -> web.StreamResponse:
        """Subscribe this member to a topic."""
        return json_answer(await self._desk.subscribe(request.params["topic"]), 201)

    async def unsubscribe(self, request: Request) -> web.StreamResponse:
        """End this member's subscription to a topic."""
        await self._desk.unsubscribe(request.params["topic"])
        return Answer(204, b"")
