"""Streams and durable consumers, reconciled with what is declared (docs/contract/delivery.md#delivery-4).

What is missing is created; what differs is changed, unless that would lose messages or cannot be done in place: then
`Conflict` (`stream_differs`) states the difference, and nothing is changed.

The server's own `max_deliver` stays unlimited, and handlers count attempts: a server leaves a message past that limit
where it is, so one whose worker was killed on its last delivery would stop silently. The server's `max_ack_pending` is
what one process has in hand plus what may wait for its next attempt, since a waiting message counts there too.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

import structlog
from nats.js import JetStreamContext
from nats.js.api import (
    AckPolicy,
    ConsumerConfig,
    ConsumerInfo,
    DeliverPolicy,
    RetentionPolicy,
    StorageType,
    StreamConfig,
    StreamInfo,
)
from nats.js.errors import APIError, NotFoundError

from postroom.delivery.errors import (
    NATS_ERRORS,
    mapped,
    name_taken,
    subjects_absent,
    subjects_overlap,
    subjects_taken,
    would_lose,
)
from postroom.delivery.nats import ask_api
from postroom.delivery.settings import DAY, ConsumerSettings, KindDefaults, StreamDefaults, StreamSettings
from postroom.delivery.subjects import stream_name

_log = structlog.get_logger(__name__)

GIGABYTE: Final = 1_000_000_000
UNLIMITED: Final = -1
AS_IT_IS: Final = StreamDefaults()
_PAGE: Final = 256  # streams, or consumers, in one answer of the server
_FILTER: Final = "filter_subjects"
_TAKEN: Final = frozenset({10099, 10100})  # a work queue refuses a second consumer of its subjects
_OVERLAPPING: Final = 10138  # any stream refuses a consumer with two filters for one subject

Action = Literal["created", "changed", "unchanged"]


class Reconciled(NamedTuple):
    """What became of one declared stream or consumer."""

    name: str
    action: Action
    changes: tuple[str, ...] = ()


def default_streams(
    context: str, defaults: StreamDefaults = AS_IT_IS, *, max_bytes: int | None = 10 * GIGABYTE
) -> list[StreamSettings]:
    """Declare the four streams of a context, with what an operator has set; `max_bytes` is the default for events."""
    own: list[tuple[KindDefaults, str, str, dict[str, Any]]] = [
        (defaults.events, "events", f"{context}.event.>", {"max_age_seconds": 7 * DAY, "max_bytes": max_bytes}),
        (defaults.commands, "commands", f"cmd.{context}.>", {"retention": "workqueue"}),
        (defaults.inbox, "inbox", f"{context}.inbox.>", {"max_age_seconds": 30 * DAY}),
    ]
    return [
        *(
            StreamSettings(
                name=stream_name(context, kind), subjects=[subjects], **{**usual, **_given(defaults, limits)}
            )
            for limits, kind, subjects, usual in own
        ),
        dead_letter_stream(context, defaults),
    ]


def dead_letter_stream(context: str, defaults: StreamDefaults = AS_IT_IS) -> StreamSettings:
    """Declare the stream of a context's dead letters; they are few, so its duplicate window is a day."""
    return StreamSettings(
        name=stream_name(context, "dlq"),
        subjects=[f"{context}.dlq.>"],
        **{"max_age_seconds": 30 * DAY, **_given(defaults, defaults.dead_letters), "duplicate_window_seconds": DAY},
    )


def default_changes(stream: StreamSettings, defaults: StreamDefaults) -> frozenset[str]:
    """Name the limits of a context's own stream that the operator has set: an existing one is changed to those."""
    kinds = {"EVENTS": defaults.events, "COMMANDS": defaults.commands, "INBOX": defaults.inbox}
    limits = kinds.get(stream.name.rpartition("_")[2], defaults.dead_letters)
    fixed = {"duplicate_window_seconds"} if limits is defaults.dead_letters else set()
    return frozenset(_given(defaults, limits)) - fixed


def _given(defaults: StreamDefaults, limits: KindDefaults) -> dict[str, Any]:
    given = {
        "replicas": defaults.replicas,
        "duplicate_window_seconds": defaults.duplicate_window_seconds,
        "max_age_seconds": limits.max_age_seconds,
        "max_bytes": limits.max_bytes,
    }
    return {name: value for name, value in given.items() if value is not None}


