"""The accept service: HTTP in front, Postgres behind, Redis for the limiter (spec accept.md)."""
