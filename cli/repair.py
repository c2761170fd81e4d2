"""Using an operator verb on rows: one row at once, many after a dry run that counts them and a question."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cli.connect import with_daemon
from cli.output import confirm, json_line, line, note
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from postroom import AsyncClient, OutboxRow, RowFilter
    from postroom._wire.operations import Verb
    from postroom._wire.sends import BulkResult

ASKS: Final = frozenset({"requeue", "abort"})  # the verbs that retire a row for good
BULK_SECONDS: Final = 120.0  # how long one request of a bulk verb may take, a dry run over millions of rows included
MAX_IDS: Final = 10_000  # ids in one request

_DONE: Final = {
    "requeue": "requeued",
    "abort": "aborted",
    "hold": "held",
    "release": "released",
    "flush": "due now",
}


def repair_rows(
    verb: Verb,
    socket: Path | None,
    ids: Sequence[str],
    rows: RowFilter | None,
    *,
    reason: str,
    yes: bool,
    dry_run: bool,
    as_json: bool,
    force: bool = False,
) -> None:
    """Use `verb` on the rows named by `ids`, or on all that `rows` matches; exit code 1 where it failed for some."""
    from msgspec.structs import replace  # noqa: PLC0415

    if bool(ids) == (rows is not None):
        raise Fatal(Exit.USAGE, f"name the rows to {verb}, or use --all with filters")
    if len(ids) == 1 and not dry_run:
        repair_one(verb, socket, ids[0], reason=reason, yes=yes, as_json=as_json, force=force)
        return
    filters = [rows] if rows is not None else _portions(ids)
    result = _together(_bulk(verb, socket, each, reason=reason, dry_run=True) for each in filters)
    if not dry_run:
        confirm(f"{verb.capitalize()} {len(result.done)} of {result.matched} rows?", yes=yes)
        done = _together(
            _bulk(verb, socket, each, reason=reason, dry_run=False, force=force) for each in _portions(result.done)
        )
        result = replace(
            done, matched=result.matched, skipped=result.skipped + done.skipped, failed=result.failed + done.failed
        )
    for failure in result.failed:
        note(f"{failure.id}: {failure.detail}")
    if as_json:
        json_line(result)
    else:
        _summarise(verb, result)
    if result.failed:
        raise SystemExit(Exit.FAILED)


def repair_one(
    verb: Verb, socket: Path | None, row_id: str, *, reason: str, yes: bool, as_json: bool, force: bool
) -> None:
    """Use a verb other than a patched requeue on one row, and show the row that came of it."""
    if verb in ASKS:
        confirm(f"{verb.capitalize()} {row_id}?", yes=yes)

    async def work(client: AsyncClient) -> OutboxRow:
        match verb:
            case "requeue":
                return await client.requeue(row_id, reason=reason, force=force)
            case "abort":
                return await client.abort(row_id, reason=reason, force=force)
            case "hold":
                return await client.hold(row_id, reason=reason)
            case "release":
                return await client.release(row_id, reason=reason)
            case "flush":
                return await client.flush(row_id, reason=reason)

    show_row(verb, row_id, with_daemon(socket, work), as_json=as_json)


def show_row(verb: Verb, row_id: str, row: OutboxRow, *, as_json: bool) -> None:
    """Say what became of a row."""
    if as_json:
        json_line(row)
    elif verb == "requeue":
        line(f"{row_id} requeued as {row.id}, client_message_id {row.client_message_id}")
    else:
        line(f"{row.id} {_DONE[verb]}")


def _portions(ids: Sequence[str]) -> list[RowFilter]:
    """Cut many rows into requests that each take moments: none runs into its time-out, and Ctrl-C ends between two."""
    from postroom import RowFilter  # noqa: PLC0415

    return [RowFilter(ids=list(ids[i : i + MAX_IDS])) for i in range(0, len(ids), MAX_IDS)]


def _bulk(
    verb: Verb, socket: Path | None, rows: RowFilter, *, reason: str, dry_run: bool, force: bool = False
) -> BulkResult:
    return with_daemon(
        socket,
        lambda client: client.bulk(verb, rows, reason=reason, dry_run=dry_run, force=force),
        timeout=BULK_SECONDS,
    )


def _together(results: Iterable[BulkResult]) -> BulkResult:
    """Add up what several requests did, or would do."""
    from postroom._wire.sends import BulkResult  # noqa: PLC0415

    total = BulkResult(dry_run=False, matched=0, done=[], skipped=[], failed=[])
    for each in results:
        total.dry_run |= each.dry_run
        total.matched += each.matched
        total.done += each.done
        total.skipped += each.skipped
        total.failed += each.failed
    return total


def _summarise(verb: Verb, result: BulkResult) -> None:
    what = f"would be {_DONE[verb]}" if result.dry_run else _DONE[verb]
    line(f"{len(result.done)} {what}, {len(result.skipped)} skipped, {len(result.failed)} failed")
