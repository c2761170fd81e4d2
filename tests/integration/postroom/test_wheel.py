"""The sdk alone: its wheel, installed beside nothing but its own dependencies, sends through a running daemon."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import files, requires
from pathlib import Path

from lone_daemon import LoneDaemon
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[3]
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


def test_a_program_with_nothing_but_the_wheel_sends(daemon: LoneDaemon, tmp_path: Path) -> None:
    built, installed, around = (tmp_path / name for name in ("built", "installed", "around"))
    for directory in (built, installed, around):
        directory.mkdir()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built],
        cwd=REPOSITORY / "sdk",
        check=True,
        capture_output=True,
    )
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", installed, wheel]
    subprocess.run([*pip, "--disable-pip-version-check"], check=True)
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
    assert {each.split(">=")[0] for each in said} == {"aiohttp", "msgspec", "rfc8785", "ulid-py"}
