"""The operator's half of the client: see and repair rows, pause the relay (docs/contract/send.md#send-14).

A change is tried again only where it surely did not happen; where that is not known, `Unavailable` is raised and
`inspect` tells.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from urllib.parse import quote

from msgspec.structs import replace

from postroom._wire.administration import Subscription, Topic, TopicList
from postroom._wire.arguments import check_id
from postroom._wire.message import SendRequest
from postroom._wire.operations import (
    AbortRequest,
    BulkRequest,
    ListQuery,
    PauseRequest,
    PruneRequest,
    PruneResult,
    ReasonRequest,
    RequeueRequest,
    ResendRequest,
    ResendResult,
    ResumeRequest,
    RowFilter,
    Verb,
)
from postroom._wire.sends import BulkResult, OutboxPage, OutboxRow, RelayStatus, RowChain
from postroom._wire.transport import Calls, to_parameters


class OperatorMethods(Calls):
    """What an operator may do; an id is a row's id or a `client_message_id`, a `reason` says why and is kept."""

    async def list_rows(self, query: ListQuery | None = None) -> OutboxPage:
        """Return one page of the outbox, oldest first."""
        return await self._read("/v1/outbox", OutboxPage, query=query or ListQuery())

    async def export(self, query: ListQuery | None = None) -> AsyncIterator[OutboxRow]:
        """Stream every row that `query` means, oldest first; raises `Unavailable` where the stream breaks off."""
        parameters = to_parameters(query or ListQuery())
        silence = self._transport.timeout
        async with self._transport.open("GET", "/v1/outbox/export", query=parameters, silence=silence) as response:
            async for lines in self._transport.lines(response):
                for line in lines:
                    yield self._transport.decode(line, OutboxRow)

    async def inspect(self, row_id: str) -> RowChain:
        """Return a row with its predecessors and successors and what operators did to them."""
        return await self._read(_path(row_id), RowChain)

    async def requeue(
        self,
        row_id: str,
        *,
        reason: str,
        new_client_message_id: str | None = None,
        message: SendRequest | None = None,
        force: bool = False,
    ) -> OutboxRow:
        """Retire a `dead` or `pending` row and return its successor, under a fresh id; `message` replaces its own.

        Raises `Conflict`: `already_accepted` where the broker turns out to have the message, and, without `force`,
        `outcome_unknown` where it may have it and cannot be asked.
        """
        body = RequeueRequest(reason=reason, force=force, new_client_message_id=new_client_message_id, message=message)
        return await self._change("POST", f"{_path(row_id)}/requeue", OutboxRow, body)

    async def abort(self, row_id: str, *, reason: str, force: bool = False) -> OutboxRow:
        """Retire a `dead` or `pending` row without a successor; raises `Conflict` as `requeue` does."""
        return await self._change("POST", f"{_path(row_id)}/abort", OutboxRow, AbortRequest(reason=reason, force=force))

    async def hold(self, row_id: str, *, reason: str) -> OutboxRow:
        """Keep a `pending` row back until it is released."""
        return await self._change("POST", f"{_path(row_id)}/hold", OutboxRow, ReasonRequest(reason=reason))

    async def release(self, row_id: str, *, reason: str) -> OutboxRow:
        """Let a held row go."""
        return await self._change("POST", f"{_path(row_id)}/release", OutboxRow, ReasonRequest(reason=reason))

    async def flush(self, row_id: str, *, reason: str) -> OutboxRow:
        """Try a waiting row now."""
        return await self._change("POST", f"{_path(row_id)}/flush", OutboxRow, ReasonRequest(reason=reason))

    async def bulk(
        self, verb: Verb, rows: RowFilter, *, reason: str, dry_run: bool = False, force: bool = False
    ) -> BulkResult:
        """Use a verb on every row that `rows` means; with `dry_run`, only say on which.

        However many there are, one request is about some 10,000; what it did stays done where a later one fails.
        """
        total = BulkResult(dry_run=dry_run, matched=0, done=[], skipped=[], failed=[])
        asked = BulkRequest(reason=reason, filter=rows, force=force, dry_run=dry_run)
        while True:
            part = await self._change("POST", f"/v1/outbox/{verb}", BulkResult, asked)
            total.matched += part.matched
            total.done += part.done
            total.skipped += part.skipped
            total.failed += part.failed
            if part.next_cursor is None:
                return total
            asked = replace(asked, cursor=part.next_cursor)

    async def prune(self, older_than_seconds: float, *, reason: str) -> PruneResult:
        """Empty the payloads of `done` and `aborted` rows that are older than this; the rows stay."""
        body = PruneRequest(reason=reason, older_than_seconds=older_than_seconds)
        return await self._change("POST", "/v1/outbox/prune", PruneResult, body)

    async def resend_missing(self, *, reason: str, dry_run: bool = False) -> ResendResult:
        """Send the messages that the broker's database lost again, under their own ids; `health` counts them.

        Those whose payload is gone are named, and noted in the operator log. However many there are, one request is
        about some 10,000; what it did stays done where a later one fails.
        """
        total = ResendResult(dry_run=dry_run, resent=0, without_payload=0)
        more = True
        while more:
            body = ResendRequest(reason=reason, dry_run=dry_run)
            part = await self._change("POST", "/v1/outbox/resend", ResendResult, body)
            total.resent += part.resent
            total.without_payload += part.without_payload
            total.without_payload_ids += part.without_payload_ids
            more = part.more
        return total

    async def pause_relay(self, destination: str | None = None, *, reason: str) -> RelayStatus:
        """Stop relaying, to one destination or altogether, until it is resumed; kept over restarts."""
        return await self._change(
            "POST", "/v1/relay/pause", RelayStatus, PauseRequest(reason=reason, destination=destination)
        )

    async def resume_relay(
        self, destination: str | None = None, *, reason: str, rate_per_second: float | None = None
    ) -> RelayStatus:
        """Relay again, at most `rate_per_second` messages a second where it is given."""
        body = ResumeRequest(reason=reason, destination=destination, rate_per_second=rate_per_second)
        return await self._change("POST", "/v1/relay/resume", RelayStatus, body)

    async def topics(self) -> list[Topic]:
        """Return the topics of the daemon's mesh, by name, as the broker has them."""
        return (await self._read("/v1/topics", TopicList)).topics

    async def subscribe(self, topic: str) -> Subscription:
        """Subscribe the daemon's member to a topic."""
        return await self._change("POST", _subscription(topic), Subscription)

    async def unsubscribe(self, topic: str) -> None:
        """End the subscription of the daemon's member to a topic."""
        await self._change("DELETE", _subscription(topic), type(None))


def _subscription(topic: str) -> str:
    return f"/v1/topics/{quote(topic, safe='')}/subscription"


def _path(row_id: str) -> str:
    return f"/v1/outbox/{quote(check_id(row_id), safe=':')}"
