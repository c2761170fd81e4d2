"""Jobs: which there are and in what state, and the tree of one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple, get_args

import msgspec
from aiohttp import web

from console.sessions import SESSION
from console.views import ROWS, asked, mesh_of, page
from postroom._wire.digits import Meaning, explain
from postroom._wire.jobs import JOBS, Activity, JobsQuery, JobState
from postroom.errors import InvalidMessage

STATES: Final[tuple[str, ...]] = get_args(JobState)
MOST_ACTIVITIES: Final = 75  # of a job on one page, with their ledgers in words


async def list_jobs(request: web.Request) -> web.Response:
    """`GET /jobs?mesh=&flow=&state=&cursor=`: the newest first."""
    given = asked(request)
    mesh, meshes = await mesh_of(request, given)
    wanted: dict[str, str] = {name: given[name] for name in ("flow", "state", "cursor") if name in given}
    try:
        query = msgspec.convert({**wanted, "mesh": mesh, "limit": ROWS}, JobsQuery)
    except msgspec.ValidationError as error:
        raise InvalidMessage.of("invalid_query", str(error)) from error
    found = await request[SESSION].client.list_things(JOBS, query)
    return page(request, "jobs.html", mesh=mesh, meshes=meshes, given=given, states=STATES, found=found)


class Branch(NamedTuple):
    """An activity with its ledger in words, and those that it spawned."""

    activity: Activity
    meanings: list[Meaning]
    children: list[Branch]


async def show_job(request: web.Request) -> web.Response:
    """`GET /jobs/{id}`: its activities as they spawned each other, and what operators did to it."""
    found = await request[SESSION].client.inspect(JOBS, request.match_info["id"])
    shown = found.activities[:MOST_ACTIVITIES]
    rest = len(found.activities) - len(shown)
    return page(request, "job.html", job=found.job, log=found.log, branches=_grow(shown), rest=rest)


def _grow(activities: Iterable[Activity]) -> list[Branch]:
    branches = {one.id: Branch(one, explain(one.ledger), []) for one in activities}
    roots: list[Branch] = []
    for branch in branches.values():
        above = None if branch.activity.parent is None else branches.get(branch.activity.parent)
        (roots if above is None else above.children).append(branch)
    return roots
