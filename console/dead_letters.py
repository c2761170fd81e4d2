"""Dead letters: why there are any, those of one cause, and one whole."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from aiohttp import web

from console.messages import MOST_TEXT
from console.sessions import SESSION
from console.views import ROWS, asked, mesh_of, page
from postroom._wire.dead_letters import DEAD_LETTERS, LetterCauses, LetterPage, LettersQuery
from postroom.errors import InvalidMessage, NotFound

_CONDITIONS = ("reason", "consumer", "error", "subject")


async def show_causes(request: web.Request) -> web.Response:
    """`GET /dead_letters?mesh=`: the most frequent cause first."""
    mesh, meshes = await mesh_of(request, asked(request))
    found = LetterCauses(causes=[])
    with suppress(NotFound):  # a mesh has no stream before its first message
        found = found if mesh is None else await request[SESSION].client.causes(mesh)
    return page(request, "causes.html", mesh=mesh, meshes=meshes, found=found)


async def list_letters(request: web.Request) -> web.Response:
    """`GET /dead_letters/list?mesh=&reason=&consumer=&error=&subject=&cursor=`: the oldest first, to choose from."""
    given = asked(request)
    mesh, _ = await mesh_of(request, given)
    wanted = {name: given[name] for name in (*_CONDITIONS, "cursor") if name in given}
    found = LetterPage(letters=[])
    if mesh is not None:
        try:
            query = msgspec.convert({**wanted, "mesh": mesh, "limit": ROWS}, LettersQuery)
        except msgspec.ValidationError as error:
            raise InvalidMessage.of("invalid_query", str(error)) from error
        with suppress(NotFound):  # the same
            found = await request[SESSION].client.list_things(DEAD_LETTERS, query)
    conditions = {name: wanted[name] for name in _CONDITIONS if name in wanted}
    return page(request, "letters.html", mesh=mesh, given=given, conditions=conditions, found=found)


async def show_letter(request: web.Request) -> web.Response:
    """`GET /dead_letters/{mesh}/{id}`: by the id of a letter, or of its message."""
    mesh, id_ = request.match_info["mesh"], request.match_info["id"]
    found = await request[SESSION].client.inspect(DEAD_LETTERS, mesh, id_)
    return page(request, "letter.html", mesh=mesh, id=id_, found=found, most_text=MOST_TEXT)
