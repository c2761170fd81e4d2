"""Embedded servers: Postgres, Redis and NATS from Python wheels, for trying, developing and testing.

Each is a process of its own, has all its state below one directory, and answers on a Unix socket or on loopback only.
It ends with the process that started it (see `embedded.tether`), and another process can stop it by its pid file.
"""

from embedded.nats import EmbeddedNats
from embedded.postgres import EmbeddedPostgres
from embedded.processes import EmbeddedError, ProcessIdentity
from embedded.redis import EmbeddedRedis
from embedded.server import EmbeddedServer

__all__ = ["EmbeddedError", "EmbeddedNats", "EmbeddedPostgres", "EmbeddedRedis", "EmbeddedServer", "ProcessIdentity"]
