"""Opening an outbox: one owner, a check after an unclean stop, rows taken back, files of others."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from support.outboxes import Clock, accepted, row_in, send

from outbox import Outbox
from postroom.chassis.exits import Exit, Fatal

OpenOutbox = Callable[..., Awaitable[Outbox]]


def damage(database: Path) -> None:
    """Overwrite a page in the middle of the file."""
    with database.open("r+b") as file:
        file.seek(database.stat().st_size // 4096 // 2 * 4096)
        file.write(b"\xff" * 4096)


def modes(directory: Path) -> dict[str, int]:
    return {file.name: file.stat().st_mode & 0o777 for file in (directory, *directory.iterdir())}


def killed(state: Path) -> None:
    """Leave the lock file as a killed daemon does."""
    (state / "outbox.lock").write_text("4711")


async def test_what_was_accepted_is_there_after_a_restart(outbox: Outbox, open_outbox: OpenOutbox) -> None:
    await accepted(outbox, send())
    await outbox.close()
    again = await open_outbox()
    (row,) = await accepted(again, send())
    assert not row.inserted
    await again.close()


async def test_inflight_rows_go_back_with_one_attempt_more(
    outbox: Outbox, clock: Clock, open_outbox: OpenOutbox
) -> None:
    await row_in(outbox, "inflight", "a")
    await row_in(outbox, "inflight", "b")
    await row_in(outbox, "done", "c")
    await outbox.close()
    clock.forward(1)
    again = await open_outbox()
    assert (await again.counts()).rows == {"pending": 2, "inflight": 0, "done": 1, "dead": 0, "aborted": 0}
    assert [(row.client_message_id, row.attempts) for row in await again.claim()] == [("a", 1), ("b", 1)]
    posts = {name: (await again.inspect(name)).failed_posts for name in "abc"}
    assert [[(each.code, each.broker) for each in posts[name]] for name in "abc"] == [*[[("interrupted", "")]] * 2, []]
    await again.close()


async def test_a_damaged_file_is_refused_after_an_unclean_stop(
    outbox: Outbox, database: Path, state: Path, open_outbox: OpenOutbox
) -> None:
    await accepted(outbox, *(send(f"id-{number}", "x" * 1000) for number in range(100)))
    await outbox.close()
    damage(database)
    killed(state)
    for _ in range(2):
        with pytest.raises(Fatal, match="postroom outbox recover") as refusal:
            await open_outbox()
        assert refusal.value.exit_code == Exit.CONFIG
        assert str(database) in str(refusal.value)


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped in order", "killed"])
async def test_a_file_that_was_emptied_is_refused_and_not_taken_for_a_new_one(
    outbox: Outbox, database: Path, state: Path, open_outbox: OpenOutbox, *, stopped: bool
) -> None:
    await accepted(outbox, send())
    await outbox.close()
    if not stopped:
        killed(state)
    database.write_bytes(b"")
    for _ in range(2):
        with pytest.raises(Fatal, match="postroom outbox recover") as refusal:
            await open_outbox()
        assert (refusal.value.exit_code, database.read_bytes()) == (Exit.CONFIG, b"")


async def test_a_file_without_its_schema_is_refused_since_its_log_was_removed(
    outbox: Outbox, database: Path, state: Path, open_outbox: OpenOutbox
) -> None:
    await accepted(outbox, send())
    first = database.read_bytes()  # what is in the log is not in it yet
    await outbox.close()
    killed(state)
    database.write_bytes(first)
    with pytest.raises(Fatal, match="postroom outbox recover"):
        await open_outbox()


@pytest.mark.parametrize("left", ["outbox.lock", "outbox.db"], ids=["before it made the file", "before its schema"])
async def test_a_first_start_that_was_killed_is_done_again(state: Path, open_outbox: OpenOutbox, left: str) -> None:
    state.mkdir(mode=0o700)
    for name in {"outbox.lock", left}:
        (state / name).touch(mode=0o600)
    async with await open_outbox() as outbox:
        assert (await outbox.counts()).rows["pending"] == 0


async def test_a_file_that_is_no_database_is_refused(outbox: Outbox, database: Path, open_outbox: OpenOutbox) -> None:
    await outbox.close()
    database.write_bytes(b"this is not an outbox" * 500)
    with pytest.raises(Fatal, match="postroom outbox recover"):
        await open_outbox()
