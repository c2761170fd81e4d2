"""Identifiers: minting ULIDs and checking the ids that callers bring.

A `client_message_id` is never released once a row holds it (seed daemon-spec-v9 §4.1), so its form is checked
before anything is written. Minted ids are ULIDs in time order, which keeps every index append-only.
"""

from __future__ import annotations

import re
from typing import Final

import ulid

MAX_ID_LENGTH: Final = 128  # characters
_CLIENT_MESSAGE_ID: Final = re.compile(r"[A-Za-z0-9._:~-]{1,128}")


def new_id() -> str:
    """Mint a ULID: 26 characters of Crockford base 32 that sort by the millisecond they were made in."""
    return str(ulid.new())


def is_client_message_id(text: str) -> bool:
    """Tell whether `text` may be an id: 1 to 128 characters of `A-Za-z0-9._:~-` (spec send.md, "The socket")."""
    return _CLIENT_MESSAGE_ID.fullmatch(text) is not None
