"""What a message shows of the Spark task that wrote it: its id names the row, its traceparent the partition.

The traceparent is one of W3C Trace Context, where the trace is the write and the span is the partition. It is not part
of a message's fingerprint, so a row that another task sends again is the same message; it names the task that sent the
row first.
"""

import re
from typing import Final, Literal, NamedTuple, Self
from uuid import UUID, uuid5

from postroom._wire.ids import ulid_of

SPARK_ID: Final = re.compile(r"([0-9a-f]{16}):(.+)")  # of a row: the hash of its namespace, and its key
_TRACEPARENT: Final = re.compile(r"00-([0-9a-f]{32})-7370([123])([0-9a-f]{11})-00")  # `sp`, the kind, the partition
_KINDS: Final = ("job", "write", "stream")


def partition_id(write: UUID, number: int) -> UUID:
    """Return the activity of a partition of a write that is a job."""
    return uuid5(write, str(number))


class SparkTask(NamedTuple):
    """The task of one partition; the number (128 bits) of what it wrote for follows from the `kind`.

    It is the UUID of a job, the ULID of a write that is no job, or the tag of a stream and its micro-batch.
    """

    kind: Literal["job", "write", "stream"]
    number: int
    partition: int

    @classmethod
    def read(cls, traceparent: str | None) -> Self | None:
        """Return the task that a traceparent names; None where it names something else."""
        found = _TRACEPARENT.fullmatch(traceparent or "")
        if found is None:
            return None
        return cls(_KINDS[int(found[2]) - 1], int(found[1], 16), int(found[3], 16))

    @property
    def traceparent(self) -> str:
        """The traceparent that names it."""
        return f"00-{self.number:032x}-7370{_KINDS.index(self.kind) + 1}{self.partition:011x}-00"

    @property
    def job(self) -> UUID | None:
        """The job of the ledger that the write is, if it is one."""
        return UUID(int=self.number) if self.kind == "job" else None

    @property
    def write(self) -> str:
        """The name that the driver gives the write."""
        if self.kind == "job":
            return f"the job {self.job}"
        if self.kind == "write":
            return f"write-{ulid_of(self.number)}"
        return f"stream-{self.number >> 64:016x}-batch-{self.number & (1 << 64) - 1}"
