"""Handlers behind HTTP: a message is posted to a URL, and the answer decides (CMD-051, CMD-052; spec delivery.md)."""
