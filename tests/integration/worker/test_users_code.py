"""Where a user's code runs, there is nothing of ours but the library: whatever the user calls their modules."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.jetstream import Context

from embedded.processes import tethered
from postroom.chassis.postgres import migrate
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.ledger import ROOMS

ROOT = Path(__file__).parents[3]
WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
OURS = {name.removesuffix(".py") for name in WHEEL["packages"]}
FLOW = """
import cli
from postroom.flow import Flow

flow = Flow(cli.NAME)

@flow.activity
async def only(ctx, request):
    return request
"""
AGENT = """
import cli
from postroom.agent import Agent

class Clerk(Agent):
    name = cli.NAME
    subjects = ("{tenant}.event.order_placed.v1",)

    async def receive(self, envelope):
        return None
"""
SITE = """
import atexit, sys
atexit.register(lambda: open("modules", "w").write(" ".join(sys.modules)))
"""
PROGRAMS = {
    "worker": (["worker", "run", "--flow", "worker:flow"], "publishing"),
    "consumer": (
        ["consumer", "run", "--context={mesh}", "--name=c", "--handler=http://127.0.0.1:1"],
        "consuming",
    ),
    "agent": (["agent", "run", "daemon:Clerk"], "ready"),
}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's directory, in which names of ours are taken, and each process says at its end what it had imported."""
    (tmp_path / "worker.py").write_text(FLOW)
    (tmp_path / "daemon.py").write_text(AGENT)
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/__init__.py").write_text("NAME = 'clerk'\nprint('a line of the user')\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SITE)
    return tmp_path


@pytest.fixture
async def context(nats_url: str) -> AsyncIterator[Context]:
    client = await connect(NatsSettings(url=nats_url), name="test", patience=20)
    context = Context(client)
    await context.declare()
    yield context
    await context.remove()
    await client.close()


def postroom(project: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("postroom"), *words]
    variables = {"PATH": os.environ["PATH"], "PYTHONPATH": f".:{project}/site", **environment}
    return subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, check=False)


def imported(project: Path) -> set[str]:
    """Return what the last process had imported, by the files' modules where a user's has a name of ours."""
    return set((project / "modules").read_text().split())


async def until_said(output: asyncio.StreamReader, event: str) -> AsyncIterator[bytes]:
    async for line in output:
        yield line
        if f'"event":"{event}"'.encode() in line:
            return


@pytest.mark.parametrize("kind", PROGRAMS)
async def test_a_process_that_runs_users_code_has_nothing_of_ours_but_the_library(
    kind: str, project: Path, context: Context, nats_url: str, database_url: str
) -> None:
    await migrate(database_url, *ROOMS)
    words, ready = PROGRAMS[kind]
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": f".:{project}/site",
        "POSTROOM_DATABASE_URL": database_url,
        "POSTROOM_NATS_URL": nats_url,
        "POSTROOM_MESH": context.name,
        "POSTROOM_STATE": str(project / "state"),
    }
    command = [str(Path(sys.executable).with_name("postroom")), *(word.format(mesh=context.name) for word in words)]
    process = await asyncio.create_subprocess_exec(
        *tethered(command), cwd=project, env=environment, stderr=asyncio.subprocess.PIPE
    )
    assert process.stderr is not None
    try:
        lines = [line async for line in until_said(process.stderr, ready)]
        assert json.loads(lines[-1])["event"] == ready, lines
        process.terminate()  # it is this very process that ends well: the command line became it
        await process.communicate()
        assert process.returncode == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    users = {"consumer": set(), "worker": {"cli"}, "agent": {"cli", "daemon"}}[kind]
    assert {name.partition(".")[0] for name in imported(project)} & OURS == users
    assert {"postroom.worker", *users} <= imported(project)


def test_the_command_line_knows_a_users_agent_and_flow_without_importing_them(project: Path) -> None:
    state = project / "state"
    asked = postroom(project, "agent", "replay", "daemon:Clerk", "--state-directory", str(state), "--json")
    assert asked.returncode == 3
    assert asked.stderr.endswith(f"a line of the user\npostroom: there is no event store {state}/events.db\n")
    assert "cli.agent" in imported(project)
    assert "cli.main" in imported(project)


def test_a_thread_that_a_users_module_leaves_running_keeps_no_command(project: Path) -> None:
    busy = "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    (project / "busy.py").write_text(busy + AGENT)
    asked = postroom(project, "agent", "replay", "busy:Clerk", "--state-directory", str(project / "state"), "--json")
    assert asked.returncode == 3
    assert "(threads: Thread-1 (wait))" in asked.stderr


@pytest.mark.parametrize("where", ["PYTHONPATH", "the working directory"])
def test_a_users_postroom_is_refused_by_its_name(project: Path, where: str) -> None:
    (project / "postroom.py").touch()
    variables = {"PYTHONPATH": str(project)} if where == "PYTHONPATH" else {"PYTHONPATH": ""}
    refused = postroom(project, "agent", "run", "daemon:Clerk", **variables)
    assert refused.stderr == f"postroom: {project}/postroom.py hides the library `postroom`: rename it\n"
    assert refused.returncode == 78
