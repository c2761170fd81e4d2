"""The overview: how much waits on each step of a message's way, how fast it goes, and what is wrong, live.

A rate is the difference of a program's counts in two of its reports: there is no rate before the second one. The plots
of the last hour add up the reports of each minute.
"""

import asyncio
import math
import time
from typing import Final, NamedTuple

import msgspec
from aiohttp import web
from aiohttp.client_exceptions import ClientConnectionResetError

from console.sessions import SESSION
from console.views import MESSAGES, SESSIONS, draw, number, page
from postroom import BrokerClient
from postroom._wire import programs as api
from postroom._wire.administration import MeshQuery
from postroom._wire.dead_letters import DEAD_LETTERS
from postroom._wire.jobs import JOBS
from postroom._wire.unpublished import CONSUMERS, SOURCES, ConsumersQuery
from postroom.errors import PostroomError

EVERYWHERE: Final = "look everywhere"
_LOOK_SECONDS: Final = 3.0  # between two looks, however many pages are open
_RATES: Final = ("relayed", "accepted", "published", "handled", "dead_lettered")


class Overview(NamedTuple):
    """The state at one moment: numbers by name, as text, what is wrong, and the plots of the last hour."""

    numbers: dict[str, str]
    wrong: list[api.Trouble]
    paths: dict[str, str]


class Watch:
    """Looks at everything, once for all open pages (docs/contract/operate.md#operate-72), which all show the same.

    The broker is asked with the token of one of them, and whether the tokens of the others are still valid.
    """

    def __init__(self) -> None:
        self._rates = api.Rates()
        self._seen: tuple[float, Overview] | None = None
        self.minutes: list[api.Minute] = []
        self._minutes_at = -math.inf
        self._lock = asyncio.Lock()

    async def look(self, client: BrokerClient) -> Overview:
        """Return the current state, at most a few seconds old. Raises what the broker answers."""
        async with self._lock:
            now = time.monotonic()
            if self._seen is None or now - self._seen[0] > _LOOK_SECONDS - 0.5:
                self._seen = now, await self._look(client)
                return self._seen[1]
            seen = self._seen[1]
        await client.whoami()
        return seen

    async def _look(self, client: BrokerClient) -> Overview:
        health, programs, sources, consumers, letters, jobs = await asyncio.gather(
            client.health(),
            client.list_things(api.PROGRAMS, api.ProgramsQuery()),
            client.list_things(SOURCES, MeshQuery()),
            client.list_things(CONSUMERS, ConsumersQuery()),
            client.counts(DEAD_LETTERS),
            client.counts(JOBS),
        )
        if (now := time.monotonic()) - self._minutes_at > api.REPORT_SECONDS:
            self.minutes = (await client.list_things(api.MINUTES, api.MinutesQuery())).minutes
            self._minutes_at = now
        self._rates.see(programs.programs)
        rates = {name: self._rates.of(name) for name in _RATES}
        counts = {
            "outbox_waiting": sum(one.waiting or 0 for one in programs.programs),
            "outbox_dead": sum(one.dead or 0 for one in programs.programs),
            "unpublished": sum(one.count for one in sources.sources),
            "refused": sum(one.failing for one in sources.sources),
            "waiting": sum(one.waiting for one in consumers.consumers),
            "in_hand": sum(one.in_hand for one in consumers.consumers),
            "dead": sum(letters.letters.values()),
            "jobs_running": jobs.running,
            "jobs_failed": jobs.failed,
            "programs": len(programs.programs),
        }
        shown = {name: "-" if rate is None else f"{rate:,.1f}/s" for name, rate in rates.items()}
        shown |= {f"hour_{name}": caption for name, caption in api.hour_in_words(self.minutes).items()}
        cut_off = health.status == "unavailable"  # reports cannot be kept: that they do not come is no news
        heard = [one for one in programs.programs if not (one.away and cut_off)]
        wrong = [api.Trouble("the broker", one, "postroom doctor", "down") for one in health.reasons if cut_off]
        wrong += api.troubles_of([*heard, *consumers.consumers, *sources.sources, letters, jobs])
        wrong += jobs.unattended(programs.programs)
        if consumers.unread is not None:
            wrong.append(api.Trouble("consumers", consumers.unread.detail, "postroom doctor", "wrong"))
        numbers = {name: number(count) for name, count in counts.items()} | shown
        return Overview(numbers, api.worst_first(wrong), draw(self.minutes))


WATCH: Final = web.AppKey("watch", Watch)


async def show_overview(request: web.Request) -> web.Response:
    """`GET /`: for operators that may look everywhere; others begin at their messages."""
    session = request[SESSION]
    if not session.may(EVERYWHERE):
        raise web.HTTPSeeOther(MESSAGES)
    watch = request.app[WATCH]
    overview = await watch.look(session.client)
    return page(request, "overview.html", **overview._asdict(), minutes=watch.minutes)


async def stream_overview(request: web.Request) -> web.StreamResponse:
    """`GET /live`: the same as server-sent events, until the session ends."""
    session = request[SESSION]
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"})
    watch, sent = request.app[WATCH], b""
    try:
        await answer.prepare(request)
        while request.method != "HEAD" and not request.app[SESSIONS].is_over(session.key):
            try:
                data = msgspec.json.encode((await watch.look(session.client))._asdict())
            except PostroomError as error:
                data = msgspec.json.encode({"trouble": str(error)})
                if error.code == "invalid_token":
                    await request.app[SESSIONS].end(session.key)
            except RuntimeError:  # the operator has logged out meanwhile: the client is closed
                if request.app[SESSIONS].is_over(session.key):
                    break
                raise
            await answer.write(b": here\n\n" if data == sent else b"data: " + data + b"\n\n")
            sent = data
            await asyncio.sleep(_LOOK_SECONDS)
    except ClientConnectionResetError:
        pass  # the page was closed
    return answer
