"""`postroom consumer run` as a process: started in both ways, asked how it is, stopped, and refused."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from nats.aio.client import Client
from support.handlers import serving
from support.http_consumers import settled
from support.jetstream import Context
from support.waiting import until
from support.zygote import Piped

from postroom.chassis.postgres import migrate
from postroom.delivery import ROOM

COMMAND = ("cli", "consumer", "run")
PROGRAM = ("postroom.worker", "consumer")  # what the command becomes


@pytest.fixture
async def context(connection: Client) -> AsyncIterator[Context]:
    """A context whose streams nobody has declared yet."""
    context = Context(connection)
    yield context
    await context.remove()


@pytest.fixture
async def servers(nats_url: str, database_url: str) -> dict[str, str]:
    await migrate(database_url, ROOM)
    return {"POSTROOM_NATS_URL": nats_url, "POSTROOM_DATABASE_URL": database_url}


@asynccontextmanager
async def running(*arguments: str, program: tuple[str, ...] = PROGRAM, **environ: str) -> AsyncIterator[Piped]:
    """Run what the command becomes, or the command itself where it is the `program`."""
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **environ}
    process = await Piped.start(["-m", *program, *arguments], environment)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def said(process: Piped, event: str) -> dict[str, object]:
    """Return the first line of the log that is about `event`."""
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if (told := json.loads(line)).get("event") == event:
                return dict(told)
    raise AssertionError(event)


async def listen(manager: socket.socket, told: set[str]) -> None:
    """Hear what a service manager is told, until the stop."""
    while "STOPPING=1" not in told:
        told.add((await asyncio.get_running_loop().sock_recv(manager, 4096)).decode())


async def refused(*arguments: str, program: tuple[str, ...] = PROGRAM, **environ: str) -> tuple[int, str]:
    async with running(*arguments, program=program, **environ) as process:
        code, error = await process.communicate()
        return code, error.decode()


async def test_three_options_and_the_environment_are_enough_for_a_first_try(
    context: Context, servers: dict[str, str]
) -> None:
    async with serving() as handler:
        options = ("--context", context.name, "--name", "orders", "--handler", handler.url)
        async with running(*options, program=COMMAND, **servers) as process:
            await said(process, "consuming")
            while True:  # the stream is declared by the consumer, a moment after it has begun
                try:
                    await context.publish(["m-1"])
                    break
                except Exception:  # noqa: BLE001 - no such stream yet
                    await asyncio.sleep(0.01)
            await handler.saw(1)
            await settled(context, "orders")
            process.terminate()
            assert await process.wait() == 0

    assert handler.ids() == ["m-1"]


async def test_a_file_says_everything_and_the_page_tells_how_it_goes(
    context: Context, servers: dict[str, str], tmp_path: Path, short_directory: Path
) -> None:
    await context.declare()
    file = tmp_path / "consumer.toml"
    async with serving() as handler:
        file.write_text(
            f'context = "{context.name}"\ndatabase_url = "{servers["POSTROOM_DATABASE_URL"]}"\nlisten_port = 0\n'
            f'[nats]\nurl = "{servers["POSTROOM_NATS_URL"]}"\n[handler]\nurl = "{handler.url}"\n'
            f'[consumer]\nstream = "{context.events}"\ndurable = "orders"\n'
            f'[[streams]]\nname = "{context.events}_MORE"\nsubjects = ["{context.name}.more.>"]\n'
        )
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
            manager.bind(str(short_directory / "notify"))
            manager.setblocking(False)
            watched = {"NOTIFY_SOCKET": str(short_directory / "notify"), "WATCHDOG_USEC": "200000"}
            async with running("--config", str(file), **watched) as process, aiohttp.ClientSession() as session:
                told = set[str]()
                heard = asyncio.create_task(listen(manager, told))
                page = str((await said(process, "consuming"))["page"])
                await context.publish(["m-1"])
                await settled(context, "orders")
                async with session.get(f"{page}/ready") as ready, session.get(f"{page}/metrics") as metrics:
                    text = await metrics.text()
                    assert (ready.status, await ready.json()) == (200, {"status": "ok", "reasons": []})
                await until(lambda: {"READY=1", "WATCHDOG=1", "STATUS=0 messages waiting, 0 being handled"} <= told)
                process.terminate()
                assert await process.wait() == 0
                await heard

    assert 'postroom_consumer_calls_total{answer="http_200"} 1.0' in text
    assert 'postroom_consumer_deliveries_total{outcome="done"} 1.0' in text
    assert "postroom_consumer_backlog_messages 0.0" in text
    assert (await context.js.stream_info(f"{context.events}_MORE")).config.subjects == [f"{context.name}.more.>"]
    await context.js.delete_stream(f"{context.events}_MORE")


async def test_a_handler_that_cannot_be_reached_is_on_the_page_in_the_metrics_and_in_the_status(
    context: Context, servers: dict[str, str], tmp_path: Path, short_directory: Path
) -> None:
    await context.declare()
    file = tmp_path / "consumer.toml"
    file.write_text(
        f'context = "{context.name}"\ndatabase_url = "{servers["POSTROOM_DATABASE_URL"]}"\nlisten_port = 0\n'
        f'[nats]\nurl = "{servers["POSTROOM_NATS_URL"]}"\n[handler]\nurl = "http://127.0.0.1:1/"\n'
        f'[consumer]\nstream = "{context.events}"\ndurable = "orders"\n'
    )
    paused = b"; paused: handler_unreachable: no connection to http://127.0.0.1:1/"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(short_directory / "notify"))
        manager.setblocking(False)
        watched = {"NOTIFY_SOCKET": str(short_directory / "notify")}
        async with running("--config", str(file), **watched) as process, aiohttp.ClientSession() as session:
            page = str((await said(process, "consuming"))["page"])
            await context.publish(["m-1"])
            await said(process, "handler_unreachable")
            async with session.get(f"{page}/ready") as ready, session.get(f"{page}/metrics") as metrics:
                assert (ready.status, "no connection to http://127.0.0.1:1/" in await ready.text()) == (503, True)
                text = await metrics.text()
            async with asyncio.timeout(30):
                while paused not in await asyncio.get_running_loop().sock_recv(manager, 4096):
                    pass
    assert "postroom_consumer_handler_reachable 0.0" in text
    assert "postroom_consumer_handler_away_seconds 0.0\n" not in text


async def test_it_stops_while_it_still_waits_for_nats_to_begin(servers: dict[str, str]) -> None:
    options = ("--context", "demo", "--name", "orders", "--handler", "http://127.0.0.1:1/")
    async with running(*options, **{**servers, "POSTROOM_NATS_URL": "nats://127.0.0.1:1"}) as process:
        await said(process, "nats_error")
        process.terminate()
        async with asyncio.timeout(10):
            assert await process.wait() == 0


async def test_what_is_wrong_is_said_in_a_sentence_with_its_exit_code(servers: dict[str, str], tmp_path: Path) -> None:
    direct = ("--context", "demo", "--name", "orders", "--handler", "http://127.0.0.1:1/")
    slow = {"POSTROOM_CONSUMER_HANDLER_TIMEOUT_SECONDS": "30"}
    away = {**servers, "POSTROOM_DATABASE_URL": "postgresql://user:hidden@127.0.0.1:1/x"}
    empty = {**servers, "POSTROOM_DATABASE_URL": servers["POSTROOM_DATABASE_URL"].replace("test_", "nobody_")}
    cases: list[tuple[int, str, tuple[str, ...], dict[str, Any]]] = [
        (2, "--context, --name and --handler", (), {"program": COMMAND}),
        (2, "--context, --name and --handler", (), {}),
        (2, "use --config alone", (*direct, "--config", str(tmp_path / "x.toml")), servers),
        (78, "POSTROOM_NATS_URL is not set", direct, {}),
        (78, "shorter than consumer.ack_wait_seconds", direct, {**servers, **slow}),
        (78, "handler.url", (*direct[:5], "ftp://x"), servers),
        (69, "cannot open the database", direct, away),
        (78, "create the role or the database", direct, empty),
    ]
    answers = await asyncio.gather(*(refused(*arguments, **environ) for _, _, arguments, environ in cases))

    assert [(code, sentence in text) for (_, sentence, _, _), (code, text) in zip(cases, answers, strict=True)] == [
        (code, True) for code, _, _, _ in cases
    ]
    assert not any("Traceback" in text or "hidden" in text for _, text in answers)


async def test_a_restart_with_another_subject_consumes_it_and_a_second_program_under_the_name_is_refused(
    context: Context, servers: dict[str, str]
) -> None:
    paid = f"{context.name}.event.order_paid.v1"
    await context.declare()
    async with serving() as handler:
        options = ("--context", context.name, "--name", "orders", "--handler", handler.url)
        async with running(*options, "--subject", context.subject, **servers) as process:
            await said(process, "consuming")
            await context.publish(["a"])
            await handler.saw(1)
        async with running(*options, "--subject", context.subject, "--subject", paid, **servers) as process:
            changed = await said(process, "consumer_changed")
            assert paid in str(changed["changes"])
            await context.publish(["b"], subject=paid)
            await handler.saw(2)
            code, text = await refused(*options, "--subject", f"{context.name}.event.>", **servers)
            assert (code, "another program consumes under this name" in text, "→" in text) == (75, True, True)
            code, text = await refused(*options, "--subject", paid, **servers)
            assert (code, "this would lose messages" in text, "→" in text) == (78, True, True)
    assert handler.ids() == ["a", "b"]
