"""Spans of OpenTelemetry, and the one place that knows its interface (docs/contract/operate.md#operate-32).

They are made where OpenTelemetry is configured, by an application or by `chassis/tracing.py` in our programs. Nothing
is imported here before that, so without it a span costs one look-up in a dict.

A message's spans are children of its `traceparent` in every process, so that they are one trace, sampled or not as its
sender decided. Only `send` and a requeue begin traces. A message without a `traceparent` has no spans: each would be a
trace by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self, TypeAlias

import msgspec

from postroom._wire.message import read_traceparent
from postroom.errors import PostroomError

if TYPE_CHECKING:
    from contextvars import Token

    from opentelemetry.context import Context
    from opentelemetry.trace import Span as Recorded
    from opentelemetry.trace import SpanContext, Tracer

_INTERFACE: Final = "opentelemetry.trace"

Attributes: TypeAlias = Mapping[str, str | int]
_NONE: Final[Attributes] = MappingProxyType({})


class Step(NamedTuple):
    """A step on a message's way, in the words of OpenTelemetry's conventions for messaging."""

    name: str
    type: Literal["create", "send", "receive", "process"]
    kind: Literal["PRODUCER", "CLIENT", "SERVER", "CONSUMER"]


SEND: Final = Step("send", "send", "PRODUCER")
REQUEUE: Final = Step("requeue", "create", "PRODUCER")
RELAY: Final = Step("relay", "send", "CLIENT")
ACCEPT: Final = Step("accept", "receive", "SERVER")
PUBLISH: Final = Step("publish", "send", "PRODUCER")
PROCESS: Final = Step("process", "process", "CONSUMER")
FILE: Final = Step("file", "process", "CONSUMER")
LEG_1: Final = Step("leg 1", "process", "CONSUMER")
LEG_2: Final = Step("leg 2", "process", "CONSUMER")
COMPLETION: Final = Step("completion", "process", "CONSUMER")


class Carried(msgspec.Struct):
    """What a span needs of an encoded `Envelope`."""

    to: str = ""
    traceparent: str | None = None


_decode_carried: Final = msgspec.json.Decoder(Carried).decode


class Span:
    """A span that ends with its block; without `recorded`, a no-op."""

    __slots__ = ("_current", "_recorded", "_token", "traceparent")

    def __init__(self, recorded: Recorded | None, traceparent: str | None = None, *, current: bool = False) -> None:
        """Be the parent of the spans that the block makes, where `current`."""
        self.traceparent = traceparent  # what a message is sent with
        self._recorded = recorded
        self._current = current
        self._token: Token[Context] | None = None

    def __enter__(self) -> Self:
        if self._current and self._recorded is not None:
            from opentelemetry import context, trace  # noqa: PLC0415 - loaded, since there is a span

            self._token = context.attach(trace.set_span_in_context(self._recorded))
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._recorded is None:
            return
        if self._token is not None:
            from opentelemetry import context  # noqa: PLC0415 - the same

            context.detach(self._token)
        if error is not None and not isinstance(error, GeneratorExit):  # a caller that stops early is not an error
            self._recorded.record_exception(error)
            code = error.code if isinstance(error, PostroomError) else type(error).__qualname__
            _fail(self._recorded, code, str(error))
        self._recorded.end()

    def set(self, name: str, value: str | int) -> None:
        """Note what was not known when it began."""
        if self._recorded is not None:
            self._recorded.set_attribute(name, value)

    def failed(self, code: str, detail: str) -> None:
        """Note that the step failed, without an exception."""
        if self._recorded is not None:
            _fail(self._recorded, code, detail)


def wanted() -> bool:
    """Return whether this process exports spans; a library may have loaded the interface without a provider."""
    if _INTERFACE not in sys.modules:
        return False
    from opentelemetry import trace  # noqa: PLC0415 - loaded

    return not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


def carried_by(payload: bytes) -> Carried:
    """Read an encoded `Envelope`; a damaged one yields nothing, since reporting it is not a span's task."""
    try:
        return _decode_carried(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return Carried()


def sending(destination: str | None, message_id: str | None, traceparent: str | None) -> Span:
    """Begin the span of a send; a message that came without a `traceparent` is sent with the span's own.

    Without a destination it is the span of a batch.
    """
    if _INTERFACE not in sys.modules:  # without a provider there may still be a current span, to be passed on
        return Span(None, traceparent)
    parent = _remote(traceparent)
    recorded = _begin(SEND, destination, message_id, context=None if parent is None else _below(parent))
    return Span(recorded, _traceparent(recorded) if traceparent is None else traceparent)


def processing(
    step: Step,
    destination: str,
    message_id: str | None,
    traceparent: str | None,
    *,
    again: bool = False,
    attributes: Attributes = _NONE,
) -> Span:
    """Begin the span of handling a message, which is the current one in its block.

    What is handled `again` after an operator's replay begins a trace, with a link to the one before.
    """
    parent = _remote(traceparent) if wanted() else None
    if parent is None:
        return Span(None)
    if again:
        if not parent.trace_flags.sampled:
            return Span(None)
        return Span(_begin(step, destination, message_id, link=parent, attributes=attributes), current=True)
    return Span(_begin(step, destination, message_id, context=_below(parent), attributes=attributes), current=True)


def record(
    step: Step,
    destination: str,
    message_id: str | None,
    traceparent: str | None,
    *,
    began: int,
    error: tuple[str, str] | None = None,
    attributes: Attributes = _NONE,
) -> None:
    """Record what was done with a message from `began` (ns since the epoch) until now.

    `error` is a code and a sentence, if it failed.
    """
    parent = _remote(traceparent)
    if parent is None:
        return
    recorded = _begin(step, destination, message_id, context=_below(parent), began=began, attributes=attributes)
    if error is not None:
        _fail(recorded, *error)
    recorded.end()


def requeued(destination: str, message_id: str, traceparent: str) -> str:
    """Record an operator's requeue, which begins a trace; return the `traceparent` of the new message.

    Its span links to the trace of the message that it replaces, and is sampled where that is.
    """
    parent = _remote(traceparent) if wanted() else None
    if parent is None or not parent.trace_flags.sampled:
        return traceparent
    recorded = _begin(REQUEUE, destination, message_id, link=parent)
    recorded.end()
    return _traceparent(recorded) or traceparent


def _begin(
    step: Step,
    destination: str | None,
    message_id: str | None,
    *,
    context: Context | None = None,
    link: SpanContext | None = None,
    began: int | None = None,
    attributes: Attributes = _NONE,
) -> Recorded:
    from opentelemetry import trace  # noqa: PLC0415 - loaded, or no spans are exported
    from opentelemetry.context import Context  # noqa: PLC0415 - the same

    named: dict[str, Any] = {
        "messaging.system": "postroom",
        "messaging.operation.name": step.name,
        "messaging.operation.type": step.type,
        "messaging.destination.name": destination,
        "messaging.message.id": message_id,
        **attributes,
    }
    return _tracer().start_span(
        step.name if destination is None else f"{step.name} {destination}",
        context if link is None else Context(),
        getattr(trace.SpanKind, step.kind),
        {name: value for name, value in named.items() if value is not None},
        None if link is None else [trace.Link(link)],
        began,
    )


@lru_cache(maxsize=1)
def _tracer() -> Tracer:
    from opentelemetry import trace  # noqa: PLC0415 - the same

    return trace.get_tracer("postroom")


def _remote(traceparent: str | None) -> SpanContext | None:
    """Read a `traceparent`; None where it is not valid."""
    if (read := read_traceparent(traceparent)) is None:
        return None
    from opentelemetry import trace  # noqa: PLC0415 - the same

    _, trace_id, span_id, flags = read.split("-")
    return trace.SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=trace.TraceFlags(int(flags, 16))
    )


def _below(parent: SpanContext) -> Context:
    from opentelemetry import trace  # noqa: PLC0415 - the same
    from opentelemetry.context import Context  # noqa: PLC0415 - the same

    return trace.set_span_in_context(trace.NonRecordingSpan(parent), Context())


def _traceparent(recorded: Recorded) -> str | None:
    """Return a span's `traceparent`; None where OpenTelemetry is not configured, and no span exists."""
    context = recorded.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}" if context.is_valid else None


def _fail(recorded: Recorded, code: str, detail: str) -> None:
    from opentelemetry import trace  # noqa: PLC0415 - the same

    recorded.set_attribute("error.type", code)
    recorded.set_status(trace.Status(trace.StatusCode.ERROR, detail))
