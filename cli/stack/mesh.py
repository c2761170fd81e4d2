"""The mesh of a stack: its members, topic and queue. Made at every start, which changes nothing where they exist."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from cli.stack.layout import MESH, SENDER, Layout, write_secret
from cli.stack.programs import BrokerProgram
from postroom import Conflict
from postroom.broker import BrokerClient

MEMBERS: Final = (SENDER, "bob")
TOPIC: Final = "orders"
QUEUE: Final = "work"


async def create_mesh(program: BrokerProgram, layout: Layout) -> None:
    """Create what is missing; raises `PostroomError` where the broker refuses."""
    async with program.client() as broker:
        with suppress(Conflict):
            await broker.create_mesh(MESH)
        for name in MEMBERS:
            await _create_member(broker, layout, name)
        with suppress(Conflict):
            await broker.create_topic(MESH, TOPIC)
        with suppress(Conflict):
            await broker.create_queue(MESH, QUEUE)
        for name in MEMBERS:
            with suppress(Conflict):
                await broker.subscribe(MESH, TOPIC, name)


async def _create_member(broker: BrokerClient, layout: Layout, name: str) -> None:
    """Create a member and keep its token; a crash may have come between the two, then it gets a new one."""
    file = layout.token_file(name)
    if file.exists():
        return
    try:
        member = await broker.create_member(MESH, name)
    except Conflict:
        member = await broker.rotate_member_token(MESH, name)
    write_secret(file, member.token)
