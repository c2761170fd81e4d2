"""What a shell offers for ids and names: those that the daemon and the broker know just now.

A server that cannot be reached, or refuses, adds nothing and no error: the user has not run a command yet.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from postroom import AsyncClient, BrokerClient
    from postroom._wire.unpublished import Durable

Complete = Callable[[typer.Context, str], list[str]]

_SECONDS: Final = 1.0  # for which a shell may wait
_MOST: Final = 200  # things that are read
_URL: Final = "POSTROOM_BROKER_URL"


def _offering(find: Callable[[dict[str, Any], list[str], str], Awaitable[Iterable[str]]]) -> Complete:
    """Return a completion: `find` is called with the options so far, the verb's words, and how the word begins."""

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        import asyncio  # noqa: PLC0415 - brings a fifth of what a command imports

        async def ask() -> Iterable[str]:
            async with asyncio.timeout(_SECONDS):
                return await find(ctx.params, ctx.command_path.split(), incomplete)

        try:
            found = asyncio.run(ask())
        except (Exception, SystemExit):  # noqa: BLE001 - an error would be written into the line being typed
            return []
        given = {word for value in ctx.params.values() if isinstance(value, list | tuple) for word in value}
        return [word for word in dict.fromkeys(found) if word.startswith(incomplete) and word not in given]

    return complete


def _of_daemon(find: Callable[[AsyncClient, list[str], str], Awaitable[Iterable[str]]]) -> Complete:
    async def ask(options: dict[str, Any], words: list[str], begun: str) -> Iterable[str]:
        from postroom import AsyncClient  # noqa: PLC0415

        async with AsyncClient(options.get("socket"), patience=0, timeout=_SECONDS) as client:
            return await find(client, words, begun)

    return _offering(ask)


def _of_broker(find: Callable[[BrokerClient, str | None, list[str]], Awaitable[Iterable[str]]]) -> Complete:
    async def ask(options: dict[str, Any], words: list[str], _: str) -> Iterable[str]:
        from cli.connect import TOKEN_FILES, read_token  # noqa: PLC0415
        from postroom import BrokerClient  # noqa: PLC0415

        file = options.get("token_file") or next(filter(None, map(os.environ.get, TOKEN_FILES)), None)
        token = read_token(None if file is None else Path(file))
        async with BrokerClient(options.get("url") or os.environ[_URL], token, patience=0, timeout=_SECONDS) as client:
            named = options.get("mesh")
            mesh = named if isinstance(named, str) else os.environ.get("POSTROOM_MESH") or (await client.whoami()).mesh
            return await find(client, mesh, words)

    return _offering(ask)


async def _rows(client: AsyncClient, words: list[str], begun: str) -> Iterable[str]:
    """Rows that the verb is for: their ids and, once a word is begun, the ids that their senders gave them."""
    from postroom import ListQuery  # noqa: PLC0415
    from postroom._wire.operations import VERBS  # noqa: PLC0415

    known = next((each for verb, each in VERBS.items() if verb == words[-1]), None)
    queries = [ListQuery(limit=_MOST)]
    if known is not None:
        states = sorted(known.states, key=lambda state: state != "dead")
        queries = [ListQuery(status=state, held=known.held, limit=_MOST) for state in states]
    rows = [row for query in queries for row in (await client.list_rows(query)).rows]
    return [row.id for row in rows] + ([row.client_message_id for row in rows] if begun else [])


async def _row_destinations(client: AsyncClient, _: list[str], __: str) -> Iterable[str]:
    from postroom import ListQuery  # noqa: PLC0415

    return [row.destination for row in (await client.list_rows(ListQuery(limit=_MOST))).rows]


async def _letters(client: BrokerClient, mesh: str | None, _: list[str]) -> Iterable[str]:
    from postroom._wire.dead_letters import DEAD_LETTERS, LettersQuery  # noqa: PLC0415

    page = await client.list_things(DEAD_LETTERS, LettersQuery(mesh=mesh, limit=_MOST))
    return [letter.id for letter in page.letters]


async def _jobs(client: BrokerClient, mesh: str | None, words: list[str]) -> Iterable[str]:
    from postroom._wire.jobs import JOBS, JobsQuery  # noqa: PLC0415

    page = await client.list_things(JOBS, JobsQuery(mesh=mesh, limit=_MOST))
    allowed = JOBS.verbs[words[-1]].states if words[-1] in JOBS.verbs else frozenset()
    return [str(job.id) for job in page.jobs if not allowed or job.state in allowed]


