"""A user's own module, named on the command line and found as `python -m` finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from postroom.chassis.exits import Fatal
from postroom.chassis.runtime import load_named
try:
    print(load_named(sys.argv[1], lambda _: None, what="an agent", example="module:Agent"))
except Fatal as fatal:
    print(int(fatal.exit_code), fatal)
"""


def load(name: str, directory: Path, **environment: str) -> str:
    command = [sys.executable, "-P", "-c", PROGRAM, name]
    done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


def test_a_module_of_the_current_directory_is_found_also_under_a_name_of_ours(tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("import cli.prices\nNAME = cli.prices.NAME\n")
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli/prices.py").write_text("NAME = 'found'\n")
    (tmp_path / "cli/__init__.py").touch()
    assert load("worker:NAME", tmp_path) == "found\n"


def test_the_current_directory_comes_before_pythonpath_and_that_before_what_is_installed(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for directory, names in ((here, ("daemon",)), (there, ("daemon", "broker"))):
        directory.mkdir()
        for name in names:
            (directory / f"{name}.py").write_text(f"NAME = '{directory.name}'\n")
    assert load("daemon:NAME", here, PYTHONPATH=str(there)) == "here\n"
    assert load("broker:NAME", here, PYTHONPATH=str(there)) == "there\n"


@pytest.mark.parametrize("hiding", ["postroom.py", "postroom/__init__.py"])
def test_a_module_that_would_hide_the_library_is_refused(tmp_path: Path, hiding: str) -> None:
    (tmp_path / "pricing.py").write_text("NAME = 'found'\n")
    (tmp_path / hiding).parent.mkdir(exist_ok=True)
    (tmp_path / hiding).touch()
    assert load("pricing:NAME", tmp_path) == f"78 {tmp_path / hiding} hides the library `postroom`: rename it\n"


def test_a_directory_with_the_librarys_name_and_no_module_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "pricing.py").write_text("NAME = 'found'\n")
    (tmp_path / "postroom").mkdir()
    assert load("pricing:NAME", tmp_path) == "found\n"


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import sys\nsys.exit(3)", "SystemExit: 3 ({file}, line 2)"),
        ("class Skipped(BaseException): ...\n\n\nraise Skipped('not here')", "Skipped: not here ({file}, line 4)"),
        ("import nowhere_at_all", "ModuleNotFoundError: No module named 'nowhere_at_all' ({file}, line 1)"),
        ("def f():\n    1 / 0\n\n\nf()", "ZeroDivisionError: division by zero ({file}, line 2)"),
        ("import json\njson.loads('x')", "JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({file}, line 2)"),
        ("class", "SyntaxError: invalid syntax (shop.py, line 1)"),
        (
            "def __getattr__(name):\n    import nowhere",
            "ModuleNotFoundError: No module named 'nowhere' ({file}, line 2)",
        ),
    ],
)
def test_a_module_that_ends_or_fails_at_its_import_is_refused_with_the_line(
    tmp_path: Path, module: str, said: str
) -> None:
    (tmp_path / "shop.py").write_text(module)
    sentence = f"78 cannot import shop: it raised {said.format(file=tmp_path / 'shop.py')}; correct it there"
    assert load("shop:Pricing", tmp_path) == f"{sentence}\n"


@pytest.mark.parametrize("name", ["shops", "shop.py", "shop/agents", "agents.shop"])
def test_a_module_that_is_not_there_is_named_with_where_it_was_looked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "shop.py").touch()
    said = load(f"{name}:Pricing", tmp_path)
    assert said.startswith(f"78 cannot import {name}: No module named '{name.partition('.')[0]}")
    assert f"it is looked for in {tmp_path}, in PYTHONPATH and in {sys.prefix}: pass module:Agent" in said


@pytest.mark.parametrize("name", ["shop", "time"])
def test_what_a_directory_or_a_built_in_module_lacks_is_looked_for_in_a_module(tmp_path: Path, name: str) -> None:
    (tmp_path / "shop").mkdir()
    sentence = f"78 there is no Pricing in {name}, which is a directory or a part of Python: name the module"
    assert load(f"{name}:Pricing", tmp_path) == f"{sentence}\n"


def test_a_relative_name_is_not_one_of_a_module(tmp_path: Path) -> None:
    assert load(".shop:Pricing", tmp_path) == "2 '.shop:Pricing' does not name an agent: pass module:Agent\n"
