"""Embedded servers: Postgres, Redis and NATS from Python wheels, for trying, developing and testing."""
