"""Handlers behind HTTP: a message is posted to a URL, the answer decides (docs/contract/delivery.md#delivery-35).

A consumer posts to the handler that its config names; the messages of a topic are posted, signed, to the addresses that
a mesh's admin registered, its webhooks.
"""
