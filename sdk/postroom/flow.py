"""Flows: jobs whose steps happen exactly once, whatever crashes and however often a message is delivered.

    from postroom.flow import Flow

    flow = Flow("nightly-export")

    @flow.activity(sends="queue:extract", timeout=60, asks=3)
    async def extract(ctx, request):                # leg 1: the result is sent to the queue
        return {"day": request["day"]}

    @extract.answered
    async def _(ctx, answer):                       # leg 2: the result is spawned
        return [load.spawn(part) for part in answer["parts"]]

    @flow.activity                                  # sends nothing: works, and answers itself
    async def load(ctx, part):
        connection = await ctx.connection()
        await connection.execute(LOADED, part)

    @flow.completed
    async def report(ctx, job):                     # once per job, at the end
        ...

A worker whose config has `flows = ["export:flow"]` runs it, and `postroom jobs start` begins a job of it: a tree
whose root is the flow's first activity, and which ends when nothing is open (docs/contract/jobs.md#jobs-28). What a
handler writes on `ctx.connection()` is committed with the digit that proves the step, or not at all, so it happens
exactly once; any other effect may happen again if a worker dies: pass it `ctx.idempotency_key`.

An agent that handles the request answers by emitting any event: the event names its cause. Any other program answers
with an event whose `causation_id` is the request's message id (`postroom.emit`, or `meta.causation_id` of a send), or
whose body has that id as `answers`. The first answer to a request counts; later ones are ignored.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias, overload
from uuid import UUID

import msgspec

from postroom._wire.message import parse_destination
from postroom._wire.names import SNAKE, WORD
from postroom._wire.words import shape_fault
from postroom.errors import InvalidMessage, PostroomError
from postroom.retry_policy import RetryPolicy

__all__ = [
    "SPARK_WRITE",
    "Activity",
    "Again",
    "Context",
    "Flow",
    "Handler",
    "InvalidFlow",
    "Job",
    "Spawn",
    "Step",
    "check_flow",
    "next_steps",
]

_ADVICE: Final = "return None, an activity.spawn(…), an activity.again(…), or a list of them"
_MOST_TIMEOUT: Final = 7 * 86_400  # seconds: as long as an outbox keeps what it published
_MOST_ASKS: Final = 1000
SPARK_WRITE: Final = "spark-write"  # the flow of the jobs that Spark's drivers close themselves (docs/spark.md)
_MOST_THRESHOLD: Final = 2**31 - 1
_MOST_FLOW_NAME: Final = 58  # characters: it is a part of its consumer's name

Handler: TypeAlias = Callable[..., Awaitable[Any]]  # of a Context and one JSON value, or a Job


class InvalidFlow(PostroomError):
    """A flow cannot be run as it is written: the error says what its author has to change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a handler knows of its call: the step, its activity, and how often it was tried."""

    mesh: str
    flow: str
    job: UUID
    activity: UUID
    name: str  # of the activity
    message: str | None = None  # id of the answer that leg 2 runs for; None in leg 1
    request_id: str | None = None  # message id of the request: what an answer names; None where nothing is sent
    dimension: int = 0  # grows with each cycle, from 0; leg 1 of a cycle has that of the message that asked for it
    attempt: int = 1  # of this step, from 1
    last_error: str | None = None  # why the attempt before failed
    traceparent: str | None = None  # of what began the activity (leg 1), or of the answer (leg 2), where one was given
    idempotency_key: str  # the same for every attempt of this step, and for no other: for effects outside of Postgres
    _connect: Callable[[], Awaitable[Any]] = field(repr=False)

    async def connection(self) -> Any:
        """Return the `asyncpg` connection of this step, in a transaction that begins now.

        It is committed together with the digit that marks the step as done: what is written on it happens exactly once.
        A handler that raises, or whose worker died or lost its lease, has written nothing. Do not end the transaction,
        and call this late in a handler that takes long: Postgres keeps its locks until the end. Raises `InvalidFlow`
        in a task that a handler left running after its step.
        """
        return await self._connect()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a completion handler reports on."""

    id: UUID
    flow: str
    mesh: str
    request: Any  # JSON that it was started with
    started_at: datetime


