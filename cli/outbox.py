"""`postroom outbox …`: see and repair what the daemon keeps (docs/contract/send.md#send-14)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.configs import daemon_config
from cli.connect import with_daemon
from cli.export import export_rows
from cli.noun import Config, DryRun, Json, Reason, Socket, Yes, noun
from cli.output import confirm, json_line, line, note, reason_or_ask
from cli.patch import read_patch
from cli.quantities import age
from cli.repair import repair_rows, show_row
from cli.rows import show_chain, show_rows
from cli.selection import (
    All,
    Code,
    Destination,
    Held,
    Ids,
    OlderThan,
    Status,
    chosen_ids,
    row_filter,
)
from postroom.chassis.exits import Exit, Fatal

if TYPE_CHECKING:
    from daemon.postroomd import Recovery
    from postroom import AsyncClient, ListQuery, OutboxRow, RowFilter
    from postroom._wire.message import SendRequest
    from postroom._wire.operations import Verb

app = noun("See and repair what the daemon keeps.")

Force = Annotated[
    bool, typer.Option("--force", help="Also rows that the broker may have accepted, while it cannot be asked.")
]
Limit = Annotated[int, typer.Option(min=1, help="How many rows to show.")]


@app.command("list")
def list_(
    *,
    status: Status = None,
    destination: Destination = None,
    code: Code = None,
    older_than: OlderThan = None,
    held: Held = None,
    limit: Limit = 50,
    everything: Annotated[bool, typer.Option("--all", help="All rows, without a limit.")] = False,
    cursor: Annotated[str | None, typer.Option(help="Continue where the last list ended.")] = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """List rows, oldest first; never their payloads."""
    query = _list_query(cursor, status=status, destination=destination, code=code, older_than=older_than, held=held)

    async def work(client: AsyncClient) -> str | None:
        return await show_rows(client, query, limit=None if everything else limit, as_json=as_json)

    if (next_cursor := with_daemon(socket, work)) is not None:
        note(f"There are more rows: --all, or --cursor {next_cursor}")


@app.command()
def inspect(*, ids: Ids = None, as_json: Json = False, socket: Socket = None) -> None:
    """Show a row with the whole chain of its requeues, and what operators did to it."""
    wanted = chosen_ids(ids)
    if not wanted:
        raise Fatal(Exit.USAGE, "name a row by its id or client_message_id (`postroom outbox list` shows them)")

    async def work(client: AsyncClient) -> None:
        for place, row_id in enumerate(wanted):
            chain = await client.inspect(row_id)
            if place and not as_json:
                line("")
            json_line(chain) if as_json else show_chain(chain)

    with_daemon(socket, work)


@app.command()
def requeue(
    *,
    ids: Ids = None,
    row: Annotated[str | None, typer.Option("--id", metavar="ROW", help="The row, if it is one.")] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Use a fresh client_message_id (the default).")] = False,
    new_client_id: Annotated[str | None, typer.Option(metavar="ID", help="The successor's client_message_id.")] = None,
    patch_payload: Annotated[
        Path | None, typer.Option(metavar="FILE", help='A whole new message, as JSON: {"to": …, "body": …}.')
    ] = None,
    everything: All = False,
    status: Status = None,
    destination: Destination = None,
    code: Code = None,
    older_than: OlderThan = None,
    held: Held = None,
    reason: Reason = None,
    force: Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Retire dead or pending rows and send their messages again, each under a fresh id."""
    wanted = chosen_ids([*(ids or ()), *([row] if row is not None else ())])
    if auto and new_client_id is not None:
        raise Fatal(Exit.USAGE, "--auto and --new-client-id cannot be used together")
    if new_client_id is None and patch_payload is None:
        rows = _filter_of(
            everything, status=status, destination=destination, code=code, older_than=older_than, held=held
        )
        why = reason_or_ask(reason, dry_run=dry_run)
        repair_rows("requeue", socket, wanted, rows, reason=why, yes=yes, dry_run=dry_run, as_json=as_json, force=force)
        return
    if len(wanted) != 1 or everything or dry_run:
        raise Fatal(Exit.USAGE, "--new-client-id and --patch-payload are for exactly one row, and without --dry-run")
    _requeue_changed(
        socket,
        wanted[0],
        new_client_id,
        patch_payload,
        reason=reason_or_ask(reason),
        yes=yes,
        as_json=as_json,
        force=force,
    )


def _requeue_changed(
    socket: Path | None,
    row_id: str,
    new_client_id: str | None,
    patch_payload: Path | None,
    *,
    reason: str,
    yes: bool,
    as_json: bool,
    force: bool,
) -> None:
    message: SendRequest | None = None if patch_payload is None else read_patch(patch_payload)
    confirm(f"Requeue {row_id}?", yes=yes)

    async def work(client: AsyncClient) -> OutboxRow:
        return await client.requeue(
            row_id, reason=reason, new_client_message_id=new_client_id, message=message, force=force
        )

    show_row("requeue", row_id, with_daemon(socket, work), as_json=as_json)


