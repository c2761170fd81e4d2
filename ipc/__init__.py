"""The socket: peer credentials, limits, the route table, problem answers."""
