"""Postroom, for programs: hand a message to the daemon of this machine and walk away."""

from postroom.errors import Conflict, InvalidMessage, NotFound, NotPermitted, PostroomError, TryAgain, Unavailable
from postroom.ids import new_id
from postroom.sends import OutboxRow, SendResult

__all__ = [
    "Conflict",
    "InvalidMessage",
    "NotFound",
    "NotPermitted",
    "OutboxRow",
    "PostroomError",
    "SendResult",
    "TryAgain",
    "Unavailable",
    "new_id",
]
