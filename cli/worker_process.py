"""The process that runs a user's code: `python -m postroom.worker`, which has nothing of ours but the library.

Here `cli`, `daemon` and `worker` are ours; there they are the user's names. So the command line never imports a
user's module: it becomes that process, or asks one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Final, NoReturn

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import check_library_is_visible

# -P: the library is found before the working directory is looked at, which comes first for what the user names.
_COMMAND: Final = (sys.executable, "-P", "-m", "postroom.worker")
_SAID: Final = "postroom: "  # before the sentence with which it ends


def become_worker(*words: str) -> NoReturn:
    """Go on as that process, under this one's id: signals and a service manager reach it, its exit code is ours."""
    check_library_is_visible()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    for descriptor in range(3):
        os.set_inheritable(descriptor, True)  # also one that stands in for a stream that was closed
    os.execv(_COMMAND[0], [*_COMMAND, *words])  # noqa: S606 - our own words, no shell


def ask_worker(*words: str) -> Any:
    """Return what such a process answers; raises `Fatal` with its sentence and its exit code where it has none."""
    check_library_is_visible()
    done = subprocess.run(  # noqa: S603 - our own words, no shell
        [*_COMMAND, *words], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    *printed, last = done.stderr.splitlines() or [f"{words[0]} ended without a word"]
    if done.returncode == 0:
        sys.stderr.write(done.stderr)
        return json.loads(done.stdout)
    sys.stderr.writelines(f"{line}\n" for line in printed)
    code = Exit(done.returncode) if done.returncode in set(Exit) else Exit.FAILED
    raise Fatal(code, last.removeprefix(_SAID))


def options(**given: object) -> list[str]:
    """Write options as that process reads them, but for those that were not given; a list is one that is repeated."""
    words = []
    for name, value in given.items():
        for each in value if isinstance(value, list) else [value]:
            words += [] if each is None else [f"--{name.replace('_', '-')}={each}"]
    return words
