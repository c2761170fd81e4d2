"""What a daemon reports of itself to its broker, at once and whenever its health changes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.mailroom import MEMBER, MESH, TOPIC, Mailroom
from support.waiting import until_so
from support.zygote import Zygote

from postroom import AsyncClient, BrokerClient
from postroom._wire.programs import PROGRAMS, Program, ProgramsQuery


@pytest.fixture
async def room(short_directory: Path, database_url: str, redis_url: str, zygote: Zygote) -> AsyncIterator[Mailroom]:
    room = Mailroom(short_directory, database_url, redis_url, zygote=zygote)
    await room.open()
    yield room
    room.close()


async def test_the_broker_hears_how_a_daemon_is_and_soon_what_has_changed(room: Mailroom) -> None:
    listed: list[Program] = []
    async with (
        AsyncClient(room.socket) as client,
        BrokerClient(room.broker_urls[0], room.admin_token) as administrator,
    ):

        async def shows(relay: str) -> bool:
            page = await administrator.list_things(PROGRAMS, ProgramsQuery(mesh=MESH))
            listed[:] = page.programs
            return [program.relay for program in listed] == [relay]

        await until_so(lambda: shows("relaying"))
        (well,) = listed
        assert (well.kind, well.mesh, well.name, well.pid) == ("daemon", MESH, MEMBER, room.daemon.pid)
        assert (well.status, well.address, well.waiting, well.dead) == ("ok", str(room.socket), 0, 0)
        assert well.disk_free is not None
        assert list(well.troubles()) == []

        await client.pause_relay(reason="a test")
        await client.send(TOPIC, "one")
        await until_so(lambda: shows("paused"))
        (paused,) = listed
        assert paused.started_at == well.started_at
        assert [trouble.what for trouble in paused.troubles()] == ["an operator paused its relay"]

        room.daemon.kill()
        room.daemon.start()
        await until_so(lambda: shows("paused"))
        assert [program.waiting for program in listed] == [1]
