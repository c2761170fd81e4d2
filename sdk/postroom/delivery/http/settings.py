"""What a config says about the handler that a consumer posts to: its table `[handler]`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.settings import ConsumerSettings

KIB: Final = 1024


class HandlerSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """Where messages are posted to, and how long and how large an answer may be."""

    url: Annotated[str, Meta(description="the handler's address, as in http://127.0.0.1:8000/handle")]
    timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="longest wait for an answer, in seconds; shorter than ack_wait_seconds")
    ] = 20
    connect_seconds: Annotated[float, Meta(gt=0, le=300, description="longest wait for a connection, in seconds")] = 5
    calls_at_once: Annotated[int, Meta(ge=1, le=1000, description="most calls at once")] = 64
    secret_file: Annotated[
        Path | None, Meta(description="file with the secret that signs requests; not readable by others")
    ] = None
    ca_file: Annotated[
        Path | None,
        Meta(
            description="PEM file of the authorities that may sign the handler's certificate, instead of the system's"
        ),
    ] = None
    max_answer_bytes: Annotated[
        int,
        Meta(ge=0, le=1024 * KIB, description="how much of an answer is read for the reason of a failure, in bytes"),
    ] = 16 * KIB


class InboxSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How long a consumer remembers what it has handled."""

    keep_days: Annotated[
        float,
        Meta(gt=0, description="least time that handled messages are remembered, in days; longer than `horizon_days`"),
    ] = 30
    horizon_days: Annotated[
        float, Meta(gt=0, description="age up to which workers publish a message again (their `record.horizon_days`)")
    ] = 7
    sweep_interval_seconds: Annotated[float, Meta(gt=0, description="pause between sweeps, in seconds")] = 600
    sweep_rows: Annotated[int, Meta(ge=1, le=10_000, description="rows in one slice of a sweep")] = 500


def check_inbox(inbox: InboxSettings) -> None:
    """Raise `Fatal` (78) unless a message is remembered for longer than it may be published again."""
    if inbox.keep_days <= inbox.horizon_days:
        raise Fatal(
            Exit.CONFIG,
            f"inbox.keep_days ({inbox.keep_days:g}) is not longer than inbox.horizon_days ({inbox.horizon_days:g}): "
            "a message that workers publish again would be handled again",
        )


def check_timeout(handler: HandlerSettings, consumer: ConsumerSettings) -> None:
    """Raise `Fatal` (78) unless the handler's time-out is below the consumer's ack_wait."""
    if handler.timeout_seconds >= consumer.ack_wait_seconds:
        raise Fatal(
            Exit.CONFIG,
            f"handler.timeout_seconds ({handler.timeout_seconds:g}) must be shorter than consumer.ack_wait_seconds "
            f"({consumer.ack_wait_seconds:g}): otherwise a message is delivered again while its handler still runs",
        )
