"""postroomd: the socket, the outbox and the relay in one process."""
