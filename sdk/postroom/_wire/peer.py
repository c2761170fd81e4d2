"""What a failure to talk to a daemon or a broker means: one sentence that names the peer and says what to do."""

import errno
import os
from http import HTTPStatus
from typing import Final, NamedTuple, NoReturn

import msgspec

from postroom._wire.http import Garbled, Unreachable
from postroom.errors import PROBLEM_JSON, NotPermitted, PostroomError, Problem, Unavailable, error_for

MAX_REASON: Final = 300  # characters of a foreign error that a sentence quotes

_decode_problem: Final = msgspec.json.Decoder(Problem).decode


class Peer(NamedTuple):
    """Who is expected at `address`: the "daemon" or the "broker" (`role`), and the `remedy` where it is absent."""

    role: str
    address: str
    remedy: str

    def __str__(self) -> str:
        return f"the {self.role} at {self.address}"

    def failure(self, error: Exception) -> PostroomError:
        """Say what an error of the connection means."""
        cause = error.__cause__ if isinstance(error, Unreachable) else None
        match cause or error:
            case FileNotFoundError() | ConnectionRefusedError():
                return self.absent("nothing listens there")
            case PermissionError():
                detail = f"{self} refuses the connection: {os.strerror(errno.EACCES)}"
                return NotPermitted.of("socket_not_permitted", detail)
            case TimeoutError():
                detail = f"{self} did not answer in time: it hangs or is overloaded"
                return _unavailable("no_answer", detail)
            case Garbled():
                return self.foreign(str(error))
            case OSError(errno=errno.ENOTSOCK | errno.ENOTDIR | errno.EPROTOTYPE):
                return self.absent("that is not a socket")
        return self.lost() if cause is None else self.absent(str(cause))

    def lost(self) -> Unavailable:
        """Build the error for a connection that broke before the answer was complete."""
        detail = f"the connection to {self} broke; it is not known whether the request took effect"
        return _unavailable("connection_lost", detail)

    def refusal(self, status: int, media: str, data: bytes) -> NoReturn:
        """Raise the problem that the peer answered with, or what an answer that is no problem means."""
        if media != PROBLEM_JSON:
            retryable = status >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise self.foreign(f"it answered {status} as {media}, not as a problem", retryable=retryable)
        try:
            problem = _decode_problem(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise self.foreign(f"it answered {status} with a problem that can't be read: {error}") from error
        if problem.status != status:
            raise self.foreign(f"it answered {status} with a problem of status {problem.status}")
        raise error_for(problem)

    def absent(self, reason: str) -> Unavailable:
        """Build the error for a peer that is not there."""
        return _unavailable(f"{self.role}_absent", f"no {self.role} at {self.address} ({reason}): {self.remedy}")

    def foreign(self, reason: str, *, retryable: bool = False) -> Unavailable:
        """Build the error for an answer that isn't ours: another program, or another version of this one."""
        detail = f"{self} is not part of Postroom, or has another version: {reason[:MAX_REASON]}"
        return Unavailable.of("not_understood", detail, retryable=retryable)


def _unavailable(code: str, detail: str) -> Unavailable:
    return Unavailable.of(code, detail, retryable=True)
