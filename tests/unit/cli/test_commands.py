"""Commands that start our own programs, in a directory whose files have the same names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cli.stack import Program, Stack, module_command

NAMES = ("broker", "cli", "daemon", "embedded", "worker")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A user's directory, in which every one of our names is taken."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a file of the user')\n")
    return tmp_path


@pytest.mark.parametrize("module", ["broker", "cli", "daemon", "postroom.worker"])
def test_a_users_file_of_the_same_name_is_not_run_instead(module: str, project: Path) -> None:
    environment = {"PYTHONPATH": "."}
    done = subprocess.run(
        module_command(module, "--help"), cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert "usage: " in done.stdout.lower(), done.stderr
    assert done.returncode == 0


def test_every_program_of_a_stack_is_started_that_way(tmp_path: Path) -> None:
    programs = [program for program in Stack(tmp_path).programs if isinstance(program, Program)]
    commands = [program._command() for program in programs]
    assert [command[: len(module_command("x")) - 1] for command in commands] == [module_command("x")[:-1]] * 3


@pytest.mark.parametrize("path", [".", "{project}", ":.:"])
def test_the_command_starts_beside_a_users_modules_of_the_same_names(project: Path, path: str) -> None:
    command = [Path(sys.executable).with_name("postroom"), "daemon", "--help"]
    environment = {"PYTHONPATH": path.format(project=project)}
    done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Run and check the daemon." in done.stdout
