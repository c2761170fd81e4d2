"""postroomd: builds the socket, the outbox and the relay into one process."""
