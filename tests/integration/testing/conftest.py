"""What users name in theirs."""

from postroom.testing.fixtures import mailroom

__all__ = ["mailroom"]
