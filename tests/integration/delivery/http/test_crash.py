"""A consumer is killed (-9) before and after each of its steps, again and again, while messages flow."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web
from support import crashing_consumer
from support.handlers import CountingHandler
from support.http_consumers import Inbox, settled
from support.jetstream import DURABLE, Context
from support.zygote import Forked, Zygote

ROUNDS = 3
PER_KILL = 40  # messages published before each
PER_LETTER_KILL = 6
STEPS = [f"{moment}_{step}" for step in crashing_consumer.STEPS for moment in ("before", "after")]


@pytest.fixture
def config_file(context: Context, nats_url: str, inbox_database: str, handler: CountingHandler, tmp_path: Path) -> Path:
    file = tmp_path / "consumer.toml"
    file.write_text(
        f'context = "{context.name}"\ndatabase_url = "{inbox_database}"\n[nats]\nurl = "{nats_url}"\n'
        f'[handler]\nurl = "{handler.url}"\ntimeout_seconds = 0.3\n'
        f'[consumer]\nstream = "{context.events}"\ndurable = "{DURABLE}"\nack_wait_seconds = 0.4\nmax_deliver = 50\n'
        "[consumer.backoff]\nfirst_seconds = 0.01\nmost_seconds = 0.01\n"
    )
    return file


@contextmanager
def running(zygote: Zygote, file: Path, step: str, count: int) -> Iterator[Forked]:
    words = [crashing_consumer.__file__, str(file), step, str(count)]
    with file.with_suffix(".log").open("ab") as log:
        process = zygote.start(words, os.environ, log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def test_killed_at_every_step_each_effect_happens_once_and_what_is_processed_is_never_called_again(
    context: Context, handler: CountingHandler, inbox: Inbox, config_file: Path, zygote: Zygote
) -> None:
    rng = random.Random(47)
    ids: list[str] = []
    for step in STEPS * ROUNDS:
        fresh = [f"m-{len(ids) + number}" for number in range(PER_KILL)]
        await context.publish(fresh)
        ids += fresh
        done, calls = await inbox.processed(), len(handler.calls)
        with running(zygote, config_file, step, rng.randint(1, PER_KILL)) as process:
            assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
        assert not done & set(handler.ids()[calls:])
    done, calls = await inbox.processed(), len(handler.calls)
    with running(zygote, config_file, "never", 1):
        await settled(context)

    assert not done & set(handler.ids()[calls:])
    assert handler.effects == dict.fromkeys(ids, 1)
    assert await inbox.processed() == set(ids)
    assert await context.letters() == []
    assert handler.most_at_once == 1


async def test_a_kill_uses_up_an_attempt_of_the_message_that_was_being_called_and_of_none_that_was_in_hand(
    context: Context, handler: CountingHandler, inbox: Inbox, config_file: Path, zygote: Zygote
) -> None:
    one_call(config_file, max_deliver=3)
    ids = [f"m-{number}" for number in range(PER_KILL)]
    await context.publish(ids)
    for _ in range(2):
        await killed(zygote, config_file)
    assert sum(await attempts(inbox, ids)) == 2
    with running(zygote, config_file, "never", 1):
        await settled(context)

    assert sum(await attempts(inbox, ids)) == PER_KILL + 2
    assert handler.effects == dict.fromkeys(ids, 1)
    assert await context.letters() == []


async def test_what_its_last_attempt_was_killed_with_is_dead_and_what_was_in_hand_beside_it_is_not(
    context: Context, handler: CountingHandler, inbox: Inbox, config_file: Path, zygote: Zygote
) -> None:
    one_call(config_file, max_deliver=2)
    await context.publish(["deadly"])
    await killed(zygote, config_file)
    await killed(zygote, config_file)
    await context.publish(["m-1", "m-2"])
    with running(zygote, config_file, "never", 1):
        await settled(context)

    (letter,) = await context.letters()
    told = letter.message_id, letter.reason, letter.attempts, letter.last_error
    assert told == ("deadly", "max_deliver", 2, "ack_timeout")
    assert await attempts(inbox, ["deadly", "m-1", "m-2"]) == [2, 1, 1]
    assert handler.effects == {"m-1": 1, "m-2": 1}


async def test_killed_at_every_step_of_burying_each_message_has_one_letter(
    context: Context, handler: CountingHandler, config_file: Path, zygote: Zygote
) -> None:
    handler.answer = lambda _: web.Response(status=422)
    ids: list[str] = []
    for step in [f"{moment}_{step}" for step in crashing_consumer.LETTER_STEPS for moment in ("before", "after")]:
        fresh = [f"m-{len(ids) + number}" for number in range(PER_LETTER_KILL)]
        await context.publish(fresh)
        ids += fresh
        with running(zygote, config_file, step, PER_LETTER_KILL // 2) as process:
            assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL
    with running(zygote, config_file, "never", 1):
        await settled(context)

    assert sorted(letter.message_id or "" for letter in await context.letters()) == sorted(ids)
    assert await context.stored(context.dlq) == []  # to publish them is a worker's


def one_call(config_file: Path, *, max_deliver: int) -> None:
    text = config_file.read_text().replace("max_deliver = 50", f"max_deliver = {max_deliver}")
    config_file.write_text(text.replace("[handler]", "[handler]\ncalls_at_once = 1"))


async def killed(zygote: Zygote, config_file: Path) -> None:
    """Run a consumer until it is about to call its handler for the first time."""
    with running(zygote, config_file, "before_call", 1) as process:
        assert await asyncio.to_thread(process.wait, 60) == -signal.SIGKILL


async def attempts(inbox: Inbox, ids: list[str]) -> list[int]:
    return [(await inbox.row(message_id)).get("attempts", 0) for message_id in ids]
