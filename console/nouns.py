"""The pages of what operators see: dead letters, publishing, consumers, jobs, programs, and the operator log."""

import asyncio
from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args

import msgspec
from aiohttp import web

from console.messages import MOST_TEXT
from console.sessions import SESSION
from console.views import ROWS, asked, bars, mesh_of, page
from postroom._wire.administration import MeshQuery
from postroom._wire.dead_letters import DEAD_LETTERS, LetterCauses, LetterPage, LettersQuery
from postroom._wire.jobs import JOBS, JobsQuery, JobState
from postroom._wire.nouns import OPERATOR_LOG, LogQuery
from postroom._wire.programs import PROGRAMS, ProgramsQuery
from postroom._wire.trees import grow
from postroom._wire.unpublished import CONSUMERS, SOURCES, UNPUBLISHED, ConsumersQuery
from postroom._wire.words import shape_fault
from postroom.errors import InvalidMessage

Q = TypeVar("Q", bound=msgspec.Struct)

MOST_ACTIVITIES: Final = 75  # of a job on one page, with their ledgers in words
_CONDITIONS: Final = ("reason", "consumer", "error", "subject")
_STATES: Final[tuple[str, ...]] = get_args(JobState)


async def show_causes(request: web.Request) -> web.Response:
    """`GET /dead_letters?mesh=`: why messages are dead, the most frequent cause first."""
    mesh, meshes = await mesh_of(request, asked(request))
    found = LetterCauses(causes=[])
    if mesh is not None:
        found = await request[SESSION].client.causes(mesh)
    return page(request, "causes.html", mesh=mesh, meshes=meshes, found=found)


async def list_letters(request: web.Request) -> web.Response:
    """`GET /dead_letters/list?mesh=&reason=&consumer=&error=&subject=&cursor=`: the oldest first, to choose from."""
    given = asked(request)
    mesh, _ = await mesh_of(request, given)
    conditions: dict[str, str] = {name: given[name] for name in _CONDITIONS if name in given}
    found = LetterPage(letters=[])
    if mesh is not None:
        query = _query(LettersQuery, {**conditions, "cursor": given.get("cursor"), "mesh": mesh})
        found = await request[SESSION].client.list_things(DEAD_LETTERS, query)
    return page(request, "letters.html", noun=DEAD_LETTERS, mesh=mesh, given=given, conditions=conditions, found=found)


async def show_letter(request: web.Request) -> web.Response:
    """`GET /dead_letters/{mesh}/{id}`: by the id of a letter, or of its message."""
    mesh, id_ = request.match_info["mesh"], request.match_info["id"]
    found = await request[SESSION].client.inspect(DEAD_LETTERS, mesh, id_)
    return page(request, "letter.html", noun=DEAD_LETTERS, mesh=mesh, id=id_, found=found, most_text=MOST_TEXT)


async def show_consumers(request: web.Request) -> web.Response:
    """`GET /consumers?mesh=`: how far each is behind, paused ones and those furthest behind first."""
    mesh, meshes = await mesh_of(request, asked(request))
    found = await request[SESSION].client.list_things(CONSUMERS, ConsumersQuery(mesh=mesh, last=60))
    found.consumers.sort(key=lambda one: (one.paused is None, -one.waiting - one.in_hand, one.stream, one.consumer))
    lags = {one.id: bars(one.past) for one in found.consumers[:ROWS]}
    return page(request, "consumers.html", noun=CONSUMERS, mesh=mesh, meshes=meshes, found=found, lags=lags)


async def show_unpublished(request: web.Request) -> web.Response:
    """`GET /unpublished`: what waits to be published, and what is refused, of all meshes."""
    client, everywhere = request[SESSION].client, MeshQuery()
    nouns = UNPUBLISHED.values()
    sources, found = await asyncio.gather(
        client.list_things(SOURCES, everywhere),
        asyncio.gather(*(client.list_things(noun, everywhere) for noun in nouns)),
    )
    refused = [(noun, each.failing) for noun, each in zip(nouns, found, strict=True)]
    return page(request, "unpublished.html", sources=sources.sources, refused=refused)


async def list_jobs(request: web.Request) -> web.Response:
    """`GET /jobs?mesh=&flow=&state=&cursor=`: the newest first."""
    given = asked(request)
    mesh, meshes = await mesh_of(request, given)
    wanted = {name: given.get(name) for name in ("flow", "state", "cursor")}
    found = await request[SESSION].client.list_things(JOBS, _query(JobsQuery, {**wanted, "mesh": mesh}))
    return page(request, "jobs.html", noun=JOBS, mesh=mesh, meshes=meshes, given=given, states=_STATES, found=found)


async def show_job(request: web.Request) -> web.Response:
    """`GET /jobs/{id}`: its activities as a tree, and what operators did to it."""
    found = await request[SESSION].client.inspect(JOBS, request.match_info["id"])
    branches = grow(found.activities[:MOST_ACTIVITIES])
    rest = len(found.activities[MOST_ACTIVITIES:])
    return page(request, "job.html", noun=JOBS, job=found.job, log=found.log, branches=branches, rest=rest)


async def show_programs(request: web.Request) -> web.Response:
    """`GET /programs`: those of all hosts by their last report, those with troubles first."""
    session = request[SESSION]
    programs = (await session.client.list_things(PROGRAMS, ProgramsQuery(mesh=session.mesh))).programs
    troubles = {id(one): list(one.troubles()) for one in programs}
    programs.sort(key=lambda one: (not troubles[id(one)], one.kind, one.mesh or "", one.name, one.host))
    return page(request, "programs.html", programs=[(one, troubles[id(one)]) for one in programs])


async def show_log(request: web.Request) -> web.Response:
    """`GET /log?noun=&verb=&actor=&key=&cursor=`: what operators did, the latest first."""
    given = asked(request)
    wanted: dict[str, str] = {
        name: given[name].strip() for name in ("noun", "verb", "actor", "key", "cursor") if name in given
    }
    found = await request[SESSION].client.list_things(OPERATOR_LOG, _query(LogQuery, wanted))
    return page(request, "log.html", given=given, wanted=wanted, found=found)


def _query(kind: type[Q], wanted: Mapping[str, Any]) -> Q:
    """Make the query of a page of rows; raises `InvalidMessage` for invalid fields."""
    asks = {name: value for name, value in wanted.items() if value is not None}
    try:
        return msgspec.convert({**asks, "limit": ROWS}, kind, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidMessage.of("invalid_query", shape_fault(error, kind)[1]) from error
