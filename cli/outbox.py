"""`postroom outbox …`: see and repair what the daemon keeps (docs/contract/send.md#send-14).

`install` is for the other outbox, of events: it puts one into an application's own database.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, TextIO, get_args

import msgspec
import typer
from msgspec.structs import replace

from cli import completion
from cli.change import SECONDS, Asked, Change, Portion, change_all, check_choice
from cli.connect import with_daemon
from cli.files import new_file, read_plain_file
from cli.noun import (
    Config,
    Json,
    OlderThan,
    OutboxDatabase,
    Paging,
    Reason,
    Socket,
    Yes,
    choice,
    chosen_ids,
    file_name,
    moment,
    named,
    noun,
    several,
)
from cli.output import confirm, fields, json_line, line, note, one_by_one, progress, reason_or_ask, table, tree
from cli.programs import daemon_config
from postroom import Client, ListQuery, OutboxRow, RowFilter, SendRequest
from postroom._wire.message import decode_request, parse_destination
from postroom._wire.operations import VERBS, Verb
from postroom._wire.sends import BulkFailure, BulkResult, RowChain, RowStatus
from postroom._wire.words import ago, counted
from postroom.chassis.exits import Exit, Fatal
from postroom.errors import Conflict, NotFound, PostroomError

app = noun()

Ids = Annotated[list[str] | None, several("Rows by row id or client_message_id", completion.rows)]

STATUSES: Final[tuple[str, ...]] = get_args(RowStatus)
BACKUP_SECONDS: Final = 630.0  # how long a copy may take, a little longer than the daemon allows itself
_PORTION: Final = 1000  # rows that one request of a bulk verb is about
_ERRORS: Final[dict[str, type[PostroomError]]] = {"row_not_found": NotFound}  # else it is the row's state
_COLUMNS: Final = ("ROW", "CLIENT MESSAGE ID", "STATUS", "TO", "AGE", "TRIES", "LAST ERROR")


class Filters(NamedTuple):
    """The conditions that rows match."""

    status: Annotated[
        str | None,
        typer.Option(
            "--status",
            "--state",
            **choice("status", STATUSES),
            metavar="STATUS",
            help=f"Only rows that are {', '.join(STATUSES[:-1])} or aborted.",
        ),
    ] = None
    destination: Annotated[
        str | None,
        typer.Option(metavar="TO", help="Only rows to this destination.", autocompletion=completion.destinations),
    ] = None
    code: Annotated[str | None, typer.Option(metavar="CODE", help="Only rows whose last error has this code.")] = None
    older_than: OlderThan = None
    held: Annotated[
        bool | None, typer.Option("--held/--not-held", help="Only rows that are held, or that are not.")
    ] = None

    def rows(self) -> RowFilter:
        """Return the filter that the options describe."""
        if self.destination is not None:
            parse_destination(self.destination, "destination")  # a misspelt one would match nothing, and say nothing
        members: dict[str, Any] = self._asdict()
        members |= members.pop("older_than") or {}
        return msgspec.convert(members, RowFilter)

    def query(self) -> ListQuery:
        """Return the question for a list of them."""
        return msgspec.convert(msgspec.to_builtins(self.rows()), ListQuery)


class Rows(NamedTuple):
    """Which rows a verb changes, and how."""

    filters: Filters = Filters()
    change: Change = Change()
    force: Annotated[
        bool, typer.Option("--force", help="Also rows that the broker may have accepted, while it cannot be asked.")
    ] = False
    socket: Socket = None


@app.command("list")
def list_(*, filters: Filters, paging: Paging, as_json: Json = False, socket: Socket = None) -> None:
    """List rows, oldest first; never their payloads."""
    query = filters.query()

    def cells(row: OutboxRow) -> tuple[Any, ...]:
        code = (row.last_error or "").partition(":")[0] or None
        age = ago(row.enqueued_at)
        return (row.id, row.client_message_id, status_of(row), row.destination, age, row.attempts, code)

    def work(client: Client) -> None:
        def ask(after: str | None, size: int) -> tuple[list[OutboxRow], str | None]:
            page = client.list_rows(replace(query, cursor=after, limit=size))
            return page.rows, page.next_cursor

        paging.show(ask, _COLUMNS, cells, things="rows", as_json=as_json)

    with_daemon(socket, work)


@app.command()
def inspect(*, ids: Ids = None, as_json: Json = False, socket: Socket = None) -> None:
    """Show a row with the whole chain of its requeues, and what operators did to it."""
    wanted = chosen_ids(ids)
    if not wanted:
        raise Fatal(Exit.USAGE, "name a row by its id or client_message_id (`postroom outbox list` shows them)")

    with_daemon(socket, lambda client: one_by_one(map(client.inspect, wanted), show_chain, as_json=as_json))


@app.command(help=VERBS["requeue"].effect)
def requeue(
    *,
    ids: Ids = None,
    row: Annotated[
        str | None, typer.Option("--id", metavar="ROW", help="The row, if it is one.", autocompletion=completion.rows)
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="Use a fresh client_message_id (the default).")] = False,
    new_client_id: Annotated[str | None, typer.Option(metavar="ID", help="The successor's client_message_id.")] = None,
    patch_payload: Annotated[
        Path | None, typer.Option(metavar="FILE", help='A whole new message, as JSON: {"to": …, "body": …}.')
    ] = None,
    meant: Rows,
) -> None:
    """Requeue rows, perhaps one under an id or with a message that is given."""
    change, wanted = meant.change, chosen_ids([*(ids or ()), *([row] if row is not None else ())])
    if auto and new_client_id is not None:
        raise Fatal(Exit.USAGE, "--auto and --new-client-id cannot be used together: omit one")
    changed = new_client_id is not None or patch_payload is not None
    if changed and (len(wanted) != 1 or change.everything or change.dry_run):
        raise Fatal(
            Exit.USAGE,
            "--new-client-id and --patch-payload are for exactly one row, and without --dry-run: name one by its id",
        )
    message: SendRequest | None = None
    if patch_payload is not None:
        message = decode_request(read_plain_file(patch_payload))
        parse_destination(message.to)
        if message.client_message_id is not None:
            detail = f"{patch_payload} contains a client_message_id: pass the new one with --new-client-id"
            raise Fatal(Exit.USAGE, detail)
    change_rows("requeue", wanted, meant, new_client_message_id=new_client_id, message=message)


def change_named(verb: Verb, *, ids: Ids = None, meant: Rows) -> None:
    """Do a verb that needs nothing but rows and a reason."""
    change_rows(verb, chosen_ids(ids), meant)


for _verb in VERBS:
    if _verb != "requeue":
        _without = () if VERBS[_verb].retires else ("force",)
        app.command(_verb, help=VERBS[_verb].effect, without=_without)(partial(change_named, _verb))


@app.command(without=("everything", "dry_run"))
def prune(
    *,
    older_than: Annotated[
        datetime | None,
        typer.Option(
            parser=moment,
            metavar="DURATION",
            help="Only rows that ended longer ago than 7d, 12h, or before a time [default: as the daemon's "
            "outbox.keep_payloads says].",
        ),
    ] = None,
    change: Change,
    socket: Socket = None,
) -> None:
    """Delete the payloads of old done and aborted rows now; ids and outcomes stay forever."""
    why = reason_or_ask(change.reason)
    confirm("Permanently delete the payloads of old done and aborted rows?", yes=change.yes)
    seconds = None if older_than is None else (datetime.now(UTC) - older_than).total_seconds()
    with progress(as_json=change.as_json) as show:

        def show_count(count: int) -> None:
            show(count, f"{counted(count, 'payload')} deleted")

        result = with_daemon(socket, lambda client: client.prune(seconds, reason=why, tell=show_count), timeout=SECONDS)
    json_line(result) if change.as_json else line(f"{counted(result.pruned, 'payload')} deleted")


@app.command(without=("everything",))
def resend(
    *,
    missing: Annotated[
        bool, typer.Option("--missing", help="The messages that the broker's database lost (required).")
    ] = False,
    change: Change,
    socket: Socket = None,
) -> None:
    """Send done messages again, under their own ids, that the broker lost when its database was restored."""
    if not missing:
        raise Fatal(Exit.USAGE, "use --missing to send again what the broker's database lost")
    why = reason_or_ask(change.reason, dry_run=change.dry_run)
    result = with_daemon(socket, lambda client: client.resend_missing(reason=why, dry_run=True), timeout=SECONDS)
    lost = result.resent + result.without_payload
    if lost and not change.dry_run:
        confirm(f"Send {counted(result.resent, 'message')} again that the broker's database lost?", yes=change.yes)
        with progress(lost, as_json=change.as_json) as show:

            def show_count(count: int) -> None:
                show(count, f"{count:,} of {counted(lost, 'message')}")

            result = with_daemon(
                socket, lambda client: client.resend_missing(reason=why, tell=show_count), timeout=SECONDS
            )
    result.dry_run = change.dry_run
    if change.as_json:
        json_line(result)
        return
    for client_message_id in result.without_payload_ids:
        line(f"{client_message_id}: its payload was pruned")
    what = "would be sent again" if change.dry_run else "sent again"
    line(f"{result.resent} {what}, {result.without_payload} without their payload")


@app.command()
def export(
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="A new file [default: standard output].", callback=file_name
        ),
    ] = None,
    filters: Filters,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Write every row as a line of JSON, also without --json: for audits and spreadsheets. Never payloads."""
    query = filters.query()

    def write(client: Client, stream: TextIO | None) -> int:
        count = 0
        with progress(as_json=as_json) as show:
            for row in client.export(query):
                json_line(row, stream)
                count += 1
                show(count, counted(count, "row"))
        return count

    def work(client: Client) -> int:
        if output is None:
            return write(client, None)
        with new_file(output) as file, TextIOWrapper(file, "utf-8") as stream:
            return write(client, stream)

    note(f"{counted(with_daemon(socket, work), 'row')} exported")


