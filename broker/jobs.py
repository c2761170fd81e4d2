"""Jobs: operators start, see, retry and cancel them (docs/contract/jobs.md#jobs-30)."""

from datetime import timedelta
from typing import Final
from uuid import UUID, uuid4

import msgspec
from aiohttp import web

from broker.authentication import PRINCIPAL, any_mesh, own_mesh
from broker.operator import Handlers, check_mesh, each, keep_log, keep_verb
from broker.requests import decode_body
from postroom._wire.jobs import JOBS, Job, JobFilter, JobPage, JobsQuery, MessagePage, StartedJob, StartJob
from postroom._wire.moment import EPOCH
from postroom._wire.nouns import CHANGES, Result, invalid_cursor
from postroom.chassis.postgres import Connection, uuid_of
from postroom.chassis.routes import Handler, decode_query, json_response
from postroom.delivery.publication.postgres import EVENTS
from postroom.errors import InvalidMessage
from postroom.ledger import operations
from postroom.ledger.primitives import Start

_WITHHELD: Final = msgspec.Raw(b"null")  # a body, for callers that may only look
_MICROSECOND: Final = timedelta(microseconds=1)


class Jobs(Handlers):
    """The handlers of the routes of jobs."""

    async def start(self, request: web.Request) -> web.Response:
        """`POST /v1/jobs`: a flow by its name; a worker that has it does the rest."""
        asked = await decode_body(request, StartJob)
        principal = request[PRINCIPAL]
        mesh = own_mesh(principal, asked.mesh)
        try:
            text = bytes(asked.request).decode()
        except UnicodeDecodeError as error:
            detail = "the request is not UTF-8: pass UTF-8 text"
            raise InvalidMessage.of("invalid_request", detail, field="request") from error
        wanted = Start(asked.id, mesh, asked.flow, uuid4(), asked.first, text, asked.threshold, asked.traceparent)
        async with self.reading(request) as connection, connection.transaction():
            await check_mesh(connection, mesh)
            started = await operations.start(connection, wanted)
            if started:
                await keep_log(connection, principal.actor, "start", JOBS.name, mesh, str(asked.id), outcome="started")
        self._database.ring([EVENTS.name])
        answer = StartedJob(id=asked.id, mesh=mesh, flow=asked.flow, started=started)
        return json_response(answer, 201 if started else 200)

    async def list(self, request: web.Request) -> web.Response:
        """`GET /v1/jobs`."""
        query = decode_query(request, JobsQuery)
        wanted = msgspec.convert(query, JobFilter, from_attributes=True)
        async with self.reading(request) as connection:
            mesh = any_mesh(request[PRINCIPAL], query.mesh)
            jobs, next_cursor = await _page(connection, wanted, mesh, query.cursor, query.limit)
        return json_response(JobPage(jobs=jobs, next_cursor=next_cursor))

    async def inspect(self, request: web.Request) -> web.Response:
        """`GET /v1/jobs/{id}`: with its tree."""
        if (job := uuid_of(request.match_info["id"])) is None:
            raise InvalidMessage.of("invalid_request", "a job's id is a UUID", field="id")
        async with self.reading(request) as connection:
            found = await operations.show_job(connection, job)
        if any_mesh(request[PRINCIPAL], None) not in (None, found.job.mesh):
            raise operations.missing(job)
        if not request[PRINCIPAL].reads_bodies:
            bare = [msgspec.structs.replace(one, request=_WITHHELD) for one in found.activities]
            found = msgspec.structs.replace(found, activities=bare)
        return json_response(found)

    async def counts(self, request: web.Request) -> web.Response:
        """`GET /v1/jobs/counts`."""
        async with self.reading(request) as connection:
            return json_response(await operations.count_jobs(connection))

    async def explain(self, request: web.Request) -> web.Response:
        """`GET /v1/jobs/messages/{id}`: what became of a message, or of an activity by its id."""
        message, mesh = request.match_info["id"], any_mesh(request[PRINCIPAL], None)
        async with self.reading(request) as connection:
            found = await operations.find_message(connection, message)
        shown = [one for one in found if mesh in (None, one.mesh)]
        if not shown:
            raise operations.unknown_message(message)
        if not request[PRINCIPAL].reads_bodies:
            shown = [msgspec.structs.replace(one, said=_WITHHELD) for one in shown]
        return json_response(MessagePage(messages=shown))

    def change(self, verb: str) -> Handler:
        """Make the handler of `POST /v1/jobs/<verb>`: each job in a transaction of its own."""
        table = JOBS.verbs[verb]

        async def handle(request: web.Request) -> web.Response:
            asked = await decode_body(request, JOBS.change)
            actor, mesh = request[PRINCIPAL].actor, any_mesh(request[PRINCIPAL], asked.mesh)
            async with self.reading(request) as connection:
                jobs: dict[UUID, Job | None]
                if asked.filter.ids is None:
                    found, next_cursor = await _page(connection, asked.filter, mesh, asked.cursor, CHANGES)
                    jobs = {job.id: job for job in found}
                else:
                    ids, next_cursor = asked.filter.ids, None
                    found = await operations.find_jobs(connection, JobFilter(ids=ids), len(ids), mesh=mesh)
                    jobs = dict.fromkeys(ids) | {job.id: job for job in found}

            async def effect(job: UUID) -> Job:
                if (one := jobs[job]) is None:
                    raise operations.missing(job)
                if asked.dry_run:
                    if one.state not in table.states:
                        raise operations.refusal(verb, job, one.state)
                    if verb in operations.FORESEEN:
                        async with self.reading(request) as connection:
                            await operations.FORESEEN[verb](connection, job)
                    return one
                # a connection each: between two jobs it is the turn of what else the caller asks
                async with self.reading(request) as connection, connection.transaction():
                    await operations.EFFECTS[verb](connection, job, actor=actor, reason=asked.reason)
                    await keep_verb(connection, actor, JOBS, verb, [f"{one.mesh} {job}"], reason=asked.reason)
                return one

            done, failed = await each(jobs, effect, str)
            result = Result[Job](dry_run=asked.dry_run, done=done, failed=failed, next_cursor=next_cursor)
            return json_response(result)

        return handle


async def _page(
    connection: Connection, wanted: JobFilter, mesh: str | None, cursor: str | None, limit: int
) -> tuple[list[Job], str | None]:
    """Return the jobs that match, from `cursor` on, and the cursor of the next page, if there is one.

    Raises `NotFound` where the mesh does not exist: an empty page would look like good news.
    """
    after = None
    if cursor is not None:
        microseconds, _, job = cursor.partition("-")
        try:
            after = EPOCH + int(microseconds) * _MICROSECOND, UUID(job)
        except (ValueError, OverflowError):
            raise invalid_cursor() from None
    found = await operations.find_jobs(connection, wanted, limit + 1, mesh=mesh, after=after)
    if not found:
        await check_mesh(connection, mesh)
    if len(found) <= limit:
        return found, None
    last = found[limit - 1]
    return found[:limit], f"{(last.started_at - EPOCH) // _MICROSECOND}-{last.id}"
