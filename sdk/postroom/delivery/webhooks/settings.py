"""What a config says about webhooks: which addresses they may have, and how the worker delivers to them."""

from __future__ import annotations

from ipaddress import ip_network
from typing import Annotated

import msgspec
from msgspec import Meta

from postroom.chassis.exits import Exit, Fatal
from postroom.delivery.http.addresses import Network
from postroom.delivery.http.settings import InboxSettings, check_inbox
from postroom.delivery.settings import BackoffSettings


class AddressSettings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which addresses that are not public a webhook may have all the same; broker and worker want the same list."""

    allow_networks: Annotated[
        list[str],
        Meta(description="networks that webhooks may reach although they are not public, as in 10.1.0.0/16"),
    ] = msgspec.field(default_factory=list)


class WebhookSettings(AddressSettings, kw_only=True, forbid_unknown_fields=True):
    """How the worker delivers to webhooks; the limits are those of each webhook for itself."""

    check_seconds: Annotated[
        float, Meta(gt=0, le=60, description="pause between two checks for new webhooks, in seconds")
    ] = 2
    timeout_seconds: Annotated[
        float, Meta(gt=0, le=3600, description="longest wait for an answer, in seconds; shorter than ack_wait_seconds")
    ] = 10
    connect_seconds: Annotated[float, Meta(gt=0, le=300, description="longest wait for a connection, in seconds")] = 5
    ack_wait_seconds: Annotated[
        float,
        Meta(
            ge=0.1, description="time without an acknowledgement after which a message is delivered again, in seconds"
        ),
    ] = 30
    calls_at_once: Annotated[int, Meta(ge=1, le=1000, description="most requests at once")] = 8
    max_deliver: Annotated[
        int, Meta(ge=1, description="attempts, the first included, after which a message is dead-lettered")
    ] = 20
    inbox: InboxSettings = msgspec.field(default_factory=InboxSettings)
    backoff: BackoffSettings = msgspec.field(
        default_factory=lambda: BackoffSettings(first_seconds=5, factor=2, most_seconds=3600)
    )


def check_webhooks(settings: WebhookSettings) -> None:
    """Raise `Fatal` (78) unless the networks are some, the time-out is below `ack_wait_seconds`, and rows are kept."""
    networks_of(settings)
    check_inbox(settings.inbox)
    if settings.timeout_seconds >= settings.ack_wait_seconds:
        raise Fatal(
            Exit.CONFIG,
            f"webhooks.timeout_seconds ({settings.timeout_seconds:g}) must be shorter than webhooks.ack_wait_seconds "
            f"({settings.ack_wait_seconds:g}): otherwise a message is delivered again while it is still being posted",
        )


def networks_of(settings: AddressSettings) -> list[Network]:
    """Return the networks that are allowed; raises `Fatal` (78) for what is none."""
    try:
        return [ip_network(text) for text in settings.allow_networks]
    except ValueError as error:
        raise Fatal(Exit.CONFIG, f"webhooks.allow_networks: {error} (as in 10.1.0.0/16 or fd00:1::/32)") from error
