"""Repairs: an operator's change, shown as a dry run, then done with a reason (docs/contract/operate.md#operate-72).

A repair belongs to the session that began it, and is forgotten with it; what was done is in the broker's log.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any, Final, get_args

import msgspec
from aiohttp import web

from console.sessions import SESSION, Session
from console.views import page
from postroom._wire.dead_letters import DEAD_LETTERS
from postroom._wire.jobs import JOBS
from postroom._wire.nouns import CHANGES, AnyNoun, Failure, Result
from postroom._wire.operations import Reason
from postroom._wire.unpublished import CONSUMERS, UNPUBLISHED
from postroom._wire.words import shape_fault
from postroom.errors import InvalidMessage, NotFound, PostroomError

MOST_REPAIRS: Final = 200  # that are remembered, of all sessions
_DRY: Final = "dry run"  # a dry run keeps no reason, but the broker wants one
_OPERATED: Final[tuple[AnyNoun, ...]] = (DEAD_LETTERS, JOBS, CONSUMERS, *UNPUBLISHED.values())
_NOUNS: Final = {noun.path: noun for noun in _OPERATED}


class Repair:
    """One verb on the things that a dry run has found: planned, then under way, then finished."""

    def __init__(self, noun: AnyNoun, verb: str, mesh: str | None, session: Session, planned: Result[Any]) -> None:
        self.noun = noun
        self.verb = verb
        self.page = f"/{noun.path.split('/')[2]}"  # the list of such things
        self.mesh = mesh
        self.session = session
        self.things = [str(getattr(thing, "id", thing)) for thing in planned.done]
        self.refused = planned.failed
        self.done: list[Any] = []
        self.failed: list[Failure] = []
        self.trouble: str | None = None  # why it ended early
        self.task: asyncio.Task[None] | None = None

    @property
    def under_way(self) -> bool:
        """Whether it is being done."""
        return self.task is not None and not self.task.done()

    async def run(self, reason: str) -> None:
        """Do it, some hundred things a request; what was done stays done where a later request fails."""
        try:
            for begin in range(0, len(self.things), _AT_ONCE):
                wanted = msgspec.convert({"ids": self.things[begin : begin + _AT_ONCE]}, _filter_of(self.noun))
                parts = self.session.client.changes(self.noun, self.verb, wanted, reason=reason, mesh=self.mesh)
                async for part in parts:
                    self.done += part.done
                    self.failed += part.failed
        except (PostroomError, RuntimeError) as error:  # the latter: the operator has logged out
            self.trouble = str(error)


_AT_ONCE: Final = min(100, CHANGES)  # things in one request, after which the progress is updated
_repairs: Final = web.AppKey("repairs", dict[str, Repair])
_numbers: Final = itertools.count(1)


async def remember(app: web.Application) -> AsyncIterator[None]:
    """Keep the repairs of an application for as long as it runs."""
    app[_repairs] = {}
    yield
    for repair in app[_repairs].values():
        if repair.task is not None:
            repair.task.cancel()


async def plan(request: web.Request) -> web.Response:
    """`POST /repairs`: a dry run of a verb, on the things that are chosen or on all that match."""
    form, session = await request.post(), request[SESSION]
    noun = _NOUNS.get(str(form.get("noun")))
    verb = str(form.get("verb"))
    if noun is None or verb not in noun.verbs:
        raise InvalidMessage.of("invalid_request", "the form names nothing that can be repaired")
    filter_ = _filter_of(noun)
    given: dict[str, Any] = {
        name: text for name in filter_.__struct_fields__ if name != "ids" and (text := form.get(name))
    }
    chosen = [str(one) for one in form.getall("id", [])]
    if form.get("all") is None:
        if not chosen:
            raise InvalidMessage.of("nothing_chosen", f"choose {noun.things} first, or all that match")
        given = {"ids": chosen}
    try:
        wanted = msgspec.convert(given, filter_, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidMessage.of("invalid_request", shape_fault(error, filter_)[1]) from error
    mesh = str(form.get("mesh") or "") or None
    planned = await session.client.change(noun, verb, wanted, reason=_DRY, mesh=mesh, dry_run=True)
    repairs = request.app[_repairs]
    while len(repairs) >= MOST_REPAIRS:
        oldest = next((number for number, each in repairs.items() if not each.under_way), next(iter(repairs)))
        del repairs[oldest]
    number = str(next(_numbers))
    repairs[number] = Repair(noun, verb, mesh, session, planned)
    raise web.HTTPSeeOther(f"/repairs/{number}")


async def show_repair(request: web.Request) -> web.Response:
    """`GET /repairs/{id}`: what would be done, its progress, or its outcome."""
    return page(request, "repair.html", repair=_own(request))


async def begin(request: web.Request) -> web.Response:
    """`POST /repairs/{id}`: do what was planned, with a reason; once."""
    repair = _own(request)
    try:
        reason = msgspec.convert((await request.post()).get("reason"), Reason)
    except msgspec.ValidationError:
        sentence = "say why, in at most 1,000 characters: it is kept in the log"
        raise InvalidMessage.of("reason_missing", sentence) from None
    if repair.task is None:
        repair.task = asyncio.create_task(repair.run(reason), name="repair")
    raise web.HTTPSeeOther(request.path)


def _filter_of(noun: AnyNoun) -> type[msgspec.Struct]:
    found: type[msgspec.Struct] = get_args(noun.change)[0]
    return found


def _own(request: web.Request) -> Repair:
    repair = request.app[_repairs].get(request.match_info["id"])
    if repair is None or repair.session.key != request[SESSION].key:
        raise NotFound.of("not_found", "that repair is not one of this log-in; `postroom log` shows what was done")
    return repair
