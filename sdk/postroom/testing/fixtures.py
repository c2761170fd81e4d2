"""The pytest fixture `mailroom`: a whole installation, started once per session, when the first test asks for it.

    pytest_plugins = ["postroom.testing.fixtures"]  # in the topmost conftest.py

    def test_an_order_reaches_the_broker(mailroom):
        with mailroom.client() as post:
            sent = post.send("topic:orders", {"order": 17})
            assert post.wait(sent.client_message_id, 10).status == "done"

It is what `postroom up` runs: Postgres, Redis, NATS, broker, worker and daemon, with the mesh `demo`, its members alice
(as which the daemon sends) and bob, the topic `orders` and the queue `work`. It takes some seconds to start, and ends
with pytest, even if that is killed. The topmost `conftest.py` has to name it, so that no other project's tests load it.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest

from postroom.blocking import Client
from postroom.client import AsyncClient

__all__ = ["Mailroom", "mailroom"]

_MISSING: Final = (
    "the fixture `mailroom` needs the program `postroom`: pip install 'postroom-server[embedded]', in this environment "
    "or in one whose bin directory is in PATH"
)
_UP: Final = "Postroom is up"  # how the line begins that it prints then
_STOP_SECONDS: Final = 120.0
# Stops `postroom up` when the other end of its input is closed, however pytest ends. It alone has the output, so that
# this ends with it.
_WATCH: Final = '"$@" </dev/null & up=$!; exec >&-; read -r _; kill $up 2>/dev/null; wait $up'


class Mailroom:
    """A running installation."""

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        self.environment = environment  # by which commands and programs find it, such as `POSTROOM_SOCKET`
        self._program = program

    @property
    def socket(self) -> Path:
        """The daemon's socket."""
        return Path(self.environment["POSTROOM_SOCKET"])

    @property
    def database_url(self) -> str:
        """The broker's Postgres, whose role may create databases."""
        return self.environment["POSTROOM_DATABASE_URL"]

    @property
    def nats_url(self) -> str:
        """NATS, with JetStream."""
        return self.environment["POSTROOM_NATS_URL"]

    def client(self) -> Client:
        """Return a client of the daemon, to be closed by the caller."""
        return Client(self.socket)

    def async_client(self) -> AsyncClient:
        """Return a client of the daemon for an event loop, to be closed by the caller."""
        return AsyncClient(self.socket)

    def run(self, *arguments: str) -> str:
        """Run a command, as in `mailroom.run("queue", "create", "billing")`; return its output.

        Raises `AssertionError` with its error output where it fails.
        """
        command = [self._program, *arguments]
        ran = subprocess.run(  # noqa: S603 - the caller's own words, no shell
            command, env={**_outside(), **self.environment}, capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise AssertionError(f"{shlex.join(['postroom', *arguments])} ended with {ran.returncode}: {ran.stderr}")
        return ran.stdout


@pytest.fixture(scope="session")
def mailroom() -> Iterator[Mailroom]:
    """Run an installation for the length of the session."""
    beside = Path(sys.executable).parent
    program = shutil.which("postroom", path=f"{beside}{os.pathsep}{os.environ.get('PATH', os.defpath)}")
    if program is None:
        pytest.fail(_MISSING, pytrace=False)
    state = Path(tempfile.mkdtemp(prefix="postroom-"))
    with tempfile.TemporaryFile() as said:
        up = subprocess.Popen(  # noqa: S603 - our own words
            ["/bin/sh", "-c", _WATCH, "sh", program, "up", "--state", str(state)],
            env=_outside(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            start_new_session=True,  # Ctrl-C is pytest's
        )
        try:
            assert up.stdout is not None  # noqa: S101 - it is a pipe
            if not any(line.startswith(_UP) for line in up.stdout):
                said.seek(0)
                pytest.fail(f"`postroom up` ended: {said.read().decode(errors='replace').strip()}", pytrace=False)
            lines = (state / "env").read_text("utf-8").splitlines()
            words = (shlex.split(line)[0].partition("=") for line in lines if line)
            yield Mailroom(program, {name: value for name, _, value in words})
        finally:
            up.communicate(timeout=_STOP_SECONDS)  # closes its input
            shutil.rmtree(state)


def _outside() -> dict[str, str]:
    """Return the environment without what leads to another installation."""
    return {name: value for name, value in os.environ.items() if not name.startswith("POSTROOM_")}