@app.command()
def backup(
    *,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A new file, for you alone to read (0600).", callback=file_name)
    ],
    reason: Reason = None,
    as_json: Json = False,
    socket: Socket = None,
) -> None:
    """Write a copy of the whole outbox, payloads too, while the daemon goes on; it holds what was answered before."""
    why = reason_or_ask(reason)

    def work(client: Client) -> int:
        size = 0
        with new_file(file) as stream, progress(as_json=as_json) as show:
            for piece in client.backup(reason=why):
                size += stream.write(piece)
                show(size, counted(size, "byte"))
        return size

    size = with_daemon(socket, work, timeout=BACKUP_SECONDS)
    json_line({"file": str(file), "bytes": size}) if as_json else line(f"{file}: the whole outbox, {size:,} bytes")


@app.command()
def restore(
    *,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `postroom outbox backup` has written.")],
    reason: Reason = None,
    config: Config = None,
    yes: Yes = False,
) -> None:
    """Put a backup in the place of a stopped daemon's outbox; ids that were used after it are free again."""
    from daemon.config import state_directory  # noqa: PLC0415
    from outbox.backup import restore as restore_outbox  # noqa: PLC0415

    loaded, why = daemon_config(config), reason_or_ask(reason)
    confirm(f"Replace the outbox of the mesh {loaded.mesh} by {file}?", yes=yes)
    aside = restore_outbox(state_directory(loaded), file.absolute(), why)
    line(f"restored {file}; " + ("there was no outbox" if aside is None else f"the old outbox is {aside}"))


