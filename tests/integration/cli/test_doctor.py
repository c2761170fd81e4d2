"""`postroom doctor` and the servers that the environment names: real ones, and addresses where nobody listens."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from support.databases import execute
from support.mailroom import LoneDaemon
from support.small_disk import run_on_a_small_disk
from support.terminal import Terminal

from broker.database import migrate
from embedded import EmbeddedPostgres, EmbeddedRedis
from postroom import AsyncClient
from postroom.errors import TryAgain

NOBODY = "127.0.0.1:1"


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.doctor.PATIENCE", 1.0)


def findings(directory: Path, **environment: str) -> dict[str, Any]:
    """What a doctor without a daemon finds, by its subject."""
    found = Terminal(directory / "nobody.sock", **environment).run("doctor", "--json")
    return {each["subject"]: each for each in found.json}


def test_every_server_that_the_environment_names_is_asked(
    short_directory: Path, database_url: str, redis_url: str, nats_url: str
) -> None:
    found = findings(
        short_directory,
        POSTROOM_DATABASE_URL=database_url,
        POSTROOM_REDIS_URL=redis_url,
        POSTROOM_NATS_URL=nats_url,
    )
    assert {name: found[name]["verdict"] for name in ("postgres", "redis", "nats")} == {
        "postgres": "failed",
        "redis": "ok",
        "nats": "ok",
    }
    assert "has no tables of Postroom: `postroom broker migrate` makes them" in found["postgres"]["detail"]
    asyncio.run(migrate(database_url))
    assert findings(short_directory, POSTROOM_DATABASE_URL=database_url)["postgres"]["verdict"] == "ok"


def test_a_server_that_does_not_answer_is_a_failure_that_says_what_to_do(short_directory: Path) -> None:
    found = findings(
        short_directory,
        POSTROOM_DATABASE_URL=f"postgresql://someone:hidden@{NOBODY}/mail",
        POSTROOM_REDIS_URL=f"redis://:hidden@{NOBODY}/0",
        POSTROOM_NATS_URL=f"nats://someone:hidden@{NOBODY}",
    )
    for subject, variable in (
        ("postgres", "POSTROOM_DATABASE_URL"),
        ("redis", "POSTROOM_REDIS_URL"),
        ("nats", "POSTROOM_NATS_URL"),
    ):
        assert found[subject]["verdict"] == "failed", subject
        assert variable in found[subject]["remedy"]
        assert "hidden" not in str(found[subject])
        assert "Connection refused" in found[subject]["detail"]
        assert "Err" not in found[subject]["detail"]  # no number of the system's, no name of Python's


def test_a_nats_that_hangs_does_not_answer_in_time(short_directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"nats://127.0.0.1:{mute.getsockname()[1]}"
        found = findings(short_directory, POSTROOM_NATS_URL=url)["nats"]
    assert found["detail"] == "connecting to NATS: JetStream does not answer in time"


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_credentials_that_cannot_be_read_are_named_in_words(short_directory: Path, content: bytes | None) -> None:
    file = short_directory / "nats.credentials"
    if content is not None:
        file.touch(mode=0o600)
        file.write_bytes(content)
    found = findings(short_directory, POSTROOM_NATS_URL=f"nats://{NOBODY}", POSTROOM_NATS_CREDENTIALS_FILE=str(file))[
        "nats"
    ]
    assert (str(file) in found["detail"], "Errno" in found["detail"], "codec" in found["detail"]) == (
        True,
        False,
        False,
    )


async def test_a_postgres_that_is_full_need_not_be_started(
    short_directory: Path, database_url: str, postgres_server: EmbeddedPostgres
) -> None:
    name = database_url.partition("@/")[2].partition("?")[0]
    await execute(postgres_server, f"ALTER DATABASE {name} CONNECTION LIMIT 0")
    found = (await asyncio.to_thread(findings, short_directory, POSTROOM_DATABASE_URL=database_url))["postgres"]
    assert "raise its max_connections" in found["detail"]
    assert "remedy" not in found


def test_a_redis_that_answers_and_refuses_to_write_is_a_failure(short_directory: Path) -> None:
    server = EmbeddedRedis(short_directory / "redis")
    server.start()
    try:
        with Redis.from_url(server.url) as redis:
            redis.config_set("maxmemory", 1)
        found = findings(short_directory, POSTROOM_REDIS_URL=server.url)["redis"]
    finally:
        server.stop()

    assert found["verdict"] == "failed"
    assert found["detail"].startswith("Redis cannot be used: command not allowed when used memory")


def test_the_settings_of_nats_are_those_of_a_config(short_directory: Path, nats_url: str) -> None:
    found = findings(short_directory, POSTROOM_NATS_URL=nats_url, POSTROOM_NATS_CA_FILE="/no/such.pem")["nats"]
    assert found["detail"].startswith("nats.ca_file: cannot use /no/such.pem")


def test_an_address_that_is_none_is_a_failure_and_no_traceback(short_directory: Path) -> None:
    text = "nonsense://hidden"
    named = {f"POSTROOM_{name}_URL": text for name in ("DATABASE", "REDIS", "NATS")}
    found = findings(short_directory, **named)
    for name in ("postgres", "redis", "nats"):
        assert (found[name]["verdict"], found[name]["remedy"]) == (
            "failed",
            f"correct POSTROOM_{'DATABASE' if name == 'postgres' else name.upper()}_URL",
        )


@pytest.mark.parametrize(
    "url", [" ", "nats://", "nats://[::1", "nats://127.0.0.1:99999", "nats://127.0.0.1:1,", "http://h"]
)
def test_an_address_that_nats_cannot_have_is_named_without_its_password(short_directory: Path, url: str) -> None:
    found = findings(short_directory, POSTROOM_NATS_URL=f"nats://someone:hidden@{NOBODY},{url}")["nats"]
    assert "nats.url is not" in found["detail"]
    assert "hidden" not in str(found)


@pytest.mark.parametrize("empty", [{}, dict.fromkeys(("DATABASE", "REDIS", "NATS"), "")])
def test_a_server_that_nothing_names_is_not_looked_for(short_directory: Path, empty: dict[str, str]) -> None:
    named = {f"POSTROOM_{name}_URL": url for name, url in empty.items()}
    assert not {"postgres", "redis", "nats"} & findings(short_directory, **named).keys()


FULL_DISK = """
import os, sys
from pathlib import Path
import cli.main

