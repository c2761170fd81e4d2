"""The outbox's errors, each with its sentence, and SQLite's errors mapped to answers in one place."""

import sqlite3
from pathlib import Path
from typing import Final

from postroom._wire.words import counted
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.sqlite import is_full, result_code
from postroom.chassis.store import Answers
from postroom.errors import Conflict, InvalidMessage, NotFound, PostroomError, TryAgain

_MIB: Final = 1024 * 1024


def from_sqlite(error: Exception) -> Exception:
    """Map an error of one operation that failed alone; one that is not SQLite's is returned as it is."""
    if not isinstance(error, sqlite3.Error):
        return error
    if is_full(error):
        return TryAgain.of("disk_full", "the disk is full: nothing was written; free some space", retryable=True)
    if result_code(error) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return TryAgain.of(
            "outbox_busy", "another program has locked the outbox file: stop that, and try again", retryable=True
        )
    return PostroomError.of("outbox_error", f"the outbox refused the operation: {error}; see `postroom doctor`")


def outcome_unknown() -> TryAgain:
    """Answer the operations that wait for a commit that failed with an I/O error."""
    detail = "the disk failed while the outbox wrote: whether the request took effect is unknown; repeat it, same id"
    return TryAgain.of("outcome_unknown", detail, retryable=True)


def stopped() -> TryAgain:
    """Answer operations once the outbox takes none any more."""
    return TryAgain.of("stopping", "the daemon is stopping: repeat the request, same id", retryable=True)


def outbox_full(max_bytes: int) -> TryAgain:
    """Answer a new message once the waiting rows have reached 95 % of `max_bytes`."""
    detail = (
        f"the waiting rows of the outbox (pending, inflight and dead) have reached 95 % of outbox.max_bytes "
        f"({max_bytes}): wait for the relay, requeue or abort dead rows (`postroom outbox list --status dead`), "
        "or raise it"
    )
    return TryAgain.of("outbox_full", detail, retryable=True)


def write_failed(path: Path, error: BaseException) -> Fatal:
    """End the process: the disk failed under a commit (docs/contract/send.md#send-47)."""
    return Fatal(Exit.IO_ERROR, f"writing {path} failed: {error}; check the disk, then start again")


def cut_short(path: Path, damaged: Path) -> Fatal:
    """Refuse to start empty where a recovery was cut short."""
    return Fatal(
        Exit.CONFIG,
        f"there is no {path}, but {damaged.name} was set aside next to it: run `postroom outbox recover`, which saves "
        "its rows, so that no used id counts as new, or repeat the `postroom outbox restore` that was interrupted",
    )


def damaged(path: Path, fault: str) -> None:
    """Leave a damaged file to an operator: the ids in it must stay used."""
    raise Fatal(
        Exit.CONFIG,
        f"{path} is damaged ({fault}): run `postroom outbox recover`, which sets it aside and saves the rows",
    )


def ids_lost(path: Path, missing: int | None) -> Fatal:
    """Refuse to start with ids that a recovery could not save, until the operator accepts that."""
    rows = "an unknown number of rows is" if missing is None else counted(missing, "row is", "rows are")
    return Fatal(
        Exit.CONFIG,
        f"{rows} missing since {path} was recovered, and their ids may be used again: check what was lost (the "
        "broker has what it accepted), then start once with `postroom daemon run --accept-lost-ids`",
    )


def recovery_failed(path: Path, error: OSError | sqlite3.Error) -> Fatal:
    """End a recovery that could not write its new file; the old one still has all its rows."""
    if is_full(error):
        what = "free some space, about the size of the outbox, then recover again"
        return Fatal(Exit.TRY_AGAIN, f"the disk is full: {path} cannot be recovered now, and nothing is lost; {what}")
    sentence = f"recovering {path} failed: {error}; nothing is lost: check the disk, then recover again"
    return Fatal(Exit.IO_ERROR, sentence)


def no_room_for_backup(directory: Path, needed: int, free: int) -> TryAgain:
    """Refuse a copy that would take the room that sends need."""
    detail = (
        f"a backup needs {needed // _MIB} MiB free on the disk of {directory} while it is made, and there are "
        f"{free // _MIB}: free some space"
    )
    return TryAgain.of("disk_full", detail, retryable=True)


def backup_running() -> TryAgain:
    """Refuse a second copy at once."""
    detail = "another backup of this outbox is being made: try again when it is done"
    return TryAgain.of("too_busy", detail, retryable=True)


def backup_too_slow(seconds: float) -> TryAgain:
    """End a copy that takes too long."""
    detail = f"the backup was not done within {seconds:.0f} s: check the daemon's disk"
    return TryAgain.of("outbox_busy", detail, retryable=True)


def backup_damaged(path: Path, fault: str) -> PostroomError:
    """Refuse a copy of a damaged file."""
    detail = f"{path} is damaged ({fault}): keep the last backup, stop the daemon, and run `postroom outbox recover`"
    return PostroomError.of("outbox_error", detail)


def backup_failed(error: OSError | sqlite3.Error) -> PostroomError:
    """Say why a copy could not be written; the outbox itself is not affected."""
    if is_full(error):
        detail = "the disk of the outbox is full, so the backup was dropped: free some space"
        return TryAgain.of("disk_full", detail, retryable=True)
    return PostroomError.of("outbox_error", f"the backup could not be written: {error}; check the disk")


def row_not_found(row_id: str) -> NotFound:
    """Say that no row has this id."""
    return NotFound.of("row_not_found", f"there is no outbox row {row_id!r}: see `postroom outbox list`")


def wrong_state(verb: str, row_id: str, why: str) -> Conflict:
    """Say why the row's state forbids the verb."""
    return Conflict.of("wrong_state", f"cannot {verb} row {row_id}: {why}; see `postroom outbox inspect {row_id}`")


def already_accepted(verb: str, row_id: str, broker_message_id: str) -> Conflict:
    """Refuse a verb on a row that the broker turns out to have accepted; the row is done now."""
    detail = (
        f"cannot {verb} row {row_id}: the broker had accepted it, though its answer was lost; the row is done now, and "
        f"`postroom trace {row_id}` says where the message is"
    )
    return Conflict.of("already_accepted", detail, broker_message_id=broker_message_id)


def unanswered(verb: str, row_id: str, why: str) -> Conflict:
    """Refuse a verb on a row that the broker may have accepted, while it cannot be asked."""
    detail = (
        f"cannot {verb} row {row_id}: a post of it was not answered, so the broker may have accepted it, and {why}; "
        "try again when the broker answers, or force it"
    )
    return Conflict.of("outcome_unknown", detail, retryable=True)


def id_taken(client_message_id: str) -> Conflict:
    """Refuse a new id that was used before."""
    detail = f"the id {client_message_id} was used before, and an id is never released: choose another, or --auto"
    return Conflict.of("client_message_id_taken", detail)


def payload_pruned(row_id: str, status: str) -> Conflict:
    """Refuse to requeue a row whose payload was pruned."""
    detail = f"cannot requeue row {row_id}: it is {status}, and its payload was pruned; send the message as a new one"
    return Conflict.of("payload_pruned", detail)


def reason_missing() -> InvalidMessage:
    """Refuse a verb without a reason."""
    return InvalidMessage.of("reason_required", "give a reason, which is kept in the operator log", field="reason")


ANSWERS: Final = Answers(refused=from_sqlite, unknown=lambda _path, _error: outcome_unknown(), closed=stopped)
