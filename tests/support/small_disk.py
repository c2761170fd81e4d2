"""Programs that a test runs beside itself, also on a disk that is soon full."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest


async def run(*command: str, **variables: str) -> list[str]:
    """Run a program and return the lines it printed."""
    program = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env=environment() | variables
    )
    output, _ = await program.communicate()
    return output.decode().splitlines()


def environment() -> dict[str, str]:
    """Return the environment in which a program finds what supports the tests."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def on_a_small_disk(directory: Path, command: str, *, megabytes: int, files: int = 0) -> list[str]:
    """A shell's command on a tmpfs in a mount namespace of its own, which needs no privilege where users may have one.

    The tmpfs has room for so many `files` and directories, itself among them; 0: for any number.
    """
    unshare = shutil.which("unshare")
    assert unshare is not None
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    small = f'mount -t tmpfs -o size={megabytes}m,nr_inodes={files},mode=700 tmpfs "{directory}"'
    return [unshare, *user, "--mount", "sh", "-c", f"{small} && {command}"]


async def run_on_a_small_disk(tmp_path: Path, program: str, *, megabytes: int = 1, files: int = 0) -> list[str]:
    """Run a Python program, which finds the directory in its arguments, on a small disk."""
    probe = await asyncio.create_subprocess_exec(
        *on_a_small_disk(tmp_path, "true", megabytes=megabytes, files=files), stderr=asyncio.subprocess.DEVNULL
    )
    if await probe.wait():
        pytest.skip("this machine lets nobody mount a tmpfs")
    command = f'exec "{sys.executable}" -c "$PROGRAM" "{tmp_path}"'
    return await run(*on_a_small_disk(tmp_path, command, megabytes=megabytes, files=files), PROGRAM=program)