@app.command()
def abort(
    *,
    ids: Ids = None,
    everything: All = False,
    status: Status = None,
    destination: Destination = None,
    code: Code = None,
    older_than: OlderThan = None,
    held: Held = None,
    reason: Reason = None,
    force: Force = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Retire dead or pending rows without a successor."""
    rows = _filter_of(everything, status=status, destination=destination, code=code, older_than=older_than, held=held)
    why, wanted = reason_or_ask(reason, dry_run=dry_run), chosen_ids(ids)
    repair_rows("abort", socket, wanted, rows, reason=why, yes=yes, dry_run=dry_run, as_json=as_json, force=force)


def _register(verb: Verb, summary: str) -> None:
    """Make the command of a verb that needs nothing but rows and a reason."""

    def command(
        *,
        ids: Ids = None,
        everything: All = False,
        status: Status = None,
        destination: Destination = None,
        code: Code = None,
        older_than: OlderThan = None,
        held: Held = None,
        reason: Reason = None,
        dry_run: DryRun = False,
        yes: Yes = False,
        as_json: Json = False,
        socket: Socket = None,
    ) -> None:
        rows = _filter_of(
            everything, status=status, destination=destination, code=code, older_than=older_than, held=held
        )
        why = reason_or_ask(reason, dry_run=dry_run)
        repair_rows(verb, socket, chosen_ids(ids), rows, reason=why, yes=yes, dry_run=dry_run, as_json=as_json)

    app.command(verb, help=summary)(command)


_register("hold", "Keep pending rows back until they are released.")
_register("release", "Release held rows.")
_register("flush", "Try waiting rows now, without the rest of their backoff.")


@app.command()
def prune(
    *,
    older_than: Annotated[
        float,
        typer.Option(
            parser=age, metavar="DURATION", help="Only rows that ended longer ago than 7d, 12h, or before a time."
        ),
    ],
    reason: Reason = None,
    yes: Yes = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Delete the payloads of old done and aborted rows now; ids and outcomes stay forever."""
    why = reason_or_ask(reason)
    confirm("Permanently delete the payloads of old done and aborted rows?", yes=yes)
    result = with_daemon(socket, lambda client: client.prune(older_than, reason=why), timeout=600.0)
    json_line(result) if as_json else line(f"{result.pruned} payloads deleted")


@app.command()
def resend(
    *,
    missing: Annotated[
        bool, typer.Option("--missing", help="The messages that the broker's database lost (required).")
    ] = False,
    reason: Reason = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Send done messages again, under their own ids, that the broker lost when its database was restored."""
    if not missing:
        raise Fatal(Exit.USAGE, "use --missing to send again what the broker's database lost")
    why = reason_or_ask(reason, dry_run=dry_run)
    if not dry_run:
        confirm("Send every message again that the broker's database lost?", yes=yes)
    result = with_daemon(socket, lambda client: client.resend_missing(reason=why, dry_run=dry_run), timeout=600.0)
    if as_json:
        json_line(result)
        return
    for client_message_id in result.without_payload_ids:
        line(f"{client_message_id}: its payload was pruned")
    what = "would be sent again" if dry_run else "sent again"
    line(f"{result.resent} {what}, {result.without_payload} without their payload")


@app.command()
def export(
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="A new file [default: standard output].")
    ] = None,
    status: Status = None,
    destination: Destination = None,
    code: Code = None,
    older_than: OlderThan = None,
    held: Held = None,
    socket: Socket = None,
) -> None:
    """Write every row as a line of JSON: for audits and spreadsheets. Never payloads."""
    query = _list_query(status=status, destination=destination, code=code, older_than=older_than, held=held)
    count = with_daemon(socket, lambda client: export_rows(client, query, output))
    note(f"{count} rows exported")


@app.command()
def recover(*, config: Config = None, yes: Yes = False, as_json: Json = False) -> None:
    """Set the damaged files of a stopped daemon aside, and save what can be read into a new outbox."""
    from daemon.postroomd import recover as recover_outbox  # noqa: PLC0415

    loaded = daemon_config(config)
    confirm("Set the outbox's files aside and save what can be read into a new one?", yes=yes)
    recovery = recover_outbox(loaded)
    json_line(recovery._asdict()) if as_json else _show_recovery(recovery)
    if not recovery.whole:
        raise typer.Exit(Exit.FAILED)


def _show_recovery(recovery: Recovery) -> None:
    line(f"saved {recovery.saved} rows and {recovery.log_lines} lines of the operator log")
    if recovery.missing is None:
        line(f"missing: unknown, since the counters are damaged too; the ids of {recovery.buried} rows stay used")
    else:
        line(f"missing: {recovery.missing} rows; the ids of {recovery.buried} of them stay used")
    line(f"missing: {recovery.lost_log_lines} lines of the operator log")
    if recovery.damaged_frames:
        line(f"{recovery.damaged_frames} pages of the write-ahead log are damaged: rows may be older than they were")
    line(f"the damaged files are kept as {recovery.damaged}")
    if recovery.missing != 0:
        line("the daemon starts again with `postroom daemon run --accept-lost-ids`: see what is missing first")


def _filter_of(everything: bool, **filters: Any) -> RowFilter | None:  # noqa: FBT001 - an option handed through
    """Return the filter for `--all`; filters without it are a usage error, since they would be overlooked."""
    if not everything and any(value is not None for value in filters.values()):
        raise Fatal(Exit.USAGE, "filters need --all")
    return row_filter(**filters) if everything else None


def _list_query(cursor: str | None = None, **filters: Any) -> ListQuery:
    import msgspec  # noqa: PLC0415

    from postroom import ListQuery  # noqa: PLC0415

    return msgspec.convert({**msgspec.to_builtins(row_filter(**filters)), "cursor": cursor}, ListQuery)
