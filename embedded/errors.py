"""What goes wrong with an embedded server."""


class EmbeddedError(Exception):
    """A server could not be started or stopped; the sentence says which one, why, and what to do."""
