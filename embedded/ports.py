"""Ports of loopback."""

from __future__ import annotations

import socket


def is_free(port: int) -> bool:
    """Say whether a server may listen on a port of loopback; asked for any port (0, -1), it says no."""
    if port <= 0:
        return False
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