@app.command()
def recover(*, config: Config = None, yes: Yes = False, as_json: Json = False) -> None:
    """Set the damaged files of a stopped daemon aside, and save what can be read into a new outbox."""
    from daemon.config import state_directory  # noqa: PLC0415
    from outbox.recover import recover as recover_outbox  # noqa: PLC0415

    loaded = daemon_config(config)
    confirm("Set the outbox's files aside and save what can be read into a new one?", yes=yes)
    recovery = recover_outbox(state_directory(loaded))
    if as_json:
        json_line(recovery._asdict())
    else:
        line(f"saved {counted(recovery.saved, 'row')} and {counted(recovery.log_lines, 'line')} of the operator log")
        stay_used = f"the ids of {recovery.buried} of them stay used"
        if recovery.missing is None:
            line(f"missing: an unknown number of rows, since no counter of them can be trusted; {stay_used}")
        else:
            line(f"missing: {counted(recovery.missing, 'row')}; {stay_used}")
        line(f"missing: {counted(recovery.lost_log_lines, 'line')} of the operator log")
        if recovery.damaged_frames:
            damage = f"damaged: {counted(recovery.damaged_frames, 'page')} of the write-ahead log"
            line(f"{damage}: rows may be older than they were")
        line(f"the damaged files are kept as {recovery.damaged}")
        if recovery.unaccepted:
            if recovery.missing == 0:
                line("rows that an earlier recovery could not save are still missing")
            line("the daemon starts again with `postroom daemon run --accept-lost-ids`: see what is missing first")
    if not recovery.whole:
        raise typer.Exit(Exit.FAILED)


