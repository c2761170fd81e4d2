"""Who is at work: the programs of all hosts by their last report, and what operators did, as the one log has it."""

from __future__ import annotations

import msgspec
from aiohttp import web

from console.sessions import SESSION
from console.views import ROWS, asked, page
from postroom._wire.nouns import OPERATOR_LOG, LogQuery
from postroom._wire.programs import PROGRAMS, ProgramsQuery
from postroom.errors import InvalidMessage


async def show_programs(request: web.Request) -> web.Response:
    """`GET /programs`: what is wrong first."""
    session = request[SESSION]
    programs = (await session.client.list_things(PROGRAMS, ProgramsQuery(mesh=session.mesh))).programs
    troubles = {id(one): list(one.troubles()) for one in programs}
    programs.sort(key=lambda one: (not troubles[id(one)], one.kind, one.mesh or "", one.name, one.host))
    return page(request, "programs.html", programs=[(one, troubles[id(one)]) for one in programs])


async def show_log(request: web.Request) -> web.Response:
    """`GET /log?noun=&verb=&actor=&key=&cursor=`: the latest first."""
    given = asked(request)
    wanted: dict[str, str] = {
        name: given[name].strip() for name in ("noun", "verb", "actor", "key", "cursor") if name in given
    }
    try:
        query = msgspec.convert({**wanted, "limit": ROWS}, LogQuery, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidMessage.of("invalid_query", str(error)) from error
    found = await request[SESSION].client.list_things(OPERATOR_LOG, query)
    return page(request, "log.html", given=given, wanted=wanted, found=found)
