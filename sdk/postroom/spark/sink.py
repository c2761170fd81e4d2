"""The writers of the format `postroom`: checked on the driver, run on the executors, summed up on the driver.

What makes a second run of a task harmless is the id of each row (`postroom.spark.rows`) and the row under it in the
daemon's outbox. So nothing has to be undone when a write fails: it is run again.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from postroom._wire.ids import new_id, ulid_number
from postroom._wire.spark import SparkTask
from postroom.errors import InvalidMessage, PostroomError
from postroom.spark.jobs import Counts, JobOfWrite
from postroom.spark.options import FAIL, WritePlan, plan_write, stream_tag
from postroom.spark.posts import Tally, failure, post, prepare_directory, write_problems

if TYPE_CHECKING:
    import pyarrow as pa


_BATCH_ID: Final = "streaming.sql.batchId"  # where Spark tells a task which micro-batch it is of


@dataclasses.dataclass
class TaskDone(WriterCommitMessage):
    """What a task tells the driver."""

    tally: Tally


class BatchSink(DataSourceArrowWriter):
    """A batch write, and the job that it is, if it is one."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan
        self._ulid = new_id()
        self._job = None if plan.job is None else JobOfWrite(plan, plan.job)

    def begin(self) -> None:
        """Begin the job, on the driver, before a row is sent; raises the `PostroomError` that forbids it."""
        if self._job is not None:
            self._job.begin()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Send the rows of one task, on an executor; raises the `PostroomError` that stops it."""
        partition = _partition()
        task = SparkTask("write", ulid_number(self._ulid), partition)
        if self._job is not None:
            task = SparkTask("job", self._job.id.int, partition)
        return TaskDone(post(self._plan, iterator, task))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what became of all rows, on the driver, and close the job; raises where some were not sent."""
        tallies = _tallies(messages)
        try:
            _conclude(self._plan, tallies, f"write-{self._ulid}")
        except PostroomError as error:
            self._note_failure(str(error))
            raise
        if self._job is not None:
            self._job.close([Counts(tally.accepted, tally.duplicate, len(tally.problems)) for tally in tallies])
            _say(f"the job {self._job.id} is completed")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Say what a write that failed leaves behind; of a commit that failed, its own error has told the job."""
        _say_aborted(self._plan)
        if len(_tallies(messages)) < len(messages):
            self._note_failure("tasks of the write failed: the log of its driver says why; run it again under this job")

    def _note_failure(self, error: str) -> None:
        if self._job is None:
            return
        try:
            self._job.note_failure(error)
        except PostroomError as problem:  # what fails the write is the other one
            _say(f"the failure could not be recorded in the job {self._job.id}: {problem}")


class StreamSink(DataSourceStreamArrowWriter):
    """A streaming write: the same for each micro-batch. `tag` is its own among streams, also after a restart."""

    def __init__(self, plan: WritePlan, tag: str) -> None:
        self._plan = plan
        self._tag = tag

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Send the rows of one task of a micro-batch, on an executor."""
        context = TaskContext.get()
        batch = "0" if context is None else context.getLocalProperty(_BATCH_ID) or "0"
        task = SparkTask("stream", int(self._tag, 16) << 64 | int(batch), _partition())
        return TaskDone(post(self._plan, iterator, task))

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Say what became of the rows of a micro-batch; raises where some were not sent, and the query ends."""
        _conclude(self._plan, _tallies(messages), f"stream-{self._tag}-batch-{batchId}")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - the same
        """Say what a micro-batch that failed leaves behind."""
        _say_aborted(self._plan)


def batch_sink(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchSink:
    """Check a batch write, and begin its job; raises the `PostroomError` that forbids it before anything is sent."""
    sink = BatchSink(_checked(options, schema, overwrite=overwrite))
    sink.begin()
    return sink


def stream_sink(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamSink:
    """Check a streaming write; raises `InvalidMessage` before anything is sent."""
    plan = _checked(options, schema, overwrite=overwrite)
    if plan.job is not None:
        detail = "a stream has no last partition, so it cannot be a job: omit the option `job`, or write a batch"
        raise InvalidMessage.of("invalid_option", detail, field="job")
    return StreamSink(plan, stream_tag(plan, options))


def _checked(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WritePlan:
    if overwrite:
        detail = 'what was sent stays sent: use mode("append"), or outputMode("append") for a stream'
        raise InvalidMessage.of("invalid_option", detail, field="mode")
    plan = plan_write(options, schema)
    for option, directory in (("on_conflict", plan.on_conflict), ("on_refused", plan.on_refused)):
        if directory != FAIL:
            prepare_directory(option, directory)
    return plan


def _conclude(plan: WritePlan, tallies: Sequence[Tally], name: str) -> None:
    """Print the counts, write the conflicts and the refused rows where they are wanted, and raise for what remains."""
    tally = Tally(
        sum(tally.accepted for tally in tallies),
        sum(tally.duplicate for tally in tallies),
        [problem for tally in tallies for problem in tally.problems],
    )
    conflicts = [problem for problem in tally.problems if problem.conflict]
    refused = [problem for problem in tally.problems if not problem.conflict]
    _say(
        f"{name} to {plan.target}: {tally.accepted} accepted, {tally.duplicate} duplicate, {len(conflicts)} conflict"
        + (f", {len(refused)} refused" if refused else "")
    )
    if conflicts and plan.on_conflict != FAIL:
        _say(f"the keys of the conflicts are in {write_problems(plan, plan.on_conflict, name, conflicts)}")
        conflicts = []
    if refused and plan.on_refused != FAIL:
        _say(f"the refused rows are in {write_problems(plan, plan.on_refused, f'{name}-refused', refused)}")
        refused = []
    if remaining := refused + conflicts:
        raise failure(plan, remaining)


def _say_aborted(plan: WritePlan) -> None:
    _say(f"the write to {plan.target} failed; what it has sent stays sent, and a second run sends what is missing")


def _partition() -> int:
    """Return the partition of the task that runs here."""
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def _tallies(messages: Sequence[WriterCommitMessage | None]) -> list[Tally]:
    """Return what the tasks that were done tell, in the order of their partitions."""
    return [message.tally for message in messages if isinstance(message, TaskDone)]


def _say(sentence: str) -> None:
    print(f"postroom: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - Spark shows it on the driver's stderr
