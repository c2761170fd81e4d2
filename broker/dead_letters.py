"""Dead letters: operators see, replay and drop them (docs/contract/delivery.md#delivery-51).

Dead letters of consumers, webhooks and jobs are in the record, in Postgres. Those of agents, daemons and other programs
are in streams alone, and a replay is published: both need NATS. Without it only the record is shown.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

import msgspec
from aiohttp import web
from nats.js import JetStreamContext

from broker.administration import asked_mesh, path_mesh
from broker.authentication import PRINCIPAL, own_mesh
from broker.database import unavailable_as_503
from broker.operator import BRIEFLY, NATS_UNREACHABLE, PATIENCE, Handlers, Nats, check_mesh, keep_verb
from broker.requests import decode_body
from postroom._wire import dead_letters as api
from postroom._wire.nouns import CHANGES, Failure, Result
from postroom.chassis.postgres import Connection
from postroom.chassis.routes import Handler, decode_query, json_response
from postroom.delivery.dead_letters.operations import (
    EFFECTS,
    TOGETHER,
    LetterOperations,
    Outcome,
    StoredLetter,
    count_letters,
)
from postroom.errors import NotFound, PostroomError, Problem, TryAgain

_MOST_LETTERS: Final = 100_000  # that one request for causes reads: a few seconds
_MOST_CAUSES: Final = 100


@dataclass(frozen=True, eq=False)
class DeadLetters(Handlers):
    """The handlers of the routes of dead letters."""

    _nats: Nats

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/dead_letters`: never a payload."""
        query = decode_query(request, api.LettersQuery)
        wanted = msgspec.convert(query, api.LetterFilter, from_attributes=True)
        async with self._opened(request, own_mesh(request[PRINCIPAL], query.mesh)) as (letters, unread):
            found, next_cursor, _ = await letters.page(wanted, cursor=query.cursor, limit=query.limit)
        return _page(found, next_cursor, unread)

    async def causes(self, request: web.Request) -> web.Response:
        """`GET /v1/dead_letters/causes`: an example of each, without its payload."""
        async with self._opened(request, asked_mesh(request)) as (letters, unread):
            causes, more = await letters.causes(_MOST_LETTERS)
        more |= len(causes) > _MOST_CAUSES
        return json_response(api.LetterCauses(causes=causes[:_MOST_CAUSES], more=more, unread=unread))

    async def inspect(self, request: web.Request) -> web.Response:
        """`GET /v1/dead_letters/{mesh}/{id}`: by the id of a letter or of its message; whole for readers of bodies."""
        wanted = api.LetterFilter(ids=frozenset({request.match_info["id"]}))
        async with self._opened(request, path_mesh(request)) as (letters, unread):
            found = await letters.find(wanted, payloads=True)
        return _page(found, None, unread, whole=request[PRINCIPAL].reads_bodies)

    async def log(self, request: web.Request) -> web.Response:
        """`GET /v1/dead_letters/log`."""
        async with self._opened(request, asked_mesh(request)) as (letters, _):
            return json_response(api.LetterLog(notes=await letters.notes()))

    async def counts(self, request: web.Request) -> web.Response:
        """`GET /v1/dead_letters/counts`: for `postroom status`, which waits briefly."""
        async with self._nats.opened(BRIEFLY) as (js, unread), self.reading(request) as connection:
            try:
                counts = api.LetterCounts(letters=await count_letters(connection, js), unread=unread)
            except PostroomError as error:  # NATS is there, and JetStream silent, as after the loss of a majority
                counts = api.LetterCounts(letters=await count_letters(connection, None), unread=error.problem)
        return json_response(counts)

    def change(self, verb: str) -> Handler:
        """Make the handler of `POST /v1/dead_letters/<verb>`: a failure of one does not stop the others."""

        async def handle(request: web.Request) -> web.Response:
            asked = await decode_body(request, api.DEAD_LETTERS.change)
            mesh = own_mesh(request[PRINCIPAL], asked.mesh)
            async with self._nats.opened(PATIENCE) as (js, unread):
                if unread is not None and EFFECTS[verb] is not None:
                    raise PostroomError(unread)
                # closed: what is replayed may die again before the next request, and would be replayed for ever
                async with self._lent(request, mesh, js, unread) as letters:
                    page = await letters.page(asked.filter, cursor=asked.cursor, limit=CHANGES, closed=True)
                found, next_cursor, missing = page
                done = list[api.Letter]()
                failed = [Failure(id=id_, problem=error.problem) for id_, error in missing.items()]
                if asked.dry_run:
                    done = [_shown(stored) for stored in found]
                else:
                    outcomes = dict[str, Outcome]()
                    try:
                        for begin in range(0, len(found), TOGETHER):
                            # a connection each: between two transactions it is the turn of what else the caller asks
                            async with self._lent(request, mesh, js, unread) as letters, unavailable_as_503():
                                outcomes |= await letters.settle(
                                    verb, found[begin : begin + TOGETHER], why=asked.reason
                                )
                    except TryAgain as error:  # the caller would repeat a 503, and be refused what was settled before
                        outcomes = {stored.id: error for stored in found} | outcomes
                    for stored in found:
                        if isinstance(outcome := outcomes[stored.id], PostroomError):
                            failed.append(Failure(id=stored.id, problem=outcome.problem))
                        else:
                            done.append(_shown(stored, new_message_id=outcome))
                result = Result[api.Letter](
                    dry_run=asked.dry_run, done=done, failed=failed, next_cursor=next_cursor, unread=unread
                )
            return json_response(result)

        return handle

    @asynccontextmanager
    async def _opened(self, request: web.Request, mesh: str) -> AsyncIterator[tuple[LetterOperations, Problem | None]]:
        """Lend the letters of a mesh, with the reason why those that are in streams alone cannot be read, if any."""
        async with self._nats.opened(PATIENCE) as (js, unread), self._lent(request, mesh, js, unread) as letters:
            yield letters, unread

    @asynccontextmanager
    async def _lent(
        self, request: web.Request, mesh: str, js: JetStreamContext | None, unread: Problem | None
    ) -> AsyncIterator[LetterOperations]:
        """Lend the letters of a mesh with a connection of their own to Postgres."""
        actor = request[PRINCIPAL].actor

        async def log(connection: Connection, verb: str, ids: Sequence[str], why: str) -> None:
            await keep_verb(connection, actor, api.DEAD_LETTERS, verb, [f"{mesh} {id_}" for id_ in ids], reason=why)

        async with self.reading(request) as connection:
            letters = LetterOperations(connection, js, mesh, actor=actor, log=log)
            try:
                await check_mesh(connection, mesh)
            except NotFound:  # letters may be of a context that is not a mesh, which NATS may know alone
                hidden = unread is not None and unread.code == NATS_UNREACHABLE
                if not hidden and not await letters.are_known():
                    raise
            yield letters


def _page(
    found: list[StoredLetter], next_cursor: str | None, unread: Problem | None, *, whole: bool = False
) -> web.Response:
    shown = [_shown(stored, whole=whole) for stored in found]
    return json_response(api.LetterPage(letters=shown, next_cursor=next_cursor, unread=unread))


def _shown(stored: StoredLetter, *, whole: bool = False, new_message_id: str | None = None) -> api.Letter:
    letter = stored.letter
    if letter is not None and not whole:
        letter = letter.summary()
    return api.Letter(id=stored.id, letter=letter, new_message_id=new_message_id)
