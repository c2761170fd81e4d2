"""Finding what `module:name` names in a user's own code."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from postroom.chassis.exits import Exit, Fatal


def load_named(name: str, *, what: str, example: str) -> Any:
    """Import `module:name`, also from the current directory, which comes last: its `worker.py` must not hide ours.

    Raises `Fatal`: 2 where `name` has another form, as one that names no `what`, and 78 where it can't be imported.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise Fatal(Exit.USAGE, f"{name!r} names no {what}: give {example}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise Fatal(Exit.CONFIG, f"cannot import {module_name}: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise Fatal(Exit.CONFIG, f"there is no {attribute} in {module_name} ({module.__file__})")
    return found
