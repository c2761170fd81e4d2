"""Saying what a handler raised, in words that Postgres and the logs can keep, whatever it was."""

from __future__ import annotations

from typing import Final

_MOST_CHARACTERS: Final = 1000


def tell(error: BaseException) -> str:
    """Name an error and what it says, of a group its members too; what no database keeps becomes an escape."""
    kept = _told(error)[:_MOST_CHARACTERS].encode("utf-8", "backslashreplace").decode()
    return kept.replace("\0", "\\x00")


def _told(error: BaseException) -> str:
    kind, text = type(error).__name__, _text_of(error)
    if isinstance(error, BaseExceptionGroup):
        text += ": " + "; ".join(map(_told, error.exceptions))
    return f"{kind}: {text}" if text else kind


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - it is the handler's own code
        return f"(its text is not available: {type(broken).__name__})"
