"""The durable consumers of one agent: one for each stream that keeps something it handles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any, Final

import msgspec
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from postroom.agent import Agent, fill_event_subject
from postroom.delivery.agents.runtime import AgentRuntime
from postroom.delivery.consumer import Consumer
from postroom.delivery.errors import NATS_ERRORS, from_nats
from postroom.delivery.settings import ConsumerSettings
from postroom.delivery.streams import all_streams, covers
from postroom.errors import NotFound

_TYPE: Final = "any-type"  # stands for each in a subject; no event is called so
_VERSION: Final = "any-version"


async def open_consumers(
    js: JetStreamContext,
    runtime: AgentRuntime,
    subjects: Sequence[str],
    settings: ConsumerSettings,
    *,
    rng: Random | None = None,
) -> list[Consumer]:
    """Declare the durable consumers for `subjects`, and return them; the stream in `settings` is replaced.

    Raises `NotFound` where no stream keeps a subject, `Conflict` where a durable of that name does something else,
    `Unavailable` without JetStream.
    """
    consumers: list[Consumer] = []
    for stream, wanted in (await _by_stream(js, subjects)).items():
        own = msgspec.structs.replace(settings, stream=stream, filter_subjects=wanted)
        consumers.append(Consumer(js, own, runtime, runtime.publisher, rng=rng))
        await consumers[-1].declare()
    return consumers


async def check_events(js: JetStreamContext, agent: type[Agent[Any]], tenant: str, workspace: str) -> None:
    """Raise `NotFound` unless a stream takes every event of the agent: else they would wait in its store for ever."""
    words = fill_event_subject(agent, tenant, workspace, _TYPE, _VERSION).split(".")
    subjects = ".".join("*" if _TYPE in word or _VERSION in word else word for word in words)
    try:
        streams, missing = await all_streams(js)
    except NATS_ERRORS as error:
        raise from_nats(error, f"looking for the stream of {subjects}") from error
    taken = any(covers(pattern, subjects) for info in streams for pattern in info.config.subjects or ())
    if not taken and not missing:  # else a cluster elects a leader: what is missing may take them
        detail = (
            f"no stream has {subjects}, where the events of {agent.__name__} are published: declare one, or set its "
        )
        raise NotFound.of("stream_not_found", f"{detail}event_subject to a subject of a stream", retryable=True)


async def _by_stream(js: JetStreamContext, subjects: Sequence[str]) -> dict[str, list[str]]:
    streams = defaultdict(list)
    for subject in subjects:
        try:
            streams[await js.find_stream_name_by_subject(subject)].append(subject)
        except NotFoundError as error:
            detail = f"no stream has {subject}: declare one (`postroom worker run` declares those of a mesh)"
            raise NotFound.of("stream_not_found", detail, retryable=True) from error
        except Exception as error:
            raise from_nats(error, f"looking for the stream of {subject}") from error
    return dict(streams)
