"""The users of this machine: their names, and who runs this program."""

from __future__ import annotations

import os
import pwd
from functools import lru_cache


@lru_cache(maxsize=256)
def user_name(uid: int) -> str | None:
    """Return the login name of `uid`, or None where the machine knows none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


def this_user() -> str:
    """Return the name of who runs this program, as the system knows it: no variable of the environment changes it."""
    uid = os.getuid()
    return user_name(uid) or f"uid {uid}"
