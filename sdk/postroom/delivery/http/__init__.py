"""Handlers behind HTTP: a message is posted to a URL, the answer decides (docs/contract/delivery.md#delivery-35)."""
