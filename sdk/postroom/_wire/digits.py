"""The 15 digits of a ledger, as people see them: what each means (docs/contract/jobs.md#jobs-5).

    position   1  2  3     4         5      6         7            8 … 15
    activity   attempts    leg 1     work   children  completion   entries into leg 2
               of leg 1    complete  done   spawned   tasks done
    GUID       0  0  0     closed    work   children  completion   ordinal of the entry
                           the job   done   spawned   tasks done   that brought the message

Every function here is pure: what moves the digits is the database (`postroom.ledger`). A ledger only grows.
"""

from typing import Final, Literal, NamedTuple

from postroom.errors import InvalidMessage

DIGITS: Final = 15
MOST: Final = 10**DIGITS - 1

LEG1_ATTEMPT: Final = 1_000_000_000_000
LEG1_COMPLETE: Final = 100_000_000_000  # of an activity
JOB_CLOSED: Final = 100_000_000_000  # of a GUID: the snapshot
WORK_DONE: Final = 10_000_000_000  # step 1
CHILDREN_SPAWNED: Final = 1_000_000_000  # step 2
COMPLETION_DONE: Final = 100_000_000  # step 3
LEG2_ENTRY: Final = 1

MOST_LEG1_ATTEMPTS: Final = 999
MOST_LEG2_ENTRIES: Final = 99_999_999

ENTRIES: Final = MOST_LEG2_ENTRIES + 1  # what the last eight digits count in
_MARKERS: Final = (LEG1_COMPLETE, WORK_DONE, CHILDREN_SPAWNED, COMPLETION_DONE)


class ActivityLedger(NamedTuple):
    """An activity's ledger, read."""

    leg1_attempts: int
    leg1_complete: bool
    work_done: bool
    children_spawned: bool
    completion_done: bool
    leg2_entries: int


class GuidLedger(NamedTuple):
    """A leg-2 message's ledger, read."""

    job_closed: bool
    work_done: bool
    children_spawned: bool
    completion_done: bool
    ordinal: int

    @property
    def dimension(self) -> int:
        """What tells the cycle of this message from others: from 0, and growing; its redeliveries do not move it."""
        return self.ordinal - 1

    @property
    def done(self) -> bool:
        """Whether no step is left: the completion tasks are one only for the message that closed the job."""
        return self.children_spawned and (self.completion_done or not self.job_closed)


class Meaning(NamedTuple):
    """What some neighbouring digits say."""

    positions: str
    digits: str
    text: str


def render(ledger: int) -> str:
    """Write a ledger as 15 digits; raises `InvalidMessage` for any other number."""
    if not 0 <= ledger <= MOST:
        raise _not_a_ledger(str(ledger))
    return f"{ledger:0{DIGITS}d}"


