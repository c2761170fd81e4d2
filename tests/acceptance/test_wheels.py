"""What users install: the wheels of both distributions, without this checkout.

The sdk's runs beside nothing but its own dependencies. Where each Python finds the servers' own wheels in an index is
tried by `make test-wheels`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import AsyncIterator
from importlib.metadata import files, requires
from pathlib import Path

import pytest
from lone_daemon import LoneDaemon
from packaging.requirements import Requirement

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
ROOMS = {"broker", "broker_client", "chassis", "cli", "daemon", "embedded", "ipc", "outbox"}


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
    assert not ROOMS & set(modules.split())


def test_the_sdk_needs_no_more_than_it_says() -> None:
    said = tomllib.loads((REPOSITORY / "sdk" / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {each.split(">=")[0] for each in said} == {"aiohttp", "msgspec", "rfc8785"}


def test_up_runs_from_the_wheels_alone(wheels: list[Path], short_directory: Path, tmp_path: Path) -> None:
    environment, state = tmp_path / "environment", short_directory / "up"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    install(wheels, environment / "bin/python")
    (site,) = environment.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(
        sysconfig.get_path("purelib")
    )  # what is installed here, but for this checkout

    def postroom(*arguments: str) -> str:
        command = [environment / "bin/postroom", *arguments]
        done = subprocess.run(
            command,
            env={"PATH": os.defpath, "POSTROOM_STATE": str(state), "POSTROOM_SOCKET": str(state / "daemon/demo.sock")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    try:
        postroom("up", "--detach")
        assert postroom("send", "topic:orders", "hello", "--id", "from-wheels", "--wait") == "from-wheels done\n"
        assert "redis" in postroom("status")
    finally:
        postroom("down", "--wipe", "--yes")
    origins = subprocess.run(
        [environment / "bin/python", "-P", "-c", "import cli, postroom; print(cli.__file__, postroom.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(Path(origin).is_relative_to(site) for origin in origins)


def test_both_wheels_carry_the_licence(wheels: list[Path]) -> None:
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            (text,) = (name for name in archive.namelist() if name.endswith(".dist-info/licenses/LICENSE"))
            assert "License-Expression: Apache-2.0\n" in archive.read(metadata).decode()
            assert archive.read(text) == (REPOSITORY / "LICENSE").read_bytes()
