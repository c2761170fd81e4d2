"""What an operator may configure of the outbox: the section `[outbox]` of the daemon's config."""

from __future__ import annotations

from typing import Annotated

import msgspec


class OutboxSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """The limits of one outbox."""

    max_bytes: Annotated[
        int,
        msgspec.Meta(
            ge=1024 * 1024,
            description="Size that the outbox file may reach, in bytes: a warning at 80 %, new messages are refused "
            "(507) at 95 %.",
        ),
    ] = 2 * 1024 * 1024 * 1024
    max_group_rows: Annotated[
        int,
        msgspec.Meta(
            ge=1, le=10_000, description="Messages that may share a transaction; a large one counts as several."
        ),
    ] = 1000
    checkpoint_bytes: Annotated[
        int,
        msgspec.Meta(
            ge=4096,
            le=32 * 1024 * 1024,
            description="About how much the write-ahead log gathers, in bytes, before it is moved into the file: less "
            "makes shorter and more frequent pauses.",
        ),
    ] = 1024 * 1024
