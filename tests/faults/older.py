"""What comes back older than it was: Postgres, NATS, an agent's events, an inbox, an outbox."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from support.agents import kept as kept_by_agent
from support.chain import QUEUE, Chain
from support.databases import back_up, restore
from support.effects import PATIENCE, Remembering, everything_has_its_effect_once
from support.handlers import serving
from support.mailroom import MESH, TOPIC, Mailroom
from support.receiving import ids_in
from support.waiting import until_so

from faults.campaign import Missed, Run, goal
from faults.load import kept, mailroom, reckon, relayed
from postroom import AsyncClient, new_id
from postroom.chassis.sqlite import PARTS

_WHY: Final = "the campaign put an older copy back"


@goal("F22", "an older Postgres, outbox, NATS store, events.db, inbox.db")
async def restored(run: Run) -> None:
    """Put an older copy of each back: what is missing is told, and comes back by one documented verb."""
    await _older_postgres(run)
    await _older_outbox(run)
    async with serving(Remembering()) as handler:
        chain = Chain(run.place(), await run.servers.database(), run.servers.redis_url, handler.url)
        try:
            await chain.open()
            await chain.reader_ready()
            for restore_one in (_older_nats, _older_events, _older_inbox, _lost_inbox):
                await restore_one(run, chain)
                try:
                    await everything_has_its_effect_once(chain, handler, chain.room.database_url)
                except AssertionError as error:
                    raise Missed(f"{restore_one.__name__}: {str(error).splitlines()[0]}") from error
        finally:
            chain.close()


async def _send(run: Run, socket: Path, *destinations: str) -> dict[str, bytes]:
    """Send messages, and return them once the broker has accepted them."""
    sent = {new_id(): destinations[number % len(destinations)] for number in range(run.size.load)}
    async with AsyncClient(socket, patience=PATIENCE) as client:
        for name, to in sent.items():
            await client.send(to, name, client_message_id=name)
        for name in sent:
            row = await client.wait(name, PATIENCE)
            run.check(row.status == "done", f"{name} is {row.status}: {row.last_error}")
    run.trials += len(sent)
    return {name: name.encode() for name in sent}


async def _older_postgres(run: Run) -> None:
    async with mailroom(run) as room:
        server, name = run.servers.postgres, room.database_url.partition("?")[0].rpartition("/")[2]
        broker = room.brokers[0]
        sent = await _send(run, room.socket, TOPIC)
        broker.stop()
        await back_up(server, name)
        broker.start()
        lost = await _send(run, room.socket, TOPIC)
        broker.stop()
        await restore(server, name)
        await broker.run("restored")
        broker.start()
        run.struck["older Postgres"] += 1
        async with AsyncClient(room.socket, patience=PATIENCE) as client:

            async def told() -> bool:
                return (await client.health()).missing == len(lost)

            await _until(told, "health tells how many messages Postgres lost")
            await client.resend_missing(reason=_WHY)
        await relayed(room.state)
        await reckon(sent | lost, room.database_url)


async def _older_outbox(run: Run) -> None:
    """Put an older outbox back: what it has is accepted once, also what was accepted since under the same ids."""
    async with mailroom(run) as room:
        async with AsyncClient(room.socket, patience=PATIENCE) as client:
            await client.pause_relay(reason=_WHY)
            waiting = {new_id(): b"" for _ in range(run.size.load)}
            for name in waiting:
                await client.send(TOPIC, name, client_message_id=name)
            waiting = {name: name.encode() for name in waiting}
            copy = _exchange(room, run, None)
            await room.daemon_ready()
            await client.resume_relay(reason=_WHY)
        await relayed(room.state)
        _exchange(room, run, copy)
        await room.daemon_ready()
        run.struck["older outbox"] += 1
        async with AsyncClient(room.socket, patience=PATIENCE) as client:
            await client.resume_relay(reason=_WHY)
        await relayed(room.state)
        states = set(kept(room.state).values())
        run.check(states == {"done"}, f"the rows of an older outbox are {states}")
        await reckon(waiting, room.database_url)


def _exchange(room: Mailroom, run: Run, copy: Path | None) -> Path:
    """Stop the daemon, copy its outbox or put a copy back, and start it again."""
    room.daemon.stop()
    if copy is None:
        copy = run.place() / "outbox.db"
        shutil.copyfile(room.state / "outbox.db", copy)
    else:
        _put_back(copy, room.state / "outbox.db")
    room.daemon.start()
    return copy


def _put_back(copy: Path, file: Path) -> None:
    for part in PARTS:
        Path(f"{file}{part}").unlink(missing_ok=True)
    shutil.copyfile(copy, file)
    file.chmod(0o600)


async def _older_nats(run: Run, chain: Chain) -> None:
    await _send(run, chain.room.socket, TOPIC, QUEUE)
    copy = run.place() / "copy"
    chain.kill_nats(copy=copy)
    await _send(run, chain.room.socket, TOPIC, QUEUE)
    chain.kill_nats(restore=copy)
    run.struck["older NATS store"] += 1


async def _older_events(run: Run, chain: Chain) -> None:
    """Put an agent's older store back, and send it again what came since: `postroom worker redrive`."""
    agent, store = chain.programs["agent"], chain.agent_state / "events.db"
    await _until(partial(_at_rest, chain), "the agent is done")
    agent.stop()
    copy = run.place() / "events.db"
    shutil.copyfile(store, copy)
    agent.start()
    since = datetime.now(UTC)
    before = len(kept_by_agent(chain.agent_state))
    await _send(run, chain.room.socket, QUEUE)
    await _until(partial(_grown, chain, before + 2 * run.size.load), "the agent is done again")
    agent.stop()
    _put_back(copy, store)
    agent.start()
    run.struck["older events.db"] += 1
    words = [
        "worker",
        "redrive",
        "--since",
        since.isoformat(),
        "--stream",
        f"{MESH.upper()}_COMMANDS",
        "--confirmed",
        "--reason",
        "an older copy of the agent's store",
        "--yes",
    ]
    (token := run.place() / "admin.token").write_text(chain.room.admin_token)
    settings = {"POSTROOM_BROKER_URL": chain.room.broker_urls[0], "POSTROOM_ADMIN_TOKEN_FILE": str(token)}
    await _type(run, settings, *words)


