"""The writers of the format `postroom`: checked on the driver, run on the executors, summed up on the driver.

What makes a second run of a task harmless is the id of each row (`postroom.spark.rows`) and the row under it in the
daemon's outbox. So nothing has to be undone when a write fails: it is run again.

A task's rows go through the daemon of its host (`post`): when that returns, every row is on the daemon's disk
(`wait=accepted`: at the broker), or is among the problems. A daemon that restarts, that is full (507) or that has too
much in hand (429) is waited for; after `PATIENCE_SECONDS` without any progress the task fails with the daemon's error,
and Spark runs it again. What it sent before is then a duplicate. Where no daemon answers at all, a task fails after
`ABSENT_SECONDS`. The driver reports at the end which rows were not sent, and writes them to a file where the option is
set.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from postroom._wire.arguments import META_RULE
from postroom._wire.ids import new_id, ulid_number
from postroom._wire.message import SendRequest
from postroom._wire.sends import SETTLED, SendResult
from postroom._wire.spark import SparkTask
from postroom._wire.words import counted
from postroom.client import AsyncClient
from postroom.errors import Conflict, InvalidMessage, PostroomError, Problem, TryAgain, Unavailable
from postroom.spark.database import refuse
from postroom.spark.jobs import Counts, JobOfWrite
from postroom.spark.options import FAIL, WritePlan, plan_write, stream_tag
from postroom.spark.rows import Row, RowReader, key_text

if TYPE_CHECKING:
    import pyarrow as pa

PATIENCE_SECONDS: Final = 300.0
ABSENT_SECONDS: Final = 30.0  # longer than a daemon takes to start again
MOST_PROBLEMS: Final = 10_000  # rows of a task; more have a common cause, and would fill the driver's memory
_BATCHES_UNDER_WAY: Final = 8  # with `wait=accepted`: sent while the broker has not accepted the first of them
_REUSED: Final = "idempotency_key_reused"
_REMEDIES: Final = {  # of a client's call, and of a write
    META_RULE: "cast it to a string",
    "send bytes as body_base64": "cast the column to binary",
    "use a new id": (
        "if it was another row of this write, name more columns in `id`; if one of another write, set a `namespace`"
    ),
    "use the field `mentions`": "rename it",
}
_SHOWN: Final = 20  # rows in an error, which always has the whole count
_QUERY_ID: Final = "sql.streaming.queryId"  # Spark's properties of a task: the id that is kept in the checkpoint,
_BATCH_ID: Final = "streaming.sql.batchId"  # and the micro-batch


@dataclasses.dataclass
class TaskDone(WriterCommitMessage):
    """What a task reports to the driver; `stream` is the tag of its stream, if it is of one."""

    tally: Tally
    stream: str = ""


class BatchSink(DataSourceArrowWriter):
    """A batch write, and the job that it is, if it is one."""

    def __init__(self, plan: WritePlan) -> None:
        """Begin the job, on the driver; raises the `PostroomError` that forbids it."""
        self._plan = plan
        self._ulid = new_id()
        self._job = None if plan.job is None else JobOfWrite(plan, plan.job)
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
        """Report what became of all rows, on the driver, and close the job; raises where some were not sent."""
        tallies = _tallies(messages)
        try:
            _conclude(self._plan, tallies, f"write-{self._ulid}")
        except PostroomError as error:
            self._note_failure(str(error))
            raise
        if self._job is not None:
            self._job.close([tally.counts for tally in tallies])
            _say(f"the job {self._job.id} is completed")

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Report what a failed write leaves behind; a failed commit has recorded its own error in the job."""
        _say_aborted(self._plan)
        if len(_tallies(messages)) < len(messages):
            self._note_failure("tasks of the write failed: the log of its driver says why; run it again under this job")

    def _note_failure(self, error: str) -> None:
        if self._job is None:
            return
        try:
            self._job.note_failure(error)
        except PostroomError as problem:  # the write fails with the other error
            _say(f"the failure could not be recorded in the job {self._job.id}: {problem}")


