"""The inbox of one daemon: the messages that it received, in one SQLite file (spec delivery.md)."""
