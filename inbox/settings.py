"""What an operator may configure of the inbox: the section `[inbox]` of the daemon's config."""

from __future__ import annotations

from typing import Annotated

import msgspec


class InboxSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long received messages are kept, and how the live stream behaves."""

    retention_days: Annotated[
        float, msgspec.Meta(gt=0, le=3650, description="Age at which a received message is deleted, in days.")
    ] = 30
    readers: Annotated[
        int, msgspec.Meta(ge=1, le=10_000, description="Readers of the live stream at once; one more is refused (429).")
    ] = 256
    heartbeat_seconds: Annotated[
        float,
        msgspec.Meta(gt=0, le=300, description="Silence after which the live stream sends a comment, in seconds."),
    ] = 15
