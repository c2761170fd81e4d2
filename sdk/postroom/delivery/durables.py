"""Every durable consumer, whether it runs or not, and how far it is (docs/contract/operate.md#operate-53).

NATS knows what waits, what is in hand and who paused it; the record in Postgres knows what was begun and which handlers
are unreachable.
"""

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from types import MappingProxyType
from typing import Final, NamedTuple

from msgspec.structs import replace
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, SequenceInfo, StreamInfo
from nats.js.errors import NotFoundError

from postroom._wire.sql import load_queries
from postroom._wire.unpublished import Durable
from postroom.chassis.postgres import Connection, Pool, count_changed
from postroom.delivery.errors import cannot_pause, mapped, still_runs
from postroom.delivery.http.inbox_messages import Begun
from postroom.delivery.nats import connection_of
from postroom.delivery.streams import all_consumers, all_streams, covers, filters_of

_QUERIES: Final = load_queries(__package__, "durables.sql")
_KEPT: Final = timedelta(hours=2)  # how long what waited in a minute is known
_PAUSES_SINCE: Final = (2, 11)  # the version of NATS
_STILL: Final = timedelta(minutes=1)  # without a message that was given or acknowledged
_LONG: Final = timedelta(days=100 * 365)  # a pause lasts until an operator ends it
_BY, _REASON, _UNTIL = "postroom-paused-by", "postroom-paused-because", "postroom-paused-until"  # in its metadata


class OperatorPause(NamedTuple):
    """Who paused a consumer, and why."""

    by: str
    reason: str


async def find_consumers(js: JetStreamContext, stream: str) -> list[ConsumerInfo]:
    """Return the durable consumers of a stream, which may not exist. Raises what nats-py raises."""
    try:
        return [info for info in await all_consumers(js, stream) if info.config.durable_name]
    except NotFoundError:
        return []


async def list_durables(
    js: JetStreamContext, meshes: Collection[str] | None, begun: Sequence[Begun], *, oldest: bool = False
) -> list[Durable]:
    """Return the durable consumers of the streams of `meshes`, or of all, by stream and name.

    `begun` is what the record knows. `oldest` also looks up since when messages wait, with a request for each filter of
    a consumer. Raises what nats-py raises.
    """
    return [
        _durable(info, _own(begun, stream, info), await find_oldest(js, info, info.ack_floor) if oldest else None)
        async for stream, info in each_durable(js, meshes)
    ]


async def each_durable(
    js: JetStreamContext, meshes: Collection[str] | None
) -> AsyncIterator[tuple[StreamInfo, ConsumerInfo]]:
    """Yield the streams of `meshes`, or all, with each of their durable consumers, by stream and name."""
    own = None if meshes is None else tuple(start for mesh in meshes for start in (f"{mesh}.", f"cmd.{mesh}."))
    for stream in sorted((await all_streams(js)).infos, key=lambda stream: stream.config.name or ""):
        if own is None or any(subject.startswith(own) for subject in stream.config.subjects or []):
            for info in await find_consumers(js, stream.config.name or ""):
                yield stream, info


def _own(begun: Sequence[Begun], stream: StreamInfo, info: ConsumerInfo) -> list[Begun]:
    """Return what the record knows of a consumer: there may be others of its name, in other streams."""
    patterns = [stream.config.subjects or [], filters_of(info.config)]
    return [
        one
        for one in begun
        if one.consumer == info.name and all(any(covers(each, one.subject) for each in some) for some in patterns)
    ]


def pause_of(info: ConsumerInfo) -> OperatorPause | None:
    """Return who paused a consumer, and why; None where it is not paused."""
    if not info.paused:
        return None
    said = info.config.metadata or {}
    if said.get(_UNTIL) != info.config.pause_until:
        return OperatorPause("somebody", "it was not done with postroom")
    return OperatorPause(said[_BY], said[_REASON])