def parse(text: str) -> int:
    """Read 15 digits as a ledger; raises `InvalidMessage` for anything else, and where a marker is neither 0 nor 1."""
    if len(text) != DIGITS or not (text.isascii() and text.isdecimal()):
        raise _not_a_ledger(text)
    ledger = int(text)
    if any(ledger // marker % 10 > 1 for marker in _MARKERS):
        raise _not_a_ledger(text)
    return ledger


def decode_activity(ledger: int) -> ActivityLedger:
    """Read the ledger of an activity."""
    return ActivityLedger(
        leg1_attempts=ledger // LEG1_ATTEMPT,
        leg1_complete=is_set(ledger, LEG1_COMPLETE),
        work_done=is_set(ledger, WORK_DONE),
        children_spawned=is_set(ledger, CHILDREN_SPAWNED),
        completion_done=is_set(ledger, COMPLETION_DONE),
        leg2_entries=ledger % ENTRIES,
    )


def decode_guid(ledger: int) -> GuidLedger:
    """Read the ledger of a leg-2 message."""
    return GuidLedger(
        job_closed=is_set(ledger, JOB_CLOSED),
        work_done=is_set(ledger, WORK_DONE),
        children_spawned=is_set(ledger, CHILDREN_SPAWNED),
        completion_done=is_set(ledger, COMPLETION_DONE),
        ordinal=ledger % ENTRIES,
    )


def is_set(ledger: int, marker: int) -> bool:
    """Return whether the digit of weight `marker` is 1."""
    return ledger // marker % 10 == 1


def explain(text: str) -> list[Meaning]:
    """Say what the digits of a ledger mean, from left to right; raises `InvalidMessage` where `text` is not a ledger.

    The first three show whose it is: an activity counts its attempts there, a message has zeros. All zeros are an
    activity that has not been attempted yet.
    """
    steps: ActivityLedger | GuidLedger
    if kind_of(text) == "activity":
        steps = activity = decode_activity(int(text))
        sent = "its request, if it sends one, is in the outbox" if activity.leg1_complete else "nothing is sent"
        attempts = f"leg 1 was attempted {_times(activity.leg1_attempts)} (at most 999)"
        fourth = f"leg 1 is {_complete(activity.leg1_complete)}: {sent}"
        completion = _complete(activity.completion_done)
        if not activity.completion_done:
            completion += " here: it is for the activity that closes the job"
        entries = f"leg 2 was entered {_times(activity.leg2_entries)} (at most 99999999)"
    else:
        steps = guid = decode_guid(int(text))
        attempts = "nothing: this is the ledger of a leg-2 message"
        fourth = "this message closed the job" if guid.job_closed else "this message did not close the job"
        completion = _complete(guid.completion_done) if guid.job_closed else "not for this message"
        entries = f"this message was entry {guid.ordinal} of its activity, so its dimension is {guid.dimension}"
    return [
        Meaning("1-3", text[:3], attempts),
        Meaning("4", text[3], fourth),
        Meaning("5", text[4], f"step 1, the work, is {_complete(steps.work_done)}"),
        Meaning("6", text[5], f"step 2, the children, is {_complete(steps.children_spawned)}"),
        Meaning("7", text[6], f"step 3, the job's completion tasks, is {completion}"),
        Meaning("8-15", text[7:], entries),
    ]


def kind_of(text: str) -> Literal["activity", "message"]:
    """Say whose the 15 digits are; raises `InvalidMessage` where no ledger can have them, as a step before the work."""
    ledger = parse(text)
    activity, guid = decode_activity(ledger), decode_guid(ledger)
    is_activity = ledger == 0 or ledger >= LEG1_ATTEMPT
    entered = activity.leg2_entries or activity.work_done
    contradictions = (  # the tables' own rules: of an activity, of a message, of both
        (is_activity and not activity.leg1_complete and entered, "leg 2 was entered, but leg 1 is not complete"),
        (
            not is_activity and not guid.ordinal,
            "the ledger of a message has the number of an entry into leg 2, at least 1",
        ),
        (
            not is_activity and guid.job_closed and not guid.children_spawned,
            "step 2 closes the job, but it is not done",
        ),
        (
            not is_activity and guid.completion_done and not guid.job_closed,
            "the completion tasks are done, but this message did not close the job",
        ),
        (guid.children_spawned and not guid.work_done, "the children are spawned, but the work is not done"),
        (
            guid.completion_done and not guid.children_spawned,
            "the completion tasks are done, but the children are not spawned",
        ),
    )
    for holds, problem in contradictions:
        if holds:
            detail = f"{text} is not a ledger: {problem}; copy one of `postroom jobs show`"
            raise InvalidMessage.of("invalid_ledger", detail, field="ledger")
    return "activity" if is_activity else "message"


def _complete(marker: bool) -> str:  # noqa: FBT001 - a digit
    return "complete" if marker else "not complete"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _not_a_ledger(text: str) -> InvalidMessage:
    detail = f"{text!r} is not a ledger: write 15 digits, of which those at positions 4 to 7 are 0 or 1"
    return InvalidMessage.of("invalid_ledger", detail, field="ledger")
