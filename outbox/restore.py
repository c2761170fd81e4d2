"""Put a backup in the place of the outbox: `postroom outbox restore`, on a stopped daemon (docs/backup.md).

What was there is set aside, never changed. A log that lay beside it goes with it: SQLite would read it into any file of
that name.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from outbox.model import Caller
from outbox.operating import Order
from outbox.outbox import NAME, SCHEMA
from postroom._wire.ids import now_ms
from postroom._wire.sql import load_queries
from postroom.chassis import store
from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.ownership import hand_over, open_private, sync
from postroom.chassis.sqlite import PARTS, QUERIES, Damaged, exit_after, quick_check

_LOG: Final = load_queries("outbox", "sql/operate.sql")["log"]


def restore(directory: Path, backup: Path, reason: str, *, clock: Callable[[], int] = now_ms) -> Path | None:
    """Make `backup`, which stays, the outbox of `directory`; returns where the one that was there lies now, if any.

    The line of the operator log about it is in the new outbox. Until that is whole and on disk a failure leaves
    everything as it was.

    Raises `Fatal`: 69 where a daemon runs there, 78 for a file that is no whole backup of an outbox, 75 on a full disk,
    74 on one that fails; `InvalidMessage` without a reason.
    """
    order = Order(Caller.this_process(), reason).checked()
    file = store.OwnedFile(directory, NAME, may_be_anothers=True)
    restored, aside = False, None
    try:
        if (log := Path(f"{backup}-wal")).exists():
            raise Fatal(Exit.CONFIG, f"{log} lies beside {backup}: restore what `postroom outbox backup` has written")
        fresh, now = file.path.with_name(f"{NAME}.db.restoring"), clock()
        for part in PARTS:
            Path(f"{fresh}{part}").unlink(missing_ok=True)  # of a restore that was cut short
        with backup.open("rb") as source, os.fdopen(open_private(fresh, os.O_WRONLY | os.O_EXCL), "wb") as target:
            hand_over(target.fileno(), file.path.parent)  # as its directory's owner's: root may restore for a daemon
            shutil.copyfileobj(source, target)
        with closing(sqlite3.connect(fresh, isolation_level=None)) as db:
            if not SCHEMA.version_of(db, backup):
                raise Fatal(Exit.CONFIG, f"{backup} is empty, and no backup of an outbox: take another")
            quick_check(db)
            line = {"at": now, "verb": "restore", "actor": str(order.caller), "reason": order.reason.strip()}
            db.execute(_LOG, {**line, "row_id": None, "detail": str(backup)})
            db.execute(QUERIES["checkpoint_truncate"]).fetchall()
        sync(fresh)
        aside = store.set_aside(file.path, now) if file.path.exists() else None
        fresh.rename(file.path)
        sync(file.path.parent)
        restored = True
    except (Damaged, sqlite3.DatabaseError) as fault:
        if isinstance(fault, sqlite3.OperationalError):
            raise Fatal(
                exit_after(fault), f"cannot restore {backup}: {fault}; nothing has changed, try again"
            ) from fault
        raise Fatal(Exit.CONFIG, f"{backup} is damaged, or no backup of an outbox ({fault}): take another") from fault
    except OSError as error:
        changed = "nothing has changed" if aside is None else f"the outbox that was there is {aside}"
        raise Fatal(exit_after(error), f"cannot restore {backup}: {error.strerror}; {changed}, try again") from error
    finally:
        file.end(clean=restored)
    return aside
