"""What a worker's config says about jobs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class JobSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a worker runs the steps of its flows."""

    steps_at_once: Annotated[int, Meta(ge=1, le=1000, description="most steps that run at once, of all flows")] = 16
    lease_seconds: Annotated[
        float,
        Meta(ge=0.5, le=3600, description="how long a worker that died holds others off a step, in seconds"),
    ] = 30
    keep_days: Annotated[
        float,
        Meta(
            gt=0,
            description="how long jobs of this database, also of flows of others, are kept once they are completed or "
            "cancelled, in days",
        ),
    ] = 90
    check_seconds: Annotated[
        float,
        Meta(gt=0, le=60, description="pause between two looks for new meshes and overdue answers, in seconds"),
    ] = 1
