"""Agents: classes that handle messages, keep a state, and answer with messages of their own.

    from postroom.agent import Agent, Emit, Envelope

    class Pricing(Agent):
        subjects = ("cmd.{tenant}.{workspace}.pricing.>",)

        async def receive(self, envelope: Envelope) -> Emit:
            return Emit("order_priced", {"order": envelope.payload["order"], "total": 42})

`postroom agent run shop:Pricing` runs it (docs/contract/delivery.md#delivery-55). What `receive` returns is stored
together with the message that caused it, in one transaction, and published afterwards: each once, whatever crashes. A
message whose `receive` raised is delivered again, and dead-lettered in the end; one that was stored is never received
again.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Generic, TypeAlias

import msgspec

from postroom._wire.arguments import plain_scalar
from postroom._wire.names import SUBJECT, SUBJECTS, WORD
from postroom._wire.words import shape_fault
from postroom.errors import InvalidMessage, PostroomError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # its `default` is what spares a stateless agent the brackets

    _S = TypeVar("_S", default=None)
else:
    from typing import TypeVar

    _S = TypeVar("_S")

__all__ = [
    "EPOCH",
    "Agent",
    "Command",
    "Effect",
    "Effects",
    "Emit",
    "Envelope",
    "InvalidAgent",
    "agent_name",
    "check_agent",
    "effects_of",
    "fill_event_subject",
    "fill_subjects",
]

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_Version: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=10**15)]  # what a receiver accepts in a header
_Word: TypeAlias = Annotated[str, msgspec.Meta(pattern=WORD.schema)]
_ADVICE: Final = "return None, an Emit, a Command, or a list of them"


class InvalidAgent(PostroomError):
    """An agent's class cannot be run: the error says what its author has to change."""


