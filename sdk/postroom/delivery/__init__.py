"""Delivering: streams, publisher, consumers, handlers, dead letters (docs/contract/delivery.md#delivery-28)."""
