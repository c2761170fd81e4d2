"""How one program of Postroom starts another."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: object) -> list[str]:
    """Return the command line that runs one of our modules, whatever lies in the working directory.

    `python -m` alone looks there first, and `worker.py` or `cli/` are likely names in a user's project.
    """
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]