class StreamList(NamedTuple):
    """The streams of a server, and the names of those whose state a cluster does not know at the moment."""

    infos: list[StreamInfo]
    missing: frozenset[str]


async def all_streams(js: JetStreamContext) -> StreamList:
    """Return every stream of the server, page by page; raises what nats-py raises.

    While a cluster elects a leader, or some of its servers are unreachable, its list is not complete: the streams in
    `missing` exist too.
    """
    infos: list[StreamInfo] = []
    missing: set[str] = set()
    offset = 0
    while True:
        request = json.dumps({"offset": offset}).encode()
        page = await ask_api(js, "STREAM.LIST", request)
        infos += [StreamInfo.from_response(stream) for stream in page.get("streams") or ()]
        missing.update(page.get("missing") or (), page.get("offline") or ())
        offset += max(page["limit"], 1)
        if offset >= page["total"]:
            return StreamList(infos, frozenset(missing))


async def ensure_stream(
    js: JetStreamContext, settings: StreamSettings, *, only: Collection[str] | None = None
) -> Reconciled:
    """Create the stream, or change it to `settings`; harmless where it is so already.

    Where `only` is given, no other limits of an existing stream are compared and changed. Raises `Conflict` with the
    difference where messages would be lost.
    """
    wanted = _stream_config(settings)
    with mapped(f"declaring the stream {settings.name}"):
        try:
            found = (await js.stream_info(settings.name)).config
        except NotFoundError:
            await js.add_stream(wanted)
            return Reconciled(settings.name, "created")
        changes = list(_stream_changes(found, settings, only))
        _refuse(f"stream {settings.name}", changes)
        if changes:
            await js.update_stream(_merged(found, wanted, only))
    return Reconciled(settings.name, "changed" if changes else "unchanged", tuple(change.text for change in changes))


async def ensure_consumer(js: JetStreamContext, settings: ConsumerSettings) -> Reconciled:
    """Create the durable consumer, or change it to `settings`, and log what was done; every kind of consumer does so.

    A filter that becomes wider adds only what is published from then on, since a durable never goes back. Raises
    `Conflict` with the difference where messages would be lost, and, as retryable, where the filter is another one and
    a program consumes under the name right now; `NotFound` without the stream, and where a new consumer filters for
    what no message of the stream can have.
    """
    name = f"{settings.stream}/{settings.durable}"
    wanted = _consumer_config(settings)
    with mapped(f"declaring the consumer {name}"):
        try:
            found = await js.consumer_info(settings.stream, settings.durable)
        except NotFoundError:
            await _create_consumer(js, settings.stream, wanted)
            _log.info("consumer_created", consumer=name, filter_subjects=filters_of(wanted))
            return Reconciled(name, "created")
        changes = list(_consumer_changes(found.config, wanted))
        _refuse(f"consumer {name}", changes, name)
        if found.num_waiting and any(change.text.startswith(_FILTER) for change in changes):
            raise name_taken(f"consumer {name}: {'; '.join(change.text for change in changes)}")
        if changes:
            await js.add_consumer(settings.stream, _changed(found.config, wanted))
            _log.info("consumer_changed", consumer=name, changes=[change.text for change in changes])
    return Reconciled(name, "changed" if changes else "unchanged", tuple(change.text for change in changes))


async def refuse_left_behind(
    js: JetStreamContext, durable: str, patterns: Collection[str], kept: Collection[str]
) -> None:
    """Raise `Conflict` where `durable` is in a stream of `patterns` that is not `kept`: nobody would take what it has.

    For a program whose one durable stands in each stream that has some of its subjects. Raises what nats-py raises.
    """
    for stream in (await all_streams(js)).infos:
        name, subjects = str(stream.config.name), stream.config.subjects or ()
        if name not in kept and any(overlap(subject, pattern) for subject in subjects for pattern in patterns):
            with suppress(NotFoundError):
                found = await js.consumer_info(name, durable)
                change = f"consumer {name}/{durable}: {_FILTER} {filters_of(found.config)} → none"
                raise would_lose(change, f"{name}/{durable}")


