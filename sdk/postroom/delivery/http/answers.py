"""How a consumer reads its handler's answer: the table of docs/contract/delivery.md#delivery-35.

| the handler says                                  | the message is                                            |
|---------------------------------------------------|-----------------------------------------------------------|
| 2xx, 409                                          | processed                                                 |
| 422                                               | dead                                                      |
| 5xx, 408, 425, 429, no answer in time, none at all | waiting for its next attempt (`Retry-After` is honoured)  |
| any other 4xx, a redirect                         | the same, so that a wrong deployment buries no stream     |
| nothing: no connection came about                 | waiting, and this was no attempt                          |

After the last attempt what would be waiting is dead too, with the reason `max_deliver`. The functions are pure.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from postroom.delivery.consuming import MAX_DELIVER

UNREACHABLE: Final = "handler_unreachable"  # the code of a call that found nobody
UNTRUSTED: Final = "handler_untrusted"  # and of one whose connection could not be encrypted as it should be
POISON: Final = "poison"  # the reason of a message that its handler refused with 422

_ALREADY_PROCESSED: Final = 409
_UNPROCESSABLE: Final = 422
_SUCCESS: Final = range(200, 300)


class Answer(NamedTuple):
    """What one call came to: a status, or none where no answer came; `code` and `detail` say why it failed."""

    status: int | None
    code: str
    detail: str
    retry_after: float | None = None  # seconds, clamped

    @property
    def reached(self) -> bool:
        """Whether there was anybody who could have handled the message."""
        return self.code not in (UNREACHABLE, UNTRUSTED)

    @property
    def error(self) -> str:
        """The failure in words, as `last_error` keeps it."""
        return f"{self.code}: {self.detail}" if self.detail else self.code


class State(StrEnum):
    """What an attempt makes of its message, in the words of the `settle` query."""

    PROCESSED = "processed"
    DEAD = "dead"
    FAILED = "failed"
    UNREACHED = "unreached"  # waiting as before: nobody was there to handle it
    EXHAUSTED = "exhausted"  # dead without this attempt: those before it were all that there are


class Judgement(NamedTuple):
    """The state that an attempt leaves its message in, and why."""

    state: State
    reason: str | None = None  # of a death
    error: str | None = None
    after: float | None = None  # seconds until the next attempt, where the handler asked for it


def judge(answer: Answer, *, last: bool) -> Judgement:
    """Turn an answer into what becomes of the message; `last` says that a further attempt would be one too many."""
    if answer.status is not None and (answer.status in _SUCCESS or answer.status == _ALREADY_PROCESSED):
        return Judgement(State.PROCESSED)
    if answer.status == _UNPROCESSABLE:
        return Judgement(State.DEAD, POISON, answer.error)
    if not answer.reached:
        return Judgement(State.UNREACHED, error=answer.error)
    if last:
        return Judgement(State.DEAD, MAX_DELIVER, answer.error)
    return Judgement(State.FAILED, error=answer.error, after=answer.retry_after)
