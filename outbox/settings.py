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
            description="Room for waiting rows (pending, inflight and dead), in bytes of the file: a "
            "warning at 80 %, new messages are refused (507) at 95 %. Done and aborted "
            "rows never count: when all rows together "
            "need more than 90 %, the payloads of the oldest of those are deleted.",
        ),
    ] = 2 * 1024 * 1024 * 1024
    keep_payloads: Annotated[
        float,
        msgspec.Meta(
            ge=0,
            le=36_500,
            description="How long the payloads of done and aborted rows are kept while there is room, in days. About "
            "140 bytes of each such row stay forever (id, fingerprint, outcome), in addition to `max_bytes`.",
        ),
    ] = 7
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
