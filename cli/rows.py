"""Rows of the outbox for people and programs: as a list, and one with the chain of its requeues."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cli.output import ago, fields, json_line, line, table, tree

if TYPE_CHECKING:
    from postroom import AsyncClient, ListQuery, OutboxRow
    from postroom._wire.sends import RowChain

COLUMNS: Final = ("ROW", "CLIENT MESSAGE ID", "STATUS", "TO", "AGE", "TRIES", "LAST ERROR")
PAGE: Final = 1000  # rows asked for at once


async def show_rows(client: AsyncClient, query: ListQuery, *, limit: int | None, as_json: bool) -> str | None:
    """Print at most `limit` rows that `query` means; returns the cursor that continues the list, if it has more."""
    from msgspec.structs import replace  # noqa: PLC0415

    shown: list[OutboxRow] = []
    count, cursor = 0, query.cursor
    while True:
        size = PAGE if limit is None else min(PAGE, limit - count)
        page = await client.list_rows(replace(query, cursor=cursor, limit=size))
        count, cursor = count + len(page.rows), page.next_cursor
        if as_json:
            for row in page.rows:
                json_line(row)
        else:
            shown += page.rows
        if cursor is None or count == limit:
            break
    if not as_json:
        table(COLUMNS, map(_cells, shown)) if shown else line("no rows")
    return cursor


def show_chain(chain: RowChain) -> None:
    """Print a row, the chain it belongs to as a tree, and the operator log of all of it."""
    fields((name, value) for name, value in _described(chain.row))
    first, *others = chain.chain
    if others:
        line("")
        tree(_in_chain(first, chain.row.id), (_in_chain(row, chain.row.id) for row in others))
    if chain.log:
        line("")
        table(
            ("AT", "VERB", "BY", "ROW", "REASON", "DETAIL"),
            ((act.at, act.verb, act.actor, act.row_id, act.reason, act.detail) for act in chain.log),
        )


def status_of(row: OutboxRow) -> str:
    """Name the row's status, and that it is held."""
    return f"{row.status} (held)" if row.held else row.status


def _cells(row: OutboxRow) -> tuple[Any, ...]:
    error = (row.last_error or "").partition(":")[0] or None
    return (
        row.id,
        row.client_message_id,
        status_of(row),
        row.destination,
        ago(row.enqueued_at),
        row.attempts,
        error,
    )


def _described(row: OutboxRow) -> list[tuple[str, Any]]:
    return [
        ("row", row.id),
        ("client message id", row.client_message_id),
        ("status", status_of(row)),
        ("to", row.destination),
        ("priority", row.priority),
        ("payload", f"{row.payload_bytes} bytes"),
        ("fingerprint", row.request_fingerprint),
        ("submitted by", row.submitted_by),
        ("enqueued", row.enqueued_at),
        ("not before", row.not_before),
        ("tries", row.attempts),
        ("next try", row.next_attempt_at if row.status == "pending" else None),
        ("last error", row.last_error),
        ("delivered", row.delivered_at),
        ("broker message id", row.broker_message_id),
        ("history id", row.history_id),
        ("duplicate", "the broker had accepted it before" if row.duplicate else None),
        ("unanswered", row.unanswered_at),
        ("aborted", row.aborted_at),
        ("aborted by", row.aborted_by),
        ("superseded by", row.superseded_by),
        ("payload pruned", row.payload_pruned_at),
    ]


def _in_chain(row: OutboxRow, inspected: str) -> str:
    mark = "  ← this one" if row.id == inspected else ""
    return f"{row.id}  {row.client_message_id}  {status_of(row)}  {row.destination}{mark}"