async def _create_consumer(js: JetStreamContext, stream: str, wanted: ConsumerConfig) -> None:
    declared = (await js.stream_info(stream)).config
    has = declared.subjects or ()
    absent = [each for each in wanted.filter_subjects or () if not any(overlap(each, subject) for subject in has)]
    if absent and not (declared.mirror or declared.sources):  # which have subjects of other streams
        raise subjects_absent(f"{stream}/{wanted.durable_name}", stream, absent, sorted(has))
    try:
        await js.add_consumer(stream, wanted)
    except APIError as error:
        subjects = filters_of(wanted)
        if error.err_code == _OVERLAPPING:
            raise subjects_overlap(str(wanted.durable_name), subjects) from error
        if error.err_code not in _TAKEN:
            raise
        others = [
            f"{info.name} has {', '.join(filters_of(info.config))}"
            for info in await all_consumers(js, stream)
            if any(overlap(subject, other) for subject in subjects for other in filters_of(info.config))
        ]
        raise subjects_taken(str(wanted.durable_name), stream, subjects, others) from error


async def all_consumers(js: JetStreamContext, stream: str) -> list[ConsumerInfo]:
    """Return every consumer of a stream, page by page; raises what nats-py raises."""
    infos: list[ConsumerInfo] = []
    while True:
        page = await js.consumers_info(stream, offset=len(infos))
        infos += page
        if len(page) < _PAGE:
            return infos


async def subjects_of(js: JetStreamContext, settings: ConsumerSettings) -> list[str]:
    """Return what a consumer receives: its filters, else the subjects of its stream; `>` while that is unknown."""
    with suppress(*NATS_ERRORS, NotFoundError):
        return settings.filter_subjects or (await js.stream_info(settings.stream)).config.subjects or [">"]
    return [">"]


async def consumer_created(js: JetStreamContext, settings: ConsumerSettings) -> datetime:
    """Return when the consumer was created: another time means another consumer, with sequences of its own."""
    info: ConsumerInfo = await js.consumer_info(settings.stream, settings.durable)
    assert info.created is not None  # noqa: S101 - every server reports it
    return info.created


class _Change(NamedTuple):
    text: str
    loses: bool


def _refuse(what: str, changes: list[_Change], consumer: str | None = None) -> None:
    forbidden = [change.text for change in changes if change.loses]
    if forbidden:
        raise would_lose(f"{what}: {'; '.join(forbidden)}", consumer)


def _stream_changes(found: StreamConfig, wanted: StreamSettings, only: Collection[str] | None) -> Iterator[_Change]:
    """Yield what differs between the server (left of the arrow) and the config (right of it)."""
    declared = _stream_config(wanted)
    before, after = _limits(found), _limits(declared)
    after["duplicate_window_seconds"] = _merged(found, declared, only).duplicate_window
    for name in after:
        if before[name] != after[name] and (only is None or name in only):
            fewer = name in ("retention", "storage") or float(after[name]) < float(before[name])  # type: ignore[arg-type]
            yield _Change(f"{name} {before[name]} → {after[name]}", fewer and name != "duplicate_window_seconds")
    if only is not None:
        return
    gone = sorted(set(found.subjects or ()) - set(wanted.subjects))
    new = sorted(set(wanted.subjects) - set(found.subjects or ()))
    if gone or new:
        yield _Change(
            f"subjects {sorted(found.subjects or ())} → {sorted(wanted.subjects)}",
            not all(_covered(subject, wanted.subjects) for subject in gone),
        )


def _limits(config: StreamConfig) -> dict[str, object]:
    return {
        "retention": RetentionPolicy(config.retention or "limits").value,
        "storage": StorageType(config.storage or "file").value,
        "max_age_seconds": config.max_age or float("inf"),
        "max_bytes": float("inf") if config.max_bytes in (None, UNLIMITED) else config.max_bytes,
        "replicas": config.num_replicas or 1,
        "duplicate_window_seconds": config.duplicate_window,
    }


