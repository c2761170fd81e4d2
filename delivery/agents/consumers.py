"""The durable consumers of one agent: one for each stream that keeps something it handles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from random import Random

import msgspec
from nats.js import JetStreamContext
from nats.js.errors import NotFoundError

from delivery.agents.runtime import AgentRuntime
from delivery.consuming import Consumer
from delivery.errors import from_nats
from delivery.settings import ConsumerSettings
from postroom.errors import NotFound


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
        consumers.append(Consumer(js, own, runtime, runtime.letters, rng=rng))
        await consumers[-1].declare()
    return consumers


async def _by_stream(js: JetStreamContext, subjects: Sequence[str]) -> dict[str, list[str]]:
    streams = defaultdict(list)
    for subject in subjects:
        try:
            streams[await js.find_stream_name_by_subject(subject)].append(subject)
        except NotFoundError as error:
            detail = f"no stream keeps {subject}: declare one (`postroom worker run` declares those of a mesh)"
            raise NotFound.of(404, "stream_not_found", detail, retryable=True) from error
        except Exception as error:
            raise from_nats(error, f"looking for the stream of {subject}") from error
    return dict(streams)
