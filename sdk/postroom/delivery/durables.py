"""Every durable consumer, whether it runs or not, and how far it is (docs/contract/operate.md#operate-53).

NATS knows what waits and what is in hand; the record in Postgres, what was begun and whose handler is unreachable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import datetime

from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo
from nats.js.errors import NotFoundError

from postroom._wire.unpublished import Durable
from postroom.delivery.streams import all_consumers, all_streams, filters_of


async def find_consumers(js: JetStreamContext, stream: str) -> list[ConsumerInfo]:
    """Return the durable consumers of a stream; none where there is no such stream. Raises what nats-py raises."""
    try:
        return [info for info in await all_consumers(js, stream) if info.config.durable_name]
    except NotFoundError:
        return []


async def list_durables(
    js: JetStreamContext,
    meshes: Collection[str] | None,
    begun: Mapping[str, int],
    unreachable: Mapping[str, str],
    *,
    oldest: bool = False,
) -> list[Durable]:
    """Return the durable consumers of the streams of `meshes`, or of all, by stream and name.

    `begun` and `unreachable` are what the record knows, by consumer. With `oldest` it is looked up since when messages
    wait, a request for each filter of a consumer. Raises what nats-py raises.
    """
    own = None if meshes is None else tuple(start for mesh in meshes for start in (f"{mesh}.", f"cmd.{mesh}."))
    found = []
    for stream in sorted((await all_streams(js)).infos, key=lambda stream: stream.config.name or ""):
        if own is None or any(subject.startswith(own) for subject in stream.config.subjects or []):
            for info in await find_consumers(js, stream.config.name or ""):
                since = await _oldest(js, info) if oldest else None
                found.append(_durable(info, begun, unreachable, since))
    return found


async def _oldest(js: JetStreamContext, info: ConsumerInfo) -> datetime | None:
    """Tell since when the oldest message waits that a consumer has yet to acknowledge; None where none does."""
    moments: list[datetime] = []
    for pattern in filters_of(info.config) if info.num_pending or info.num_ack_pending else []:
        with suppress(NotFoundError):
            first = 1 + (0 if info.ack_floor is None else info.ack_floor.stream_seq)
            message = await js.get_msg(info.stream_name, first, subject=pattern, next=True)
            moments += [] if message.time is None else [message.time]
    return min(moments, default=None)


def _durable(
    info: ConsumerInfo, begun: Mapping[str, int], unreachable: Mapping[str, str], oldest_at: datetime | None
) -> Durable:
    places = (info.delivered, info.ack_floor)
    moments = [at.last_active for at in places if at is not None and at.last_active is not None]
    return Durable(
        consumer=info.name,
        stream=info.stream_name,
        filters=filters_of(info.config),
        waiting=info.num_pending or 0,
        in_hand=info.num_ack_pending or 0,
        again=info.num_redelivered or 0,
        asks=bool(info.num_waiting),
        oldest_at=oldest_at,
        seen_at=max(moments, default=None),
        begun=begun.get(info.name, 0),
        paused=unreachable.get(info.name),
    )
