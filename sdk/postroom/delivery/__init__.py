"""Delivery: streams, publisher, consumers, handlers, dead letters (docs/contract/delivery.md#delivery-28)."""

from typing import Final

ROOM: Final = __name__  # the name of its migrations