@app.command()
def install(
    *,
    database: OutboxDatabase = None,
    role: Annotated[
        list[str] | None, typer.Option(metavar="ROLE", help="A Postgres role that may emit. Repeatable.")
    ] = None,
    mesh: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SLUG",
            help="A mesh that may be emitted to, until a worker brings the broker's list. Repeatable [default: any].",
            **named("mesh"),
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put an outbox of events into an application's own Postgres, or bring it up to date; a second time is harmless.

    \b
        postroom outbox install --database postgresql://owner@db.example.com/shop --role shop --mesh shop
    """  # noqa: D301 - \b: as it stands
    import asyncio  # noqa: PLC0415

    from postroom.delivery.applications import install as install_there  # noqa: PLC0415

    if database is None:
        raise Fatal(Exit.USAGE, "name the application's database: --database, or POSTROOM_OUTBOX_DATABASE_URL")
    roles, meshes = role or [], mesh or []
    applied = asyncio.run(install_there(database, roles=roles, meshes=meshes))
    if as_json:
        json_line({"applied": applied, "roles": roles, "meshes": meshes})
        return
    line("installed: " + ", ".join(applied) if applied else "the outbox is up to date")
    for name in roles:
        line(f"the role {name} may emit")
    for name in meshes:
        line(f"events may go to the mesh {name}")


def change_rows(verb: Verb, ids: Sequence[str], meant: Rows, **successor: Any) -> None:
    """Do `verb` to one row, perhaps with what its successor is, or to many; exit code 1 where it failed for some."""
    change, rows, done_as = meant.change, meant.filters.rows(), VERBS[verb].done
    check_choice("row", "outbox", ids, change, filtered=rows != RowFilter())
    if len(ids) == 1 and not change.dry_run:
        reason = reason_or_ask(change.reason)
        if verb == "abort":
            confirm(f"{verb.capitalize()} {ids[0]}?", yes=change.yes)
        row = with_daemon(
            meant.socket, lambda client: client.act(verb, ids[0], reason=reason, force=meant.force, **successor)
        )
        kept = ", and is held like it" * row.held
        requeued = f"{ids[0]} requeued as {row.id}, client_message_id {row.client_message_id}{kept}"
        said = requeued if verb == "requeue" else f"{row.id} {done_as}"
        json_line(row) if change.as_json else line(said)
        return

    def ask(asked: Asked) -> Portion:
        wanted, force = rows if asked.ids is None else RowFilter(ids=list(asked.ids)), meant.force and not asked.dry_run
        part = with_daemon(
            meant.socket,
            lambda client: client.bulk(verb, wanted, reason=asked.why, dry_run=asked.dry_run, force=force),
            timeout=SECONDS,
        )
        failed = {each.id: _ERRORS.get(each.code, Conflict).of(each.code, each.detail).problem for each in part.failed}
        return Portion(part.done, failed, part.skipped)

    total = BulkResult(dry_run=change.dry_run, matched=0, done=[], skipped=[], failed=[])
    for portion in change_all("row", verb, ids, change, ask, size=_PORTION):
        total.done += portion.done
        total.skipped += portion.skipped
        for id_, failure in portion.failed.items():
            note(f"{id_}: {failure.detail}")
            total.failed.append(BulkFailure(id=id_, code=failure.code, detail=failure.detail))
    total.matched = len(total.done) + len(total.skipped) + len(total.failed)
    if change.as_json:
        json_line(total)
    else:
        what = f"would be {done_as}" if change.dry_run else done_as
        line(f"{len(total.done)} {what}, {len(total.skipped)} skipped, {len(total.failed)} failed")
    if total.failed:
        raise SystemExit(Exit.FAILED)


def show_chain(chain: RowChain) -> None:
    """Print a row, the chain it belongs to as a tree, and the operator log of all of it."""
    row = chain.row
    fields(
        [
            ("row", row.id),
            ("client message id", row.client_message_id),
            ("status", status_of(row)),
            ("to", row.destination),
            ("priority", row.priority),
            ("payload", counted(row.payload_bytes, "byte")),
            ("fingerprint", row.request_fingerprint),
            ("submitted by", row.submitted_by),
            ("traceparent", row.traceparent),
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
    )
    first, *others = chain.chain
    if others:
        line("")
        tree(_in_chain(first, row.id), (_in_chain(other, row.id) for other in others))
    if chain.failed_posts:
        line("")
        table(
            ("POSTED", "SECONDS", "BROKER", "TIMES", "SINCE", "ANSWER", "ROW"),
            ((p.at, p.seconds, p.broker, p.times, p.since, p.code, p.row_id) for p in chain.failed_posts),
        )
    if chain.log:
        line("")
        table(
            ("AT", "VERB", "BY", "ROW", "REASON", "DETAIL"),
            ((act.at, act.verb, act.actor, act.row_id, act.reason, act.detail) for act in chain.log),
        )


def status_of(row: OutboxRow) -> str:
    """Name the row's status, and that it is held."""
    return f"{row.status} (held)" if row.held else row.status


def _in_chain(row: OutboxRow, inspected: str) -> str:
    mark = "  ← this one" if row.id == inspected else ""
    return f"{row.id}  {row.client_message_id}  {status_of(row)}  {row.destination}{mark}"