class Envelope(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """One message as an agent sees it, and as its store keeps it (docs/contract/delivery.md#delivery-59).

    The fields are in the order of their names, so that encoding one gives the canonical order of RFC 8785.
    """

    actor: str = ""  # who caused it: a member, or an agent
    causation_id: str | None = None  # id of the message that caused it
    correlation_id: str | None = None  # id of the first message of the chain
    entity_id: str | None = None  # the thing it is about; `expected_version` is a version of it
    expected_version: int | None = None  # the version that the sender knew; another one is a conflict
    id: str = ""
    idempotency_key: str = ""  # what two copies of one message have in common
    payload: Any = None  # JSON
    sampled: bool | msgspec.UnsetType = msgspec.UNSET  # False where its sender wants no spans of its trace
    schema_version: int = 1
    source: str = ""  # the program that sent it
    span_id: str = ""  # 16 hex digits: the hop that sent it
    tenant: str = ""
    trace_id: str = ""  # 32 hex digits
    ts: datetime = EPOCH
    type: str
    workspace: str = "default"


class Emit(msgspec.Struct, frozen=True):
    """An effect: an event of the agent's tenant, on `Agent.event_subject`: `{tenant}.event.{type}.v{version}`."""

    type: str  # snake_case: what happened
    payload: Any = None
    version: int = 1
    entity_id: str | None = None
    expected_version: _Version | None = None


class Command(msgspec.Struct, frozen=True):
    """An effect: work for exactly one worker, on `cmd.{tenant}.{workspace}.{agent}.{verb}`."""

    agent: _Word
    verb: str = "run"
    payload: Any = None
    workspace: _Word | None = None  # None: the agent's own
    entity_id: str | None = None
    expected_version: _Version | None = None


Effect: TypeAlias = Emit | Command
Effects: TypeAlias = Effect | Iterable[Effect] | None


class Agent(Generic[_S]):
    """The base of every agent: `Agent[State]` with a state, `Agent` without.

    `subjects` is what it handles; `{tenant}`, `{workspace}` and `{agent}` in it are filled in when it is run.
    `event_subject` is where its events go, with `{type}` and optionally `{version}`; a stream must have that subject.
    Its durable consumer is named after `name`; unset, it is the class's name in snake_case.
    """

    name: ClassVar[str] = ""
    subjects: ClassVar[tuple[str, ...]] = ()
    event_subject: ClassVar[str] = "{tenant}.event.{type}.v{version}"

    state: _S  # after the last message that was handled; only `apply` changes it
    attempt: int = 1  # of the message that `receive` was given: 1 for the first
    last_error: str | None = None  # why the attempt before failed; "ack_timeout" where its process ended during it
    tenant: str = ""  # where the agent runs
    workspace: str = "default"

    async def receive(self, envelope: Envelope) -> Effects:
        """Handle one message; return what to emit. It may run again where it raised or its process was killed."""
        raise NotImplementedError

    def initial_state(self) -> _S:
        """Return the state of an agent that has handled nothing."""
        return None  # type: ignore[return-value] # an agent without a state has None

    def apply(self, state: _S, event: Envelope) -> _S:
        """Return the state after `event`: each message that was handled, and after it each one that it emitted.

        It must be pure: a new state from nothing but its two arguments, neither of which it changes. A restart and
        `postroom agent replay` build the state by calling it for every event of the store.
        """
        del event
        return state


def agent_name(agent: type[Agent[Any]]) -> str:
    """Return the name of the agent: its `name`, or its class's name in snake_case."""
    return agent.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", agent.__name__).lower()


def check_agent(agent: Any) -> None:
    """Raise `InvalidAgent` with what the author of the class has to change."""
    if not (isinstance(agent, type) and issubclass(agent, Agent)):
        raise _invalid(f"{agent!r} is not an agent: derive a class from postroom.agent.Agent, and name that class")
    name = agent_name(agent)
    if not WORD.allows(name):
        raise _invalid(f"{agent.__name__}.name {name!r} must be {WORD.words}")
    _check_subjects(agent)
    fill_event_subject(agent, "tenant", "workspace", "something_happened", 1)
    _check_methods(agent)


def _check_subjects(agent: type[Agent[Any]]) -> None:
    subjects: Any = agent.subjects
    if not subjects:
        form = 'subjects = ("cmd.{tenant}.{workspace}.{agent}.>",)'
        raise _invalid(f"{agent.__name__} has no subjects: say what it handles, as in {form}")
    if not isinstance(subjects, (tuple, list)) or not all(isinstance(subject, str) for subject in subjects):
        raise _invalid(f"{agent.__name__}.subjects must be a tuple of strings, even if it is only one: (subject,)")
    for subject in fill_subjects(agent, "tenant", "workspace"):
        if not SUBJECTS.allows(subject):
            raise _invalid(f"{agent.__name__}.subjects: {subject!r} is not a subject: {SUBJECTS.words}")


def _check_methods(agent: type[Agent[Any]]) -> None:
    if agent.receive is Agent.receive:
        raise _invalid(f"{agent.__name__} has no receive: write `async def receive(self, envelope)`")
    if not inspect.iscoroutinefunction(agent.receive):
        form = "`async def receive(self, envelope)`, with return and without yield"
        raise _invalid(f"{agent.__name__}.receive has another form: write {form}")
    for name in ("apply", "initial_state"):
        if inspect.iscoroutinefunction(getattr(agent, name)):
            raise _invalid(f"{agent.__name__}.{name} is async: write `def {name}`, without await")
    for name, arguments in (("receive", "(envelope)"), ("apply", "(state, event)"), ("initial_state", "()")):
        try:
            inspect.signature(getattr(object.__new__(agent), name)).bind(*arguments.strip("()").split())
        except TypeError as error:
            raise _invalid(f"{agent.__name__}.{name} must accept {arguments} in addition to self: {error}") from error
    try:
        inspect.signature(agent).bind()
    except TypeError as error:
        detail = f"{agent.__name__} cannot be created without arguments ({error}): give each a default"
        raise _invalid(detail) from error


def fill_subjects(agent: type[Agent[Any]], tenant: str, workspace: str) -> list[str]:
    """Return the agent's subjects with `{tenant}`, `{workspace}` and `{agent}` filled in."""
    places = {"tenant": tenant, "workspace": workspace, "agent": agent_name(agent)}
    return [_filled(f"{agent.__name__}.subjects", subject, places) for subject in agent.subjects]


def fill_event_subject(agent: type[Agent[Any]], tenant: str, workspace: str, event: str, version: int | str) -> str:
    """Return the subject of an event of the agent; raises `InvalidAgent` where it is not valid."""
    places = {"tenant": tenant, "workspace": workspace, "agent": agent_name(agent), "type": event, "version": version}
    subject = _filled(f"{agent.__name__}.event_subject", agent.event_subject, places)
    if not SUBJECT.allows(subject) or event not in subject:
        rule = 'words joined by dots, one of which contains {type}, as in "evt.{tenant}.{workspace}.{agent}.{type}"'
        raise _invalid(f"{agent.__name__}.event_subject must be {rule}")
    return subject


def _filled(what: str, text: str, places: Mapping[str, object]) -> str:
    try:
        return str(text).format_map(places)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        *most, last = (f"{{{name}}}" for name in places)
        allowed = f"{', '.join(most)} and {last}"
        raise _invalid(f"{what} may contain {allowed}, and nothing else in braces: {error}") from error


def effects_of(returned: Any, agent: str) -> tuple[Effect, ...]:
    """Return what `receive` returned as a tuple of effects; raises `InvalidMessage` where it is something else."""
    if returned is None:
        return ()
    if isinstance(returned, (str, bytes, dict)) or not isinstance(returned, (Emit, Command, Iterable)):
        raise _wrong_effect(agent, returned)
    effects: list[Effect] = []
    for effect in (returned,) if isinstance(returned, (Emit, Command)) else returned:
        if not isinstance(effect, (Emit, Command)):
            raise _wrong_effect(agent, effect)
        kind = Emit if isinstance(effect, Emit) else Command
        fields = {name: getattr(effect, name) for name in kind.__struct_fields__ if name != "payload"}
        try:
            checked = msgspec.convert(fields, kind)  # a struct takes anything, and its record could not be read again
            # `apply` has to see a StrEnum, and a text or number of any other class, as a replay does
            plain: Any = msgspec.convert(msgspec.to_builtins(checked, enc_hook=plain_scalar), kind)
        except msgspec.ValidationError as error:
            wrong = shape_fault(error, kind)[1]
            detail = f"{agent}.receive returned {kind.__name__} with a field that it cannot have: {wrong}"
            raise InvalidMessage.of("invalid_effect", detail) from error
        effects.append(msgspec.structs.replace(plain, payload=effect.payload))
    return tuple(effects)


def _invalid(detail: str) -> InvalidAgent:
    return InvalidAgent.of("invalid_agent", detail)


def _wrong_effect(agent: str, value: Any) -> InvalidMessage:
    detail = f"{agent}.receive returned {value!r:.80}, of type {type(value).__name__}: {_ADVICE}"
    return InvalidMessage.of("invalid_effect", detail)
