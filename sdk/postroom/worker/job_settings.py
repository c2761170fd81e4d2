"""What a worker's config says about jobs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class JobSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How a worker runs the steps of its flows."""

    steps_at_once: Annotated[int, Meta(ge=1, le=1000, description="most steps that run at once, in all flows")] = 16
    lease_seconds: Annotated[
        float,
        Meta(
            ge=0.5, le=3600, description="lease of a step, in seconds: how long a worker that died keeps others from it"
        ),
    ] = 30
    keep_days: Annotated[
        float,
        Meta(
            gt=0,
            description="how long completed and cancelled jobs of this database are kept, also "
            "those of other flows, in days",
        ),
    ] = 90
    check_seconds: Annotated[
        float,
        Meta(gt=0, le=60, description="pause between two checks for new meshes and overdue answers, in seconds"),
    ] = 1