class StreamSink(DataSourceStreamArrowWriter):
    """A streaming write: the same for each micro-batch."""

    def __init__(self, plan: WritePlan) -> None:
        self._plan = plan

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskDone:
        """Send the rows of one task of a micro-batch, on an executor."""
        context = TaskContext.get()
        query, batch = (context and context.getLocalProperty(name) for name in (_QUERY_ID, _BATCH_ID))
        tag = stream_tag(self._plan, query or "")
        task = SparkTask("stream", int(tag, 16) << 64 | int(batch or 0), _partition())
        return TaskDone(post(self._plan, iterator, task), tag)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's
        """Report what became of the rows of a micro-batch; raises where some were not sent, which ends the query."""
        # refuse the trigger `continuous`, for which Spark drops the rows: it never calls `write` of a Python sink
        if None in messages:
            advice = "use the trigger processingTime or availableNow, not continuous"
            refuse("trigger", f"Spark has not passed the rows on: {advice}")
        tag = next((message.stream for message in messages if isinstance(message, TaskDone)), "")  # they have the same
        _conclude(self._plan, _tallies(messages), f"stream-{tag}-batch-{batchId}")

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803 - the same
        """Report what a failed micro-batch leaves behind."""
        _say_aborted(self._plan)


def batch_sink(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> BatchSink:
    """Check a batch write, and begin its job; raises the `PostroomError` that forbids it before anything is sent."""
    return BatchSink(_checked(options, schema, overwrite=overwrite))


def stream_sink(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> StreamSink:
    """Check a streaming write; raises `InvalidMessage` before anything is sent."""
    plan = _checked(options, schema, overwrite=overwrite)
    if plan.job is not None:
        refuse("job", "a stream has no last partition, so it cannot be a job: omit the option `job`, or write a batch")
    return StreamSink(plan)


def _checked(options: Mapping[str, str], schema: StructType, *, overwrite: bool) -> WritePlan:
    if overwrite:
        refuse("mode", 'what was sent stays sent: use mode("append"), or outputMode("append") for a stream')
    plan = plan_write(options, schema)
    for option, directory in (("on_conflict", plan.options.on_conflict), ("on_refused", plan.options.on_refused)):
        if directory != FAIL:
            try:
                system, path = _resolve(directory)
                system.create_dir(path, recursive=True)
            except (OSError, ValueError) as error:
                refuse(option, f"cannot use {directory!r} of the option `{option}`: {error}")
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
    if conflicts and plan.options.on_conflict != FAIL:
        _say(f"the keys of the conflicts are in {write_problems(plan, plan.options.on_conflict, name, conflicts)}")
        conflicts = []
    if refused and plan.options.on_refused != FAIL:
        _say(f"the refused rows are in {write_problems(plan, plan.options.on_refused, f'{name}-refused', refused)}")
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
    """Return the tallies of the tasks that finished, in the order of their partitions."""
    return [message.tally for message in messages if isinstance(message, TaskDone)]


def _say(sentence: str) -> None:
    print(f"postroom: {sentence}", file=sys.stderr, flush=True)  # noqa: T201 - Spark shows it on the driver's stderr


@dataclasses.dataclass(frozen=True)
class RowProblem:
    """A row that was not sent: its key, its id, and why. A `conflict` is an id that was used with other content."""

    key: tuple[str, ...]
    client_message_id: str
    conflict: bool
    code: str
    detail: str
    since: str | None = None
    destination: str | None = None


@dataclasses.dataclass
class Tally:
    """What became of a task's rows."""

    accepted: int = 0
    duplicate: int = 0
    problems: list[RowProblem] = dataclasses.field(default_factory=list)

    @property
    def counts(self) -> Counts:
        """How many rows became what."""
        conflicts = sum(problem.conflict for problem in self.problems)
        return Counts(self.accepted, self.duplicate, conflicts, len(self.problems) - conflicts)


def post(plan: WritePlan, batches: Iterator[pa.RecordBatch], task: SparkTask) -> Tally:
    """Send the rows of `batches`, as those of a `task`.

    Raises the `PostroomError` that stops all of them, such as `InvalidMessage`, or one for a missing daemon. For a
    thread without an event loop.
    """
    return asyncio.run(_post(plan, batches, task.traceparent))


async def _post(plan: WritePlan, batches: Iterator[pa.RecordBatch], traceparent: str) -> Tally:
    async with AsyncClient(plan.options.socket, patience=ABSENT_SECONDS) as client:
        version = await client.version()  # with less patience: a host without a daemon fails soon
    # refuse to send the rows of a job of one mesh into another
    if plan.job is not None and plan.job.mesh != version.mesh:
        detail = f"the daemon of this host serves the mesh {version.mesh!r}, but the job is in {plan.job.mesh!r}"
        refuse("mesh", f"{detail}: set the option `mesh` to {version.mesh}")
    task = _Task(plan, traceparent)
    reader = RowReader(plan, None if plan.options.on_refused == FAIL else task.refuse)
    async with (
        AsyncClient(plan.options.socket, patience=PATIENCE_SECONDS) as client,
        aclosing(_slices(reader, batches)) as slices,
    ):
        if plan.options.wait == "queued":
            await task.send(client, slices)
        else:
            await task.send_and_await_broker(client, slices)
    return task.tally


async def _slices(reader: RowReader, batches: Iterator[pa.RecordBatch]) -> AsyncGenerator[list[Row], None]:
    """Read Spark's batches in a thread, since that may block for long, and slice them."""
    while (batch := await asyncio.to_thread(next, batches, None)) is not None:
        for rows in reader.slices(batch):
            yield rows


class _Task:
    """The rows that are on their way, and the tally of the others."""

    def __init__(self, plan: WritePlan, traceparent: str) -> None:
        self.tally = Tally()
        self._plan = plan
        self._traceparent = traceparent
        self._on_the_way: dict[int, Row] = {}  # by line
        self._not_accepted: deque[tuple[Row, SendResult]] = deque()  # by the broker, with `wait=accepted`
        self._room = asyncio.Semaphore(_BATCHES_UNDER_WAY * plan.options.batch_size)  # rows that may be under way to it
        self._changed = asyncio.Event()  # there is more to wait for, or all is sent
        self._sent = False

    async def send_and_await_broker(self, client: AsyncClient, slices: AsyncIterator[list[Row]]) -> None:
        """Do as `send` does, and return when the broker has every row that was queued.

        Raises `TryAgain` where that takes too long.
        """

        async def send() -> None:
            await self.send(client, slices)
            self._sent = True
            self._changed.set()

        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(send())
                tasks.create_task(self._await_broker(client))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def send(self, client: AsyncClient, slices: AsyncIterator[list[Row]]) -> None:
        """Stream the rows through the batch route, and settle each as its answer comes."""
        async with aclosing(
            client.send_many_in_chunks(self._requests(slices), traceparent=self._traceparent)
        ) as chunks:
            async for results in chunks:
                for result in results:
                    row = self._on_the_way.pop(result.line)
                    if result.result is not None:
                        self._count(result.result, 1)
                        if self._plan.options.wait == "accepted" and result.result.status != "done":
                            self._not_accepted.append((row, result.result))
                            self._changed.set()
                        else:
                            self._room.release()
                    elif (problem := result.problem) is not None:
                        self._room.release()
                        # an id with other content, or a row that was refused, or retired before; one that died when an
                        # earlier attempt or run sent it is told as it was then
                        died = problem.reason
                        code = problem.code if died is None else died.partition(":")[0]
                        is_other = died is not None or (problem.conflict or "").endswith("mismatch")
                        self._problem(
                            RowProblem(
                                row.key,
                                row.request.client_message_id or "",
                                code == _REUSED and is_other,
                                code,
                                died or in_words_of_a_write(problem),
                                since=problem.since,
                                destination=problem.destination,
                            )
                        )

    async def _requests(self, slices: AsyncIterator[list[Row]]) -> AsyncIterator[SendRequest]:
        line = 0
        async for rows in slices:
            for row in rows:
                if self._plan.options.wait == "accepted":
                    await self._room.acquire()
                line += 1
                self._on_the_way[line] = row
                yield row.request

    def _count(self, result: SendResult, number: int) -> None:
        if result.duplicate:
            self.tally.duplicate += number
        else:
            self.tally.accepted += number

    def refuse(self, key: tuple[str, ...], error: InvalidMessage) -> None:
        """Count a row that no message can be made of."""
        self._problem(RowProblem(key, "", conflict=False, code=error.code, detail=str(error)))

    def _problem(self, problem: RowProblem) -> None:
        self.tally.problems.append(problem)
        if len(self.tally.problems) > MOST_PROBLEMS:
            first = self.tally.problems[0]
            said = f"{key_text(self._plan, first.key)}: {first.detail}"
            if first.conflict:
                said += f". Does another write use the namespace {self._plan.namespace!r}?"
            detail = f"more than {MOST_PROBLEMS} rows of this task were not sent; the first is {said}"
            raise InvalidMessage.of("too_many_problems", detail)

    async def _await_broker(self, client: AsyncClient) -> None:
        """Wait until the broker has the rows that were queued, a batch at a time."""
        while not self._sent or self._not_accepted:
            await self._changed.wait()
            self._changed.clear()
            while self._not_accepted:
                size = min(self._plan.options.batch_size, len(self._not_accepted))
                queued = [self._not_accepted.popleft() for _ in range(size)]
                ids = [result.client_message_id for _, result in queued]
                for (row, result), sent in zip(queued, await client.wait_many(ids, PATIENCE_SECONDS), strict=True):
                    if sent.status not in SETTLED:
                        raise TryAgain.of(
                            "not_accepted",
                            f"the broker has not accepted the row {key_text(self._plan, row.key)} within "
                            f"{PATIENCE_SECONDS:.0f} s; it is kept, and will be sent when possible "
                            f"({sent.last_error or 'no attempt has failed'})",
                            retryable=True,
                        )
                    if sent.status != "done":
                        reason = sent.last_error or "an operator has retired the message"
                        code = reason.partition(":")[0] if sent.last_error else "aborted"
                        self._count(result, -1)
                        self._problem(RowProblem(row.key, result.client_message_id, code == _REUSED, code, reason))
                    self._room.release()


def in_words_of_a_write(problem: Problem) -> str:
    """Return why a row was refused, with what to do in a write, where the daemon or the client says it of a call."""
    said = problem.detail
    for remedy, ours in _REMEDIES.items():
        said = said.replace(remedy, ours)
    return said


def failure(plan: WritePlan, problems: Sequence[RowProblem]) -> PostroomError:
    """Return the error that ends a write, with the keys of the rows that were not sent."""
    shown = "; ".join(f"{key_text(plan, problem.key)}: {problem.detail}" for problem in problems[:_SHOWN])
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    rows = counted(len(problems), "row")
    if all(problem.conflict for problem in problems):
        sentence = f"the id of {rows} was used before with other content: {shown}{more}"
        return Conflict.of("idempotency_key_reused", f"{sentence}. Every other row was sent")
    return InvalidMessage.of("rows_refused", f"{rows} not sent: {shown}{more}. Every other row was")


def write_problems(plan: WritePlan, directory: str, name: str, problems: Sequence[RowProblem]) -> str:
    """Write `<directory>/<name>.jsonl`, one object per row; return its path. A second write replaces it.

    Raises `Unavailable` where that fails.
    """
    system, path = _resolve(directory)
    lines = [
        msgspec.json.encode(
            {
                "key": dict(zip(plan.ids, problem.key, strict=True)) if problem.key else None,
                "client_message_id": problem.client_message_id,
                "code": problem.code,
                "detail": problem.detail,
                "since": problem.since,
                "destination": problem.destination,
            }
        )
        + b"\n"
        for problem in problems
    ]
    report = f"{directory.rstrip('/')}/{name}.jsonl"
    try:
        with system.open_output_stream(f"{path}/{name}.jsonl") as file:
            file.write(b"".join(lines))
    except OSError as error:
        detail = (
            f"{counted(len(problems), 'row')} not sent, and {report} cannot be written: {error}. "
            "Run the write again, which finds the same rows"
        )
        raise Unavailable.of("report_not_written", detail, retryable=True) from error
    return report


def _resolve(directory: str) -> tuple[Any, str]:
    """Return the file system of a path or a URI (`s3://bucket/…`, `file:/…`), and the path in it."""
    from pyarrow import fs  # noqa: PLC0415 - slow, and only where a file is written

    if ":/" in directory:
        system, path = fs.FileSystem.from_uri(directory)
        return system, path
    return fs.LocalFileSystem(), str(Path(directory).absolute())