class Spawn(NamedTuple):
    """A child that leg 2 returned: an activity, and the JSON that it begins with."""

    activity: Activity
    request: Any


class Again(NamedTuple):
    """A cycle that leg 2 returned: its activity is entered once more, with this JSON."""

    activity: Activity
    request: Any


Step: TypeAlias = Spawn | Again


class Activity:
    """One activity of a flow; `Flow.activity` creates it.

    With `sends`, its function is leg 1 and `answered` adds leg 2. Without, its function is the work itself: leg 2.
    """

    def __init__(
        self,
        name: str,
        function: Handler,
        *,
        sends: str | None = None,
        answer: str | None = None,
        timeout: float | None = None,
        asks: int = 1,
        retry_policy: RetryPolicy | None = None,
    ) -> None:
        """Check everything; raises `InvalidFlow`."""
        _check_name("the activity", name)
        _check_handler(function, f"the activity {name!r}", "ctx, request")
        _check_asking(name, sends, answer, timeout, asks)
        _check_policy(f"the activity {name!r}", retry_policy)
        self.name = name
        self.queue = None if sends is None else sends.removeprefix("queue:")
        self.answer = answer  # the event that answers; None: any that the request caused
        self.timeout = timeout  # seconds
        self.asks = asks
        self.retry_policy = retry_policy
        self._function = function
        self._answered: Handler | None = None

    def __repr__(self) -> str:
        """Name it, for errors about an activity where another value is expected."""
        return f"Activity({self.name!r})"

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `InvalidFlow`: the decorated function cannot be called directly."""
        advice = "to run it as a step of its own, or move shared code into a plain function"
        raise _invalid(f"the activity {self.name!r} was called directly: return {self.name}.spawn(request) {advice}")

    def answered(self, function: Handler) -> Handler:
        """Register leg 2, `async def _(ctx, answer)`, which returns what to spawn; raises `InvalidFlow`."""
        if self.queue is None:
            raise _invalid(f"the activity {self.name!r} sends nothing, so that it gets no answer: give it sends=…")
        if self._answered is not None:
            raise _invalid(f"the activity {self.name!r} has two handlers for its answer: remove one")
        _check_handler(function, f"the answer of {self.name!r}", "ctx, answer")
        self._answered = function
        return function

    def spawn(self, request: Any = None) -> Spawn:
        """Return a child for leg 2 to return: this activity, beginning with `request` (JSON)."""
        return Spawn(self, request)

    def again(self, request: Any = None) -> Again:
        """Return a cycle for this activity's own leg 2 to return: it is entered once more, with `request` (JSON).

        One that sends does so again: leg 1 computes another request, and leg 2 runs with its answer. One that sends
        nothing works again. `ctx.dimension` is 0 in the first cycle and greater in each later one, but each repeated
        delivery skips a number: to count cycles, put the number into `request`.
        """
        return Again(self, request)

    @property
    def leg1(self) -> Handler | None:
        """The function that computes the request; None where nothing is sent."""
        return None if self.queue is None else self._function

    @property
    def leg2(self) -> Handler | None:
        """The function that does the work; None while an answer has no handler."""
        return self._function if self.queue is None else self._answered


class Flow:
    """A flow; its first activity is where each job begins."""

    def __init__(self, name: str, *, threshold: int = 0) -> None:
        """Name the flow, for jobs, their events and their consumers; raises `InvalidFlow`.

        The answer that leaves no more than `threshold` others open, and spawns nothing itself, closes a job; later
        answers are acknowledged, and nothing is done for them. With 2 and three children, the first of their answers is
        enough. A job keeps the threshold that it was started with.
        """
        _check_name("the flow", name)
        if not (_is(threshold, int) and 0 <= threshold <= _MOST_THRESHOLD):
            raise _invalid(f"the flow {name!r} has the threshold {threshold!r}: use a whole number, 0 or more")
        if len(name) > _MOST_FLOW_NAME:
            raise _invalid(f"the flow {name!r} has {len(name)} characters: at most {_MOST_FLOW_NAME}")
        if name == SPARK_WRITE:
            rule = "that name is reserved for writes of Spark, whose driver starts and finishes their jobs"
            raise _invalid(f"no worker runs a flow named {name!r}: {rule}; use another name")
        self.name = name
        self.threshold = threshold
        self.completion: Handler | None = None  # the function that runs once per job, at the end, if the flow has one
        self.completion_policy: RetryPolicy | None = None  # how often that is tried; None leaves it to the engine
        self._activities: dict[str, Activity] = {}

    @overload
    def activity(self, function: Handler, /) -> Activity: ...

    @overload
    def activity(
        self,
        /,
        *,
        name: str | None = None,
        sends: str | None = None,
        answer: str | None = None,
        timeout: float | None = None,
        asks: int = 1,
        retry_policy: RetryPolicy | None = None,
    ) -> Callable[[Handler], Activity]: ...

    def activity(
        self, function: Handler | None = None, /, *, name: str | None = None, **options: Any
    ) -> Activity | Callable[[Handler], Activity]:
        """Turn `async def f(ctx, request)` into an activity, as `@flow.activity` or `@flow.activity(…)`.

        `name` is the function's own unless it is given. `sends` is `queue:<name>`, to which leg 1's result goes as a
        command; `answer` accepts only events of that name as answers. Without an answer within `timeout` seconds,
        the request is sent again under its own id, so that an agent that has handled it does not handle it twice;
        after `asks` times in all, the activity has failed. `retry_policy` is how often a leg that raises is tried, and
        how long it waits; unset, it is tried 20 times, within about an hour. Then the activity has failed, and with it
        the job. An attempt whose worker was killed counts too. Raises `InvalidFlow`.
        """
        if function is not None:
            return self._add(function, name, options)
        return lambda decorated: self._add(decorated, name, options)

    @overload
    def completed(self, function: Handler, /) -> Handler: ...

    @overload
    def completed(self, /, *, retry_policy: RetryPolicy | None = None) -> Callable[[Handler], Handler]: ...

    def completed(
        self, function: Handler | None = None, /, *, retry_policy: RetryPolicy | None = None
    ) -> Handler | Callable[[Handler], Handler]:
        """Register the function that runs once per job, at the end: `@flow.completed`, with or without a policy.

        It is `async def report(ctx, job)`, and what it returns (JSON) is the `result` in the event `job_completed`.
        Where it raises, it is tried again by `retry_policy`, as an activity is by its own. Raises `InvalidFlow`.
        """
        if function is not None:
            return self._complete(function, retry_policy)
        return lambda decorated: self._complete(decorated, retry_policy)

    @property
    def activities(self) -> Mapping[str, Activity]:
        """The activities by name, in the order of their definition."""
        return MappingProxyType(self._activities)

    @property
    def first(self) -> Activity:
        """The activity that a job begins with; raises `InvalidFlow` for a flow without activities."""
        for activity in self._activities.values():
            return activity
        raise _invalid(f"the flow {self.name!r} has no activity: write one with @flow.activity")

    def _complete(self, function: Handler, retry_policy: RetryPolicy | None) -> Handler:
        if self.completion is not None:
            raise _invalid(f"the flow {self.name!r} has two completion handlers: remove one")
        _check_handler(function, f"the completion of {self.name!r}", "ctx, job")
        _check_policy(f"the completion of {self.name!r}", retry_policy)
        self.completion, self.completion_policy = function, retry_policy
        return function

    def _add(self, function: Handler, name: str | None, options: dict[str, Any]) -> Activity:
        own_name: str = getattr(function, "__name__", repr(function))
        activity = Activity(own_name if name is None else name, function, **options)
        if activity.name in self._activities:
            raise _invalid(f"the flow {self.name!r} has two activities {activity.name!r}: rename one")
        self._activities[activity.name] = activity
        return activity


def check_flow(flow: Any) -> None:
    """Raise `InvalidFlow` with what its author has to change; a worker checks each flow before it runs it."""
    if not isinstance(flow, Flow):
        raise _invalid(f"{flow!r} is not a flow: create one with postroom.flow.Flow, and name it")
    _ = flow.first
    for activity in flow.activities.values():
        if activity.leg2 is None:
            lacks = f"the activity {activity.name!r} sends to {activity.queue!r}, and has no handler for its answer"
            raise _invalid(f"{lacks}: write one with @{activity.name}.answered")


def next_steps(flow: Flow, activity: Activity, returned: Any) -> tuple[Step, ...]:
    """Return what a leg 2 of `activity` returned as a tuple; raises `InvalidFlow` where it is something else."""
    if returned is None:
        return ()
    if isinstance(returned, (Spawn, Again)):
        returned = (returned,)
    if isinstance(returned, (str, bytes, dict)) or not isinstance(returned, Iterable):
        raise _wrong_step(activity, returned)
    steps = tuple(returned)
    for step in steps:
        if not (isinstance(step, (Spawn, Again)) and isinstance(step.activity, Activity)):
            raise _wrong_step(activity, step)
        if flow.activities.get(step.activity.name) is not step.activity:
            detail = f"{activity.name!r} returned {step.activity.name!r}, which is not an activity of {flow.name!r}"
            raise _invalid(detail)
        if isinstance(step, Again) and step.activity is not activity:
            rule = f"an activity can only repeat itself; return {step.activity.name}.spawn(…)"
            raise _invalid(f"{activity.name!r} returned {step.activity.name}.again(…): {rule}")
    return steps


def _check_name(what: str, name: str) -> None:
    if not WORD.allows(name):
        raise _invalid(f"{what} cannot be called {name!r}: {WORD.words}")


def _check_asking(name: str, sends: str | None, answer: str | None, timeout: float | None, asks: int) -> None:
    if sends is None and (answer is not None or timeout is not None or asks != 1):
        raise _invalid(f"the activity {name!r} sends nothing: answer, timeout and asks need sends")
    if sends is not None:
        try:
            kind = parse_destination(str(sends)).kind
        except InvalidMessage as error:
            raise _invalid(f"the activity {name!r} sends to {sends!r}: {error}") from error
        if kind != "queue":
            raise _invalid(f"the activity {name!r} sends to {sends!r}: a request goes to queue:<name>")
    if answer is not None and not SNAKE.allows(answer):
        raise _invalid(f"the activity {name!r} has the answer {answer!r}, which is not an event's name: use snake_case")
    if timeout is not None and not (_is(timeout, int, float) and 0 < timeout <= _MOST_TIMEOUT):
        detail = f"the activity {name!r} has the timeout {timeout!r}: use seconds, more than 0 and at most 7 days"
        raise _invalid(detail)
    if not (_is(asks, int) and 1 <= asks <= _MOST_ASKS):
        raise _invalid(f"the activity {name!r} asks {asks!r} times: from 1 to {_MOST_ASKS}")
    if asks > 1 and timeout is None:
        raise _invalid(f"the activity {name!r} asks {asks} times, and has no timeout after which: give it one")


def _check_policy(what: str, policy: Any) -> None:
    if policy is None:
        return
    if not isinstance(policy, RetryPolicy):
        raise _invalid(f"{what} has the retry policy {policy!r}: give one, as RetryPolicy(max_attempts=3)")
    try:
        msgspec.convert(msgspec.structs.asdict(policy), RetryPolicy)
    except msgspec.ValidationError as error:
        raise _invalid(f"{what} has an invalid retry policy: {shape_fault(error, RetryPolicy)[1]}") from error


def _is(value: Any, *kinds: type) -> bool:
    """Return whether a value is a number of one of these types; True and False are not."""
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check_handler(function: Any, what: str, arguments: str) -> None:
    if not inspect.iscoroutinefunction(function):
        form = f"`async def …({arguments})`, with return and without yield"
        raise _invalid(f"{what} is handled by {function!r}, which has another form: write {form}")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        named = getattr(function, "__qualname__", function)  # a `partial` has none
        raise _invalid(f"{what} is handled by {named}, which must accept ({arguments}): {error}") from None


def _wrong_step(activity: Activity, value: Any) -> InvalidFlow:
    shown = reprlib.repr(value)  # also where its own `__repr__` fails
    return _invalid(f"{activity.name!r} returned {shown:.80}, of type {type(value).__name__}: {_ADVICE}")


def _invalid(detail: str) -> InvalidFlow:
    return InvalidFlow.of("invalid_flow", detail)
