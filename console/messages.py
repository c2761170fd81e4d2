"""Messages: finding one, and its story from the row on a disk to what it caused."""

import base64
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from aiohttp import web

from console.sessions import SESSION
from console.views import ROWS, asked, mesh_of, page, story_of
from postroom._wire.administration import HistoryMessage, MessageLines, MessagesQuery
from postroom._wire.trees import grow
from postroom.errors import InvalidMessage, NotFound, NotPermitted

MOST_STEPS: Final = 100  # of a story on one page
MOST_TEXT: Final = 4000  # characters of a body on a page; all of it is a file


async def show_messages(request: web.Request) -> web.Response:
    """`GET /messages?mesh=&sender=&destination=&since=&until=&cursor=`: the latest first."""
    given = asked(request)
    mesh, meshes = await mesh_of(request, given)
    found = MessageLines(messages=[])
    if mesh is not None:
        wanted: dict[str, Any] = {name: given.get(name) for name in ("sender", "destination", "cursor")}
        wanted |= {name: _moment(given, name) for name in ("since", "until")}
        found = await request[SESSION].client.messages(MessagesQuery(mesh=mesh, limit=ROWS, **wanted))
    return page(request, "messages.html", given=given, mesh=mesh, meshes=meshes, found=found)


async def find(request: web.Request) -> web.Response:
    """`GET /find?id=`: a form without a script cannot make a path with the id in it."""
    wanted = request.query.get("id", "").strip()
    where = story_of(wanted) if wanted else "/messages"
    if where == request.path_qs:
        return await show_story(request)
    raise web.HTTPSeeOther(where)


async def show_story(request: web.Request) -> web.Response:
    """`GET /trace/{id}`: where it waits, its steps in time and as a tree, and the body for those who may read it."""
    client, id_ = request[SESSION].client, request.match_info.get("id") or request.query["id"]
    story = await client.trace(id_)
    steps = story.steps[:MOST_STEPS]
    times = [step.at for step in steps if step.at is not None]
    accepted = next((step for step in steps if step.what == "accepted"), None)
    message: HistoryMessage | None = None
    if accepted is not None:
        try:
            message = await client.message(accepted.thing)
        except (NotFound, NotPermitted):  # retention has deleted it, or this operator may not read it
            message = None
    text = None if message is None else _text(message)
    return page(
        request,
        "story.html",
        id=id_,
        story=story,
        outcomes={step.id: step.outcome for step in story.steps},
        steps=steps,
        began=min(times, default=None),
        branches=grow(steps),
        message=message,
        text=text,
        cut=text is not None and len(text) > MOST_TEXT,
        most_text=MOST_TEXT,
    )


async def show_body(request: web.Request) -> web.Response:
    """`GET /messages/{id}/body`: as a file, which browsers do not show as a page."""
    message = await request[SESSION].client.message(request.match_info["id"])
    data = base64.b64decode(message.body_base64) if message.body_base64 is not None else (message.body or "").encode()
    headers = {"Content-Disposition": f'attachment; filename="{message.broker_message_id}"'}
    return web.Response(body=data, content_type="application/octet-stream", headers=headers)


def _text(message: HistoryMessage) -> str | None:
    """Return a body that is text; JSON is indented, where all of it can be shown then."""
    if message.body is None or len(message.body) > MOST_TEXT:
        return message.body
    try:
        indented = msgspec.json.format(message.body, indent=2)
    except (msgspec.DecodeError, RecursionError):  # it is no JSON, or nests too deep
        return message.body
    return indented if len(indented) <= MOST_TEXT else message.body


def _moment(given: dict[str, str], name: str) -> datetime | None:
    """Read a time of a form, in UTC unless it has an offset."""
    if name not in given:
        return None
    try:
        found = datetime.fromisoformat(given[name].strip())
        return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)
    except (OverflowError, ValueError):
        sentence = f"{given[name][:64]!r} is not a time: write 2026-01-31T12:00, in UTC"
        raise InvalidMessage.of("invalid_query", sentence, field=name) from None