async def pause(js: JetStreamContext, info: ConsumerInfo, by: OperatorPause) -> None:
    """Have the server deliver nothing to a consumer, in any process, until `resume`; raises `Unavailable`.

    The rule is docs/contract/delivery.md#delivery-87.
    """
    until = (datetime.now(UTC) + _LONG).strftime("%Y-%m-%dT%H:%M:%SZ")
    said = {**(info.config.metadata or {}), _BY: by.by, _REASON: by.reason, _UNTIL: until}
    with mapped(f"pausing the consumer {info.name}"):
        version = connection_of(js).connected_server_version
        if (version.major, version.minor) < _PAUSES_SINCE:
            raise cannot_pause(info.name, f"{version.major}.{version.minor}")
        await js.add_consumer(info.stream_name, info.config.evolve(metadata=said))
        await js.pause_consumer(info.stream_name, info.name, until)


async def resume(js: JetStreamContext, info: ConsumerInfo, _by: OperatorPause) -> None:
    """Have the server deliver to it again; raises `Unavailable`."""
    with mapped(f"resuming the consumer {info.name}"):
        await js.resume_consumer(info.stream_name, info.name)


async def delete(js: JetStreamContext, info: ConsumerInfo, _by: OperatorPause) -> None:
    """Delete it; raises `Conflict` while a program asks for its messages, `Unavailable`."""
    if info.num_waiting:
        raise still_runs(info.name)
    with mapped(f"deleting the consumer {info.name}"):
        await js.delete_consumer(info.stream_name, info.name)


EFFECTS: Final = MappingProxyType({"pause": pause, "resume": resume, "delete": delete})
"""What each verb does to a consumer, for an operator who gave a reason."""


async def find_oldest(js: JetStreamContext, info: ConsumerInfo, after: SequenceInfo | None) -> datetime | None:
    """Return since when the oldest message of a consumer waits `after` its `ack_floor`, or what was `delivered` last.

    None where none does. Raises what nats-py raises.
    """
    moments: list[datetime] = []
    for pattern in filters_of(info.config) if info.num_pending or info.num_ack_pending else []:
        with suppress(NotFoundError):
            first = 1 + (0 if after is None else after.stream_seq)
            message = await js.get_msg(info.stream_name, first, subject=pattern, next=True)
            moments += [] if message.time is None else [message.time]
    return min(moments, default=None)


def _durable(info: ConsumerInfo, begun: Sequence[Begun], oldest_at: datetime | None) -> Durable:
    places = (info.delivered, info.ack_floor)
    moments = [at.last_active for at in places if at is not None and at.last_active is not None]
    seen_at = max(moments, default=None)
    by = pause_of(info)
    return Durable(
        consumer=info.name,
        stream=info.stream_name,
        filters=filters_of(info.config),
        waiting=info.num_pending or 0,
        in_hand=info.num_ack_pending or 0,
        again=info.num_redelivered or 0,
        asks=bool(info.num_waiting),
        oldest_at=oldest_at,
        seen_at=seen_at,
        still=seen_at is None or datetime.now(UTC) - seen_at > _STILL,
        begun=sum(one.messages for one in begun),
        paused=next((one.error for one in begun if one.error), None) if by is None else by.reason,
        paused_by=None if by is None else by.by,
    )


async def keep_waiting(pool: Pool, durables: Sequence[Durable]) -> None:
    """Record how many messages wait in this minute for the consumers that are behind."""
    if behind := [(one.stream, one.consumer, one.waiting) for one in durables if one.waiting]:
        await pool.execute(_QUERIES["keep_waiting"], *zip(*behind, strict=True))


async def with_past(connection: Connection, durables: Sequence[Durable], last: int) -> list[Durable]:
    """Return durables with what waited for each in the last minutes, the current one at the end."""
    past = {(one.stream, one.consumer): [0] * last for one in durables}
    for row in await connection.fetch(_QUERIES["list_waiting"], sorted({one.stream for one in durables}), last):
        if (found := past.get((row["stream"], row["consumer"]))) is not None:
            found[-1 - row["ago"]] = row["waiting"]
    return [replace(one, past=past[one.stream, one.consumer]) for one in durables]


async def sweep_waiting(connection: Connection, rows: int) -> int:
    """Delete up to `rows` rows of what waited more than two hours ago; return how many those were."""
    return await count_changed(connection, _QUERIES["sweep_waiting"], rows, _KEPT)
