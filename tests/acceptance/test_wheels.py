"""What users install: the wheels of both distributions, without this checkout.

The sdk's runs beside nothing but its own dependencies, and a user's modules may have names of ours. The soaks install
from an index: the lowest versions that we allow, and what `pip install 'postroom-server[embedded]'` takes by itself.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import AsyncIterator
from contextlib import ExitStack
from importlib.metadata import files, requires
from pathlib import Path
from typing import IO
from uuid import uuid4

import asyncpg
import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from support.mailroom import LoneDaemon

from embedded.processes import tethered
from postroom.chassis.postgres import migrate
from postroom.delivery.nats import connect
from postroom.delivery.settings import NatsSettings
from postroom.delivery.streams import default_streams, ensure_stream
from postroom.ledger import ROOMS
from postroom.ledger.primitives import Start, start_job

REPOSITORY = Path(__file__).parents[2]
PROGRAM = """
import asyncio
import sys
from importlib.metadata import distribution
from pathlib import Path
from postroom import Client, SendRequest
from postroom.once import open_registry
import postroom

async def once():
    async with open_registry(f"sqlite://{Path.cwd()}/once.db") as registry:
        async with registry.once("demo", "orders", "1") as claim:
            assert claim.first

with Client(sys.argv[1]) as post:
    receipt = post.send("topic:orders", "from a wheel")
    assert post.get(receipt.client_message_id).status == "pending"
    assert sum(1 for _ in post.send_many(SendRequest(to="topic:orders") for _ in range(10))) == 10
asyncio.run(once())

print(postroom.__file__)
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""
SERVER = {"broker", "broker_client", "chassis", "cli", "daemon", "embedded", "ipc", "outbox"}


def dependencies(distribution: str, seen: set[str]) -> set[str]:
    """Return the names of a distribution's dependencies, theirs included, without extras."""
    for requirement in map(Requirement, requires(distribution) or ()):
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in seen:
            seen.add(requirement.name)
            dependencies(requirement.name, seen)
    return seen


def link_dependencies(directory: Path) -> None:
    """Make a place where the sdk's dependencies can be imported, and nothing else that is installed here."""
    site = Path(sysconfig.get_path("purelib"))
    found = {file.parts[0] for name in dependencies("postroom", set()) for file in files(name) or ()}
    for top in found - {"..", "__pycache__"}:
        directory.joinpath(top).symlink_to(site / top)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Build both: the sdk's, then the server's."""
    found = []
    for source in (REPOSITORY / "sdk", REPOSITORY):
        directory = tmp_path_factory.mktemp("built")
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory]
        subprocess.run(build, cwd=source, check=True, capture_output=True)
        found += directory.glob("*.whl")
    return found


@pytest.fixture
async def daemon(short_directory: Path) -> AsyncIterator[LoneDaemon]:
    running = LoneDaemon(short_directory)
    await running.start()
    yield running
    running.stop()


def install(wheels: list[Path], python: str | Path, *options: str | Path) -> None:
    """Install wheels alone, without a look at an index."""
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*pip, "--no-index", "--no-deps", *options, *wheels], check=True)


def test_a_program_with_nothing_but_the_wheel_sends(daemon: LoneDaemon, wheels: list[Path], tmp_path: Path) -> None:
    installed, around = (tmp_path / name for name in ("installed", "around"))
    for directory in (installed, around):
        directory.mkdir()
    install(wheels[:1], sys.executable, "--target", installed)
    link_dependencies(around)
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", PROGRAM, daemon.socket],
        env={"PYTHONPATH": f"{installed}:{around}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    origin, modules = done.stdout.splitlines()
    assert Path(origin).is_relative_to(installed)
    assert not SERVER & set(modules.split())


def test_a_worker_without_its_extra_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "postroom").symlink_to(REPOSITORY / "sdk/postroom")
    link_dependencies(tmp_path)
    command = [sys.executable, "-S", "-m", "postroom.worker", "agent", "shop:Clerk"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 69
    said = "structlog is not installed: install it with `pip install 'postroom[worker]'`"
    assert ended.stderr == f"postroom agent: {said}\n"


def test_the_sdk_needs_no_more_than_it_says() -> None:
    said = tomllib.loads((REPOSITORY / "sdk" / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {each.split(">=")[0] for each in said} == {"msgspec", "rfc8785"}


def send_through_up(program: Path, state: Path) -> None:
    """Run everything on this machine, send a message all the way, and remove it again."""

    def postroom(*arguments: str) -> str:
        done = subprocess.run(
            [program, *arguments],
            env={"PATH": os.defpath, "POSTROOM_STATE": str(state), "POSTROOM_SOCKET": str(state / "daemon/demo.sock")},
            cwd=state.parent,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    try:
        postroom("up", "--detach")
        assert postroom("send", "topic:orders", "hello", "--id", "from-wheels", "--wait") == "from-wheels done\n"
        assert "redis" in postroom("status")
    finally:
        postroom("down", "--wipe", "--yes")


def environment_of(wheels: list[Path], directory: Path) -> Path:
    """Make an environment with these wheels and whatever is installed here, but for this checkout."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    install(wheels, directory / "bin/python")
    (site,) = directory.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return site


