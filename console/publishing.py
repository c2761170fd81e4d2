"""What is between the broker and those who handle messages: what is not published yet, and who is how far behind."""

from __future__ import annotations

import asyncio

from aiohttp import web

from console.plots import HEIGHT, bars
from console.sessions import SESSION
from console.views import ROWS, asked, mesh_of, page
from postroom._wire.administration import MeshQuery
from postroom._wire.unpublished import CONSUMERS, SOURCES, UNPUBLISHED, ConsumersQuery


async def show_consumers(request: web.Request) -> web.Response:
    """`GET /consumers?mesh=`: those that are behind first."""
    mesh, meshes = await mesh_of(request, asked(request))
    found = await request[SESSION].client.list_things(CONSUMERS, ConsumersQuery(mesh=mesh, last=60))
    found.consumers.sort(key=lambda one: (one.paused is None, -one.waiting - one.in_hand, one.stream, one.consumer))
    lags = {one.id: bars(one.past) for one in found.consumers[:ROWS]}
    return page(request, "consumers.html", mesh=mesh, meshes=meshes, found=found, rows=ROWS, lags=lags, height=HEIGHT)


async def show_unpublished(request: web.Request) -> web.Response:
    """`GET /unpublished`: of all meshes."""
    client, everywhere = request[SESSION].client, MeshQuery()
    sources, events, deliveries = await asyncio.gather(
        client.list_things(SOURCES, everywhere),
        client.list_things(UNPUBLISHED["events"], everywhere),
        client.list_things(UNPUBLISHED["deliveries"], everywhere),
    )
    refused = {"events": events.failing, "deliveries": deliveries.failing}
    return page(request, "unpublished.html", sources=sources.sources, refused=refused)
