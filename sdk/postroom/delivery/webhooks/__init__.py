"""Webhooks: the messages of a topic are posted, signed, to the addresses that a mesh's admin registered."""