async def _at_rest(chain: Chain) -> bool:
    return all(each.published for each in kept_by_agent(chain.agent_state) if each.role == "emitted")


async def _grown(chain: Chain, rows: int) -> bool:
    return len(kept_by_agent(chain.agent_state)) >= rows and await _at_rest(chain)


async def _older_inbox(run: Run, chain: Chain) -> None:
    """Put a reader's older inbox back: it tells, and gets what the copy lacks by itself."""
    reader, file = chain.programs["reader"], chain.reader_state / "inbox.db"
    reader.stop()
    copy = run.place() / file.name
    shutil.copyfile(file, copy)
    reader.start()
    lost = await _send(run, chain.room.socket, TOPIC)

    async def received() -> bool:
        return lost.keys() <= set(ids_in(chain.reader_state))

    await _until(received, "the reader has what the copy will lack")
    reader.stop()
    _put_back(copy, file)
    reader.start()
    await _until(received, "the reader has it again")
    run.check("inbox_older" in reader.log(), "nothing told that the inbox was older")
    run.struck["older inbox.db"] += 1


async def _lost_inbox(run: Run, chain: Chain) -> None:
    """Remove a reader's inbox: it is filled from the history."""
    await _send(run, chain.room.socket, TOPIC)
    reader = chain.programs["reader"]
    before = len(ids_in(chain.reader_state))
    reader.stop()
    for part in PARTS:
        (chain.reader_state / f"inbox.db{part}").unlink(missing_ok=True)
    reader.start()
    await chain.reader_ready()
    run.struck["inbox.db removed"] += 1
    run.figures.append(f"{before:,} messages in the inbox before")


async def _type(run: Run, settings: dict[str, str], *words: str) -> None:
    """Type a command, as an operator does."""
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cli", *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **settings},
    )
    said, _ = await program.communicate()
    run.check(program.returncode == 0, f"`postroom {' '.join(words)}` said {said.decode()!r}")


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    try:
        await until_so(condition, what, seconds=PATIENCE)
    except TimeoutError:
        raise Missed(f"not within {PATIENCE:.0f} s: {what}") from None
