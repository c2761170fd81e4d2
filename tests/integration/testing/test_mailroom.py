"""The fixture of real servers: started once, found without being told where, and gone with the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from nats import connect

from postroom.delivery.http.requests import posted, read
from postroom.delivery.message import delivery_of
from postroom.testing import FakeAsyncClient, handler_request
from postroom.testing.fixtures import Mailroom
from postroom.testing.requests import published

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"

TESTS = """
import pathlib

pytest_plugins = ["postroom.testing.fixtures"]


def test_an_order_reaches_the_broker(mailroom):
    with mailroom.client() as post:
        sent = post.send("topic:orders", {"order": 17})
        assert post.wait(sent.client_message_id, 10).status == "done"
    pathlib.Path("state").write_text(mailroom.environment["POSTROOM_STATE"])
"""


async def test_a_message_comes_in_at_its_real_daemon_and_commands_find_it(mailroom: Mailroom) -> None:
    async with mailroom.async_client() as post:
        sent = await post.send("topic:orders", {"order": 17})
        assert (await post.wait(sent.client_message_id, 30)).status == "done"
    assert sent.client_message_id in mailroom.run("outbox", "list", "--json")
    with pytest.raises(AssertionError, match="postroom outbox inspect nobody ended with 3"):
        mailroom.run("outbox", "inspect", "nobody")


def test_a_command_does_not_follow_variables_of_another_installation(
    mailroom: Mailroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTROOM_OUTBOX_DATABASE_URL", "postgresql://127.0.0.1:1/of_production")
    with pytest.raises(AssertionError, match="ended with 2: postroom: name the application's database"):
        mailroom.run("outbox", "install")


@pytest.mark.parametrize("to", ["topic:orders", "queue:work"])
async def test_a_request_for_tests_is_what_a_consumer_makes_of_the_same_send(mailroom: Mailroom, to: str) -> None:
    fake, said = FakeAsyncClient(), {"correlation_id": str(uuid4()), "causation_id": str(uuid4()), "event_version": 2}
    meta = {**said, "reply": "é", "n": 17}
    async with mailroom.async_client() as post:
        for client in (post, fake):
            sent = await client.send(
                to, {"order": 17}, meta=meta, mentions=["bob"], client_message_id=f"like-{to[:5]}", traceparent=TRACE
            )
        assert (await post.wait(sent.client_message_id, 30)).status == "done"
    nats = await connect(mailroom.nats_url)
    subject = "demo.event.orders.v2" if to == "topic:orders" else "cmd.demo.default.work.run"
    subscription = await nats.jetstream().pull_subscribe(subject)
    (message,) = await subscription.fetch(1, timeout=30)
    await nats.close()

    delivery = delivery_of(message)
    same = published(fake.sent[0], "demo", "alice", delivery.message_id or "")
    assert (same.subject, msgspec.json.decode(same.data)) == (delivery.subject, msgspec.json.decode(delivery.data))
    assert same.headers == {name: text for name, text in delivery.headers.items() if name != "X-Occurred-At"}
    body, headers = posted(read(delivery), "test", 1, None, "postroom")
    ours = handler_request(fake.sent[0], message_id=delivery.message_id, occurred_at=delivery.occurred_at)
    assert msgspec.json.decode(ours.body) == msgspec.json.decode(body)
    assert ours.headers == headers


def run_pytest(directory: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_orders.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py"]
    return subprocess.run(
        command, cwd=directory, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


def test_everything_is_gone_when_the_tests_are(short_directory: Path) -> None:
    ran = run_pytest(short_directory)
    assert ran.returncode == 0, ran.stdout
    state = (short_directory / "state").read_text()
    assert not Path(state).exists()
    left = [process for process in Path("/proc").glob("[0-9]*/cmdline") if state in _read(process)]
    assert left == []


def _read(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return ""


@pytest.mark.parametrize(
    ("postroom", "said"),
    [
        (None, "pip install 'postroom-server[embedded]'"),
        ("echo 'postroom: the disk is full' >&2; exit 74", "`postroom up` ended: postroom: the disk is full"),
    ],
)
def test_where_it_cannot_start_it_says_why(
    short_directory: Path, tmp_path: Path, postroom: str | None, said: str
) -> None:
    alone = tmp_path / "bin"
    alone.mkdir()
    (alone / "python").symlink_to(sys.executable)
    if postroom is not None:
        (alone / "postroom").write_text(f"#!/bin/sh\n{postroom}\n")
        (alone / "postroom").chmod(0o755)
    program = f"import sys; sys.executable = {str(alone / 'python')!r}; import pytest; sys.exit(pytest.main(['-q']))"
    (short_directory / "test_orders.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        cwd=short_directory,
        env={**os.environ, "PATH": str(alone)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert said in ran.stdout
    assert ran.returncode == 1
