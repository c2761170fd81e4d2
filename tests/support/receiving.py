"""A daemon that receives: a process of its own whose broker never answers, on a NATS that the test publishes to.

Whom its token speaks for it knows from its last talk with a broker, which it keeps in its state directory.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing, asynccontextmanager, closing
from pathlib import Path
from typing import Final

import nats
from nats.js import JetStreamContext

from broker_client.features import KeptFeatures
from postroom import AsyncClient, InboxMessage, InboxQuery
from postroom._wire.accept import DedupeFeature, Features
from postroom._wire.administration import HistoryMessage
from postroom.delivery.streams import default_streams, ensure_stream
from support.inboxes import MEMBER, wire
from support.mailroom import LoneDaemon
from support.zygote import Zygote

_DEDUPE: Final = DedupeFeature(version=1, mode="permanent", request_fingerprint=True)
_SECONDS: Final = 30.0  # that a slow machine may need


def receiving_daemon(directory: Path, nats_url: str, mesh: str, zygote: Zygote) -> LoneDaemon:
    """Configure a daemon of `mesh` whose member is alice."""
    daemon = LoneDaemon(directory, zygote=zygote, MESH=mesh, NATS_URL=nats_url, NATS_RECONNECT_SECONDS=0.05)
    daemon.state.mkdir(mode=0o700, exist_ok=True)
    KeptFeatures(daemon.state).save(
        Features(mesh=mesh, member=MEMBER, max_batch=1000, client_message_id_dedupe=_DEDUPE)
    )
    return daemon


@asynccontextmanager
async def stream_of(nats_url: str, mesh: str) -> AsyncIterator[JetStreamContext]:
    """Declare the stream of the inboxes of `mesh`, for the length of the block."""
    connection = await nats.connect(nats_url)
    js = connection.jetstream()
    (settings,) = [each for each in default_streams(mesh) if each.name.endswith("_INBOX")]
    try:
        await ensure_stream(js, settings)
        yield js
    finally:
        await js.delete_stream(settings.name)
        await connection.close()


async def publish(js: JetStreamContext, messages: Iterable[HistoryMessage]) -> None:
    """Publish messages as the worker publishes delivery rows."""
    for message in messages:
        subject, body, headers = wire(message)
        await js.publish(subject, body, headers=headers)


async def received(client: AsyncClient, count: int) -> list[InboxMessage]:
    """Return the first `count` messages of the inbox, once they are there, and whatever else is there by then."""
    await asyncio.wait_for(_wait_for(client, count), _SECONDS)
    messages: list[InboxMessage] = []
    cursor: str | None = None
    while True:
        page = await client.inbox(InboxQuery(cursor=cursor, limit=1000))
        messages += page.messages
        if (cursor := page.next_cursor) is None:
            return messages


async def _wait_for(client: AsyncClient, count: int) -> None:
    async with aclosing(client.events(after=0)) as events:
        async for _ in events:
            count -= 1
            if count == 0:
                return


def ids_in(state: Path) -> list[str]:
    """Return the client_message_ids in the inbox file, in order of position."""
    with closing(sqlite3.connect(state / "inbox.db")) as db:
        return [row[0] for row in db.execute("SELECT client_message_id FROM inbox ORDER BY position")]
