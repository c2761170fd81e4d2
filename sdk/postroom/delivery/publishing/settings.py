"""What a config may say about publishing and about the record."""

from __future__ import annotations

from datetime import timedelta
from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.delivery.settings import DAY


class PublisherSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How one publisher works; events and deliveries have one each."""

    batch: Annotated[int, Meta(ge=1, le=10_000, description="most messages in one transaction")] = 1000
    batch_bytes: Annotated[int, Meta(ge=1, description="most bytes in one transaction (one message at least)")] = (
        8 * 1024 * 1024
    )
    aggregates: Annotated[int, Meta(ge=1, le=10_000, description="most aggregates in one transaction")] = 256
    idle_seconds: Annotated[
        float, Meta(gt=0, le=60, description="longest pause between two checks of an empty backlog, in seconds")
    ] = 0.05
    ack_seconds: Annotated[
        float, Meta(gt=0, le=10, description="how long JetStream may take to acknowledge a batch, in seconds")
    ] = 5
    first_seconds: Annotated[
        float, Meta(gt=0, description="longest wait after an event's first failure, in seconds")
    ] = 0.5
    most_seconds: Annotated[
        float, Meta(gt=0, le=DAY, description="longest wait that further failures double it to, in seconds")
    ] = 60


class RecordSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How the record is kept, and what it makes up for (docs/contract/delivery.md#delivery-21)."""

    check_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="pause between two comparisons of streams and record, in seconds")
    ] = 10
    horizon_days: Annotated[
        float, Meta(gt=0, description="age up to which a message that a stream lost is published again, in days")
    ] = 7
    keep_days: Annotated[float, Meta(gt=0, description="how long published events are kept, in days")] = 30

    @property
    def horizon(self) -> timedelta:
        """How old what was lost may be."""
        return timedelta(days=self.horizon_days)
