"""Delivering: streams, the publisher, consumers and their handlers, dead letters (spec delivery.md)."""
