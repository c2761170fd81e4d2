"""What the daemon's config says about the broker and the relay (its tables `[broker]` and `[relay]`)."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from postroom._wire.names import URL
from postroom._wire.retry import Backoff
from postroom.chassis.config import ConnectSeconds

MIB: Final = 1024 * 1024


class BrokerClientSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How the broker is reached, and how long and how large an answer of it may be."""

    url: Annotated[str, Meta(pattern=URL.schema, description="the broker's address, as in https://broker.example.com")]
    token_file: Annotated[Path, Meta(description="file with the member's bearer token; read again whenever it changes")]
    ca_file: Annotated[
        Path | None,
        Meta(description="PEM file of the authorities that may sign the broker's certificate, instead of the system's"),
    ] = None
    allow_plaintext: Annotated[
        bool, Meta(description="allow http:// to another host, which exposes the token to the network")
    ] = False
    connect_seconds: ConnectSeconds = 5
    request_seconds: Annotated[float, Meta(gt=0, le=600, description="longest wait for a whole answer, in seconds")] = (
        30
    )
    max_answer_bytes: Annotated[
        int, Meta(ge=1024, le=256 * MIB, description="longest answer that is read, in bytes")
    ] = 4 * MIB


class RelaySettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, frozen=True):
    """How the relay drains the outbox (docs/contract/send.md#send-58)."""

    batch_messages: Annotated[int, Meta(ge=1, le=1000, description="most messages in one post")] = 500
    batch_bytes: Annotated[int, Meta(ge=1024, le=64 * MIB, description="most payload in one post, in bytes")] = MIB
    posts_at_once: Annotated[int, Meta(ge=1, le=16, description="most posts at once")] = 4
    backoff_first_seconds: Annotated[
        float, Meta(gt=0, le=60, description="longest wait after the first failure; it doubles with each further one")
    ] = 0.5
    backoff_most_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="longest wait after any number of failures, in seconds")
    ] = 60
    max_age_hours: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="age, from not_before where one is set, at which a row becomes "
            "dead; unset: what the broker allows"
        ),
    ] = None
    late_seconds: Annotated[
        float, Meta(gt=0, description="health is `degraded` once a due message has waited for longer, in seconds")
    ] = 300
    expiry_seconds: Annotated[float, Meta(gt=0, le=3600, description="time between two checks for expired rows")] = 60
    stop_seconds: Annotated[
        float, Meta(gt=0, le=600, description="longest wait for running posts at a stop, in seconds")
    ] = 30

    @property
    def backoff(self) -> Backoff:
        """How pauses and waits grow."""
        return Backoff(self.backoff_first_seconds, self.backoff_most_seconds)
