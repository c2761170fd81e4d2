"""A peer's words, made fit for a log line, a column or an error."""

from __future__ import annotations

import re
from typing import Final

MAX_WORDS: Final = 500  # characters kept
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")


def clean(text: str) -> str:
    """Return `text` without control characters and lone surrogates, and not longer than `MAX_WORDS`."""
    return _UNPRINTABLE.sub(" ", text[: 2 * MAX_WORDS])[:MAX_WORDS].strip()
