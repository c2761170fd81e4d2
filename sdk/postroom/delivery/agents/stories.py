"""What a running agent tells of a message, for whoever puts its story together (docs/contract/operate.md#operate-51).

Its event store is on its host, and what it takes and emits may be in no database. So it is asked over NATS, under the
name of its durable consumer: `postroom.story.<mesh>.<durable>`, with an id as the body. The answer is a `Story`, as
`postroom agent trace` shows it, or nothing for an id that it does not know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg

from postroom._wire.trace import Story
from postroom.chassis.exits import Fatal
from postroom.delivery.agents.replay import trace
from postroom.delivery.errors import NATS_ERRORS

_SECONDS: Final = 0.5  # that an agent may take to look into its store

_decode: Final = msgspec.json.Decoder(Story).decode


async def tell_stories(nats: Client, context: str, durable: str, database: Path) -> None:
    """Answer for the store of an agent until the connection is closed; of processes that share it one answers."""

    async def answer(question: Msg) -> None:
        try:
            told = msgspec.json.encode(await trace(database, question.data.decode(errors="replace")))
        except Fatal:  # it has nothing under that id
            told = b""
        await question.respond(told)

    await nats.subscribe(_subject(context, durable), queue=durable, cb=answer)


async def ask_story(nats: Client, context: str, durable: str, id_: str) -> Story | None:
    """Return what an agent tells of an id, no step where it does not know it; None where it does not run or answer."""
    try:
        answer = await nats.request(_subject(context, durable), id_.encode(), timeout=_SECONDS)
        return _decode(answer.data) if answer.data else Story(waits=[], steps=[])
    except (*NATS_ERRORS, msgspec.MsgspecError):
        return None


def _subject(context: str, durable: str) -> str:
    return f"postroom.story.{context}.{durable}"