def test_up_runs_from_the_wheels_alone(wheels: list[Path], short_directory: Path, tmp_path: Path) -> None:
    installed = tmp_path / "environment"
    site = environment_of(wheels, installed)
    send_through_up(installed / "bin/postroom", short_directory / "up")
    origins = subprocess.run(
        [installed / "bin/python", "-P", "-c", "import cli, postroom; print(cli.__file__, postroom.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(Path(origin).is_relative_to(site) for origin in origins)


FLOW = """
from postroom.flow import Flow

flow = Flow("closing")

@flow.activity(sends="queue:clerk")
async def ask(ctx, request):
    return request

@ask.answered
async def _(ctx, answer):
    return None  # a job is closed once the agent has answered

@flow.completed
async def report(ctx, job):
    return job.request
"""
AGENT = """
from cli import PRICE
from postroom.agent import Agent, Emit

class Clerk(Agent):
    subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)

    async def receive(self, envelope):
        return Emit("answered", {"price": PRICE})
"""
HANDLER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        print(self.rfile.read(int(self.headers["Content-Length"])).decode(), flush=True)
        self.send_response(200)
        self.end_headers()

server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def test_a_users_agent_flow_and_handler_run_in_their_own_environment_whatever_they_are_called(
    wheels: list[Path], tmp_path: Path, database_url: str, nats_url: str
) -> None:
    installed, project = tmp_path / "environment", tmp_path / "project"
    environment_of(wheels[:1], installed)
    for name, text in {
        "worker.py": FLOW,
        "daemon.py": AGENT,
        "cli/__init__.py": "PRICE = 7\n",
        "cli/__main__.py": HANDLER,
    }.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    mesh, job = f"m{uuid4().hex}", uuid4()
    variables = {
        "POSTROOM_DATABASE_URL": database_url,
        "POSTROOM_NATS_URL": nats_url,
        "POSTROOM_MESH": mesh,
        "POSTROOM_STATE": str(tmp_path / "state"),
    }

    async def begin() -> None:
        await migrate(database_url, *ROOMS)
        connection = await asyncpg.connect(database_url)
        await start_job(connection, Start(job, mesh, "closing", uuid4(), "ask", '{"of": "january"}'))
        await connection.close()
        nats = await connect(NatsSettings(url=nats_url), name="test", patience=20)
        for stream in default_streams(mesh, max_bytes=None):
            await ensure_stream(nats.jetstream(), stream)
        await nats.close()

    asyncio.run(begin())
    with ExitStack() as stack:

        def start(*words: str) -> IO[str]:
            """Start a module in the project, as its user does, and return what it prints."""
            command = tethered([str(installed / "bin/python"), "-m", *words])
            program = subprocess.Popen(
                command, cwd=project, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            stack.callback(program.wait)
            stack.callback(program.terminate)
            assert program.stdout is not None
            return stack.enter_context(program.stdout)

        handler = start("cli")
        url = f"http://127.0.0.1:{int(handler.readline())}/"
        start("postroom.worker", "run", "--flow", "worker:flow")
        start("postroom.worker", "agent", "daemon:Clerk")
        start("postroom.worker", "consumer", "--context", mesh, "--name", "books", "--handler", url)
        handled = next(line for line in handler if "job_completed" in line)
    assert str(job) in handled
    assert "january" in handled


def test_both_wheels_carry_the_licence(wheels: list[Path]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            (text,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
            assert "License-Expression: Apache-2.0\n" in archive.read(metadata).decode()
            assert archive.read(text) == (REPOSITORY / "LICENSE").read_bytes()


def test_the_servers_wheel_carries_the_pages_of_the_console(wheels: list[Path]) -> None:
    with zipfile.ZipFile(wheels[1]) as archive:
        carried = {name for name in archive.namelist() if name.startswith(("console/templates/", "console/static/"))}
    files = [file for name in ("templates", "static") for file in (REPOSITORY / "console" / name).iterdir()]
    assert carried == {str(file.relative_to(REPOSITORY)) for file in files}
    assert {"console/templates/base.html", "console/static/console.css"} <= carried


def requirements(project: Path, *extras: str) -> list[Requirement]:
    """Return what a distribution and some of its extras depend on, but for ours."""
    said = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    lines = [*said["dependencies"], *(line for extra in extras for line in said["optional-dependencies"][extra])]
    return [each for each in map(Requirement, lines) if each.name != "postroom"]


def lowest(found: list[Requirement]) -> list[str]:
    """Pin each at its lower bound, the highest one where several are given."""
    bounds = sorted(
        (each.name, Version(one.version)) for each in found for one in each.specifier if one.operator == ">="
    )
    assert {name for name, _ in bounds} == {each.name for each in found}
    return [f"{name}=={version}" for name, version in dict(bounds).items()]


def environment(directory: Path, *packages: str | Path, python: str = sys.executable) -> Path:
    """Make an environment with these packages from an index, and return its directory of programs."""
    subprocess.run([python, "-m", "venv", directory], check=True)
    subprocess.run([directory / "bin/pip", "install", "--quiet", "--disable-pip-version-check", *packages], check=True)
    return directory / "bin"


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_lowest_versions_that_the_server_allows_pass_its_tests(tmp_path: Path) -> None:
    pins = lowest(
        [
            *requirements(REPOSITORY, "embedded", "nkeys", "otel", "pipeline"),
            *requirements(REPOSITORY / "sdk", "nkeys", "otel", "postgres", "spark"),
        ]
    )
    developers = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    programs = environment(tmp_path / "lowest", *pins, *developers)
    here = ["--no-deps", "--no-build-isolation", "--quiet", "-e", REPOSITORY / "sdk", "-e", REPOSITORY]
    subprocess.run([programs / "pip", "install", *here], check=True)
    tests = ["tests/unit", "tests/migration", "tests/integration"]
    marks = ["-m", "not soak and not systemd", "--deselect", "tests/unit/house", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [programs / "python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *marks, *tests],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.soak
def test_the_lowest_versions_that_the_sdk_allows_send(daemon: LoneDaemon, wheels: list[Path], tmp_path: Path) -> None:
    programs = environment(tmp_path / "lowest", *lowest(requirements(REPOSITORY / "sdk")), wheels[0])
    command = [programs / "python", "-W", "error", "-c", PROGRAM, daemon.socket]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.soak
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_up_runs_from_the_wheels_and_an_index(
    wheels: list[Path], short_directory: Path, tmp_path: Path, version: str
) -> None:
    if (python := shutil.which(f"python{version}")) is None:
        pytest.skip(f"there is no Python {version} here")
    sdk, server = wheels
    environment(tmp_path / "environment", sdk, f"{server}[embedded]", python=python)
    send_through_up(tmp_path / "environment/bin/postroom", short_directory / "up")
