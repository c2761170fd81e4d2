"""What a program without type checks may hand to a client by mistake, refused before anything is sent."""

from __future__ import annotations

import math
from typing import Any

from postroom.message import refuse


def check_seconds(timeout: float, patience: float) -> None:
    """Refuse a client that would wait for ever (`timeout`), or for no time that there is (`patience`)."""
    if not _is_number(timeout) or not 0 < timeout < math.inf:
        refuse("invalid_timeout", f"timeout must be a number of seconds above 0, not {timeout!r}", "timeout")
    if not _is_number(patience) or not patience >= 0:
        refuse("invalid_patience", f"patience must be a number of seconds (0: one try), not {patience!r}", "patience")


def check_id(message_id: Any) -> str:
    """Return an id as it came; refuse what is none, such as the whole receipt of a send."""
    if not isinstance(message_id, str):
        sentence = (
            f"an id must be text, such as the `client_message_id` that `send` returned, not {type(message_id).__name__}"
        )
        refuse("invalid_client_message_id", sentence, "client_message_id")
    return message_id


def check_traceparent(traceparent: Any) -> str:
    """Return it as it came; refuse what no header can hold (what else is no traceparent, the daemon passes over)."""
    if not isinstance(traceparent, str) or not (traceparent.isascii() and traceparent.isprintable()):
        sentence = "traceparent must be plain text as 00-<32 hex digits>-<16 hex digits>-01 (W3C Trace Context)"
        refuse("invalid_field", sentence, "traceparent")
    return traceparent


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