Path(sys.argv[1], "full").write_bytes(bytes(900 * 1024))
os.environ["POSTROOM_STATE"] = sys.argv[1]
print(cli.main.run(["doctor", "--json"]))
"""


async def test_a_full_disk_is_a_failure(tmp_path: Path) -> None:
    *found, code = await run_on_a_small_disk(tmp_path, FULL_DISK)
    disk = next(each for each in map(json.loads, found) if each["subject"] == "disk")
    assert (code, disk["verdict"], disk["remedy"]) == ("1", "failed", "free some space: sends are refused")


async def fill(socket: Path) -> None:
    """Send until not even the smallest message is accepted."""
    async with AsyncClient(socket, patience=0) as client:
        for size in (20_000, 500, 1):
            with contextlib.suppress(TryAgain):
                while True:
                    await client.send("topic:orders", "x" * size)


async def test_a_daemon_that_takes_no_message_is_a_failure_and_its_reason_is_given_once(short_directory: Path) -> None:
    daemon = LoneDaemon(short_directory, OUTBOX_MAX_BYTES=1024 * 1024)
    await daemon.start()
    try:
        await fill(daemon.socket)
        done = await asyncio.to_thread(Terminal(daemon.socket).run, "doctor", "--json")
    finally:
        daemon.stop()
    said = [each["detail"] for each in done.json if (each["subject"], each["verdict"]) == ("daemon", "failed")]
    assert (done.code, len(said), "full of waiting rows" in said[0]) == (1, 1, True)


def test_the_disk_of_the_named_state_directory_is_looked_at(short_directory: Path) -> None:
    state = short_directory / "mailroom"
    state.mkdir()
    found = findings(short_directory, POSTROOM_STATE=str(state), XDG_STATE_HOME="/")
    assert found["disk"]["detail"].endswith(f" below {state}")
