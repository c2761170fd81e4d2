"""Programs that a test runs beside itself, also on a disk that is soon full."""

from __future__ import annotations

import asyncio
import os
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


async def run_on_a_small_disk(tmp_path: Path, program: str, *, megabytes: int = 1, files: int = 0) -> list[str]:
    """A small tmpfs in a mount namespace of its own, which needs no privilege where user namespaces are allowed.

    It has room for so many `files` and directories, itself among them; 0: for any number.
    """
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    small = f'mount -t tmpfs -o size={megabytes}m,nr_inodes={files},mode=700 tmpfs "{tmp_path}"'
    probe = await asyncio.create_subprocess_exec(*namespace, "sh", "-c", small, stderr=asyncio.subprocess.DEVNULL)
    if await probe.wait():
        pytest.skip("this machine lets nobody mount a tmpfs")
    command = f'{small} && exec "{sys.executable}" -c "$PROGRAM" "{tmp_path}"'
    return await run(*namespace, "sh", "-c", command, PROGRAM=program)