def _merged(found: StreamConfig, wanted: StreamConfig, only: Collection[str] | None) -> StreamConfig:
    """Keep settings of the stream that the config does not mention."""
    declared = {
        "subjects": ("subjects", wanted.subjects),
        "max_age_seconds": ("max_age", wanted.max_age),
        "max_bytes": ("max_bytes", wanted.max_bytes),
        "replicas": ("num_replicas", wanted.num_replicas),
        "duplicate_window_seconds": ("duplicate_window", wanted.duplicate_window),
    }
    return _capped(found.evolve(**dict(change for name, change in declared.items() if only is None or name in only)))


def _capped(config: StreamConfig) -> StreamConfig:
    """Limit the duplicate window to the maximum age: a server refuses a stream with a longer one."""
    return config.evolve(duplicate_window=min(config.duplicate_window or 0, config.max_age or float("inf")))


def _stream_config(settings: StreamSettings) -> StreamConfig:
    config = StreamConfig(
        name=settings.name,
        subjects=settings.subjects,
        retention=RetentionPolicy(settings.retention),
        max_age=settings.max_age_seconds,
        max_bytes=UNLIMITED if settings.max_bytes is None else settings.max_bytes,
        storage=StorageType(settings.storage),
        num_replicas=settings.replicas,
        duplicate_window=settings.duplicate_window_seconds,
        allow_direct=True,
        allow_atomic=True,  # a server before 2.12 does not know it
    )
    return _capped(config)


def _consumer_changes(found: ConsumerConfig, wanted: ConsumerConfig) -> Iterator[_Change]:
    if found.ack_policy != AckPolicy.EXPLICIT or found.deliver_subject:
        yield _Change("it is not a pull consumer with explicit acks", loses=True)
    for name in ("ack_wait", "max_deliver", "max_ack_pending"):
        if getattr(found, name) != getattr(wanted, name):
            yield _Change(f"{name} {getattr(found, name)} → {getattr(wanted, name)}", loses=False)
    if found.backoff:
        yield _Change(f"backoff {found.backoff} → none", loses=False)
    if found.headers_only:
        yield _Change("headers_only True → False", loses=False)
    before, after = filters_of(found), filters_of(wanted)
    if before != after:
        loses = not all(_covered(subject, after) for subject in before)
        yield _Change(f"{_FILTER} {before} → {after}", loses)


def filters_of(config: ConsumerConfig) -> list[str]:
    """Return the filters of a consumer; `>`, which matches everything, where it has none."""
    return sorted(config.filter_subjects or [config.filter_subject or ">"])


def _changed(found: ConsumerConfig, wanted: ConsumerConfig) -> ConsumerConfig:
    """Keep settings that the config does not mention, and where the consumer began, which cannot be changed."""
    return found.evolve(
        ack_wait=wanted.ack_wait,
        max_deliver=wanted.max_deliver,
        max_ack_pending=wanted.max_ack_pending,
        backoff=None,
        headers_only=None,
        filter_subject=None,
        filter_subjects=wanted.filter_subjects,
    )


def _consumer_config(settings: ConsumerSettings) -> ConsumerConfig:
    return ConsumerConfig(
        name=settings.durable,
        durable_name=settings.durable,
        ack_policy=AckPolicy.EXPLICIT,
        ack_wait=settings.ack_wait_seconds,
        max_deliver=UNLIMITED,
        max_ack_pending=settings.max_ack_pending + settings.max_waiting,
        filter_subjects=settings.filter_subjects or None,
        deliver_policy=DeliverPolicy.ALL if settings.since is None else DeliverPolicy.BY_START_TIME,
        opt_start_time=settings.since,
    )


def covers(pattern: str, subject: str) -> bool:
    """Return whether `pattern` (`*` is one word, `>` the rest) matches all that `subject`, perhaps a pattern, does."""
    words, wanted = pattern.split("."), subject.split(".")
    for index, word in enumerate(words):
        if word == ">":
            return len(wanted) > index
        if index >= len(wanted) or wanted[index] == ">" or word not in ("*", wanted[index]):
            return False
    return len(words) == len(wanted)


def overlap(one: str, other: str) -> bool:
    """Return whether some subject matches both patterns."""
    words, others = one.split("."), other.split(".")
    for word, against in zip(words, others, strict=False):
        if ">" in (word, against):
            return True
        if word != against and "*" not in (word, against):
            return False
    return len(words) == len(others)


def _covered(subject: str, by: list[str]) -> bool:
    return any(covers(pattern, subject) for pattern in by)