async def _flows(client: BrokerClient, mesh: str | None, _: list[str]) -> Iterable[str]:
    from postroom._wire.jobs import JOBS, JobsQuery  # noqa: PLC0415

    return [job.flow for job in (await client.list_things(JOBS, JobsQuery(mesh=mesh, limit=_MOST))).jobs]


async def _durables(client: BrokerClient, mesh: str | None) -> list[Durable]:
    from postroom._wire.unpublished import CONSUMERS, ConsumersQuery  # noqa: PLC0415

    return (await client.list_things(CONSUMERS, ConsumersQuery(mesh=mesh))).consumers


async def _meshes(client: BrokerClient, mesh: str | None, _: list[str]) -> Iterable[str]:
    return [one.slug for one in await client.list_meshes()] if mesh is None else [mesh]


def _each(
    ask: Callable[[BrokerClient, str | None], Awaitable[Iterable[Any]]], member: str = "name"
) -> Callable[[BrokerClient, str | None, list[str]], Awaitable[Iterable[str]]]:
    """Return a search for a member of each thing that was not revoked."""

    async def find(client: BrokerClient, mesh: str | None, _: list[str]) -> Iterable[str]:
        return [getattr(one, member) for one in await ask(client, mesh) if getattr(one, "revoked_at", None) is None]

    return find


_topics = _each(lambda client, mesh: client.list_topics(mesh))
_queues = _each(lambda client, mesh: client.list_queues(mesh))
_members = _each(lambda client, mesh: client.list_members(mesh))


async def _destinations(client: BrokerClient, mesh: str | None, words: list[str]) -> Iterable[str]:
    kinds = {"topic": _topics, "queue": _queues, "dm": _members}
    return [f"{kind}:{name}" for kind, find in kinds.items() for name in await find(client, mesh, words)]


async def _failing(client: BrokerClient, mesh: str | None, words: list[str]) -> Iterable[str]:
    from postroom._wire.administration import MeshQuery  # noqa: PLC0415
    from postroom._wire.unpublished import UNPUBLISHED  # noqa: PLC0415

    page = await client.list_things(UNPUBLISHED[words[-2]], MeshQuery(mesh=mesh))
    return [one.id for one in page.failing]


def words(known: Iterable[str]) -> Complete:
    """Return a completion that offers these."""

    async def find(*_: object) -> Iterable[str]:
        return known

    return _offering(find)


def either(*ways: Complete) -> Complete:
    """Return a completion that offers all that several offer."""
    return lambda ctx, incomplete: list(dict.fromkeys(word for way in ways for word in way(ctx, incomplete)))


rows = _of_daemon(_rows)
letters = _of_broker(_letters)
jobs = _of_broker(_jobs)
flows = _of_broker(_flows)
consumers = _of_broker(_each(_durables, "consumer"))
streams = _of_broker(_each(_durables, "stream"))
failing = _of_broker(_failing)
meshes = _of_broker(_meshes)
topics = _of_broker(_topics)
queues = _of_broker(_queues)
members = _of_broker(_members)
operators = _of_broker(_each(lambda client, _: client.list_operators()))
destinations = either(_of_broker(_destinations), _of_daemon(_row_destinations))
anything = either(rows, letters, jobs)


def join_words() -> int:
    """Put together what bash cuts at colons, as in `topic:orders`; return how much of the word bash has already."""
    environ = os.environ
    if environ.get("_POSTROOM_COMPLETE") != "complete_bash" or ":" not in environ.get("COMP_WORDS", ""):
        return 0
    words, number = environ["COMP_WORDS"].split("\n"), int(environ.get("COMP_CWORD", "0"))
    joined: list[str] = []
    place, before = 0, ""
    for each, word in enumerate([*words, ""] if number == len(words) else words):
        glued = bool(joined) and (word == ":" or before == ":") and bool(word or each == number)
        joined[-1:] = [joined[-1] + word] if glued else [*joined[-1:], word]
        before = word
        if each == number:
            place = len(joined) - 1
    environ["COMP_WORDS"], environ["COMP_CWORD"] = "\n".join(joined), str(place)
    return joined[place].rfind(":") + 1 if joined else 0
