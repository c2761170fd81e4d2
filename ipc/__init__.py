"""The socket: listener, peer credentials, limits, the route table, problem answers."""
