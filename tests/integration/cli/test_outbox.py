"""`postroom outbox …` and `postroom relay …`, against a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.mailroom import LoneDaemon
from support.terminal import Terminal

from postroom import AsyncClient, Client, RowFilter, SendRequest
from postroom._wire.sends import BulkResult

WHY = ("--reason", "a test wants it")


@pytest.fixture
def sent(terminal: Terminal) -> Terminal:
    """A user who has sent three messages, under the ids a, b and c."""
    lines = (json.dumps({"to": "topic:orders", "body": "secret", "client_message_id": each}) for each in "abc")
    assert terminal.run("send", "--ndjson", stdin="\n".join(lines)).code == 0
    return terminal


def status(user: Terminal, row_id: str) -> str:
    return str(user.run("outbox", "inspect", row_id, "--json").json[0]["row"]["status"])


def test_a_list_for_people_shows_no_payload(sent: Terminal) -> None:
    listed = sent.run("outbox", "list")
    assert listed.code == 0
    head, *lines = listed.out.splitlines()
    assert head.split()[:4] == ["ROW", "CLIENT", "MESSAGE", "ID"]
    assert [line.split()[1:4] for line in lines] == [[each, "pending", "topic:orders"] for each in "abc"]
    assert "secret" not in listed.out


def test_a_list_for_programs_is_a_line_a_row(sent: Terminal) -> None:
    rows = sent.run("outbox", "list", "--json").json
    assert [row["client_message_id"] for row in rows] == ["a", "b", "c"]
    assert "payload" not in rows[0]
    assert "body" not in rows[0]


def test_a_long_list_says_how_to_go_on(sent: Terminal) -> None:
    first = sent.run("outbox", "list", "--json", "--limit", "2")
    cursor = first.err.split()[-1]
    rest = sent.run("outbox", "list", "--json", "--cursor", cursor)
    assert [row["client_message_id"] for row in first.json + rest.json] == ["a", "b", "c"]
    assert len(sent.run("outbox", "list", "--json", "--limit", "1", "--all").json) == 3


def test_filters_narrow_a_list(sent: Terminal) -> None:
    sent.run("outbox", "abort", "a", *WHY, "--yes")
    sent.run("outbox", "hold", "b", *WHY)
    listed = {
        name: [row["client_message_id"] for row in sent.run("outbox", "list", "--json", *options).json]
        for name, options in {
            "aborted": ("--status", "aborted"),
            "held": ("--held",),
            "elsewhere": ("--destination", "dm:bob"),
            "old": ("--older-than", "1h"),
            "code": ("--code", "expired"),
        }.items()
    }
    assert listed == {"aborted": ["a"], "held": ["b"], "elsewhere": [], "old": [], "code": []}


def test_inspect_draws_the_chain_and_shows_why(sent: Terminal) -> None:
    assert sent.run("outbox", "requeue", "--id", "a", "--auto", *WHY, "--yes").code == 0
    middle = sent.run("outbox", "inspect", "a", "--json").json[0]["row"]["superseded_by"]
    assert sent.run("outbox", "requeue", middle, "--new-client-id", "last", *WHY, "--yes").code == 0
    shown = sent.run("outbox", "inspect", "a")
    chain = [line for line in shown.out.splitlines() if "topic:orders" in line and not line.startswith("to ")]
    assert len(chain) == 3
    assert "← this one" in chain[0]
    assert "last" in chain[2]
    assert chain[2].index("0") > chain[1].index("0") > chain[0].index("0")  # each deeper than the one before
    assert shown.out.count("a test wants it") == 2


def test_requeue_with_a_patched_payload(sent: Terminal, tmp_path: Path) -> None:
    patch = tmp_path / "patch.json"
    patch.write_text('{"to": "dm:bob", "body": "patched"}', encoding="utf-8-sig")  # as some editors write it
    done = sent.run("outbox", "requeue", "a", "--patch-payload", patch, *WHY, "--yes", "--json")
    assert done.json[0]["destination"] == "dm:bob"
    assert status(sent, "a") == "aborted"


@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [("abort", (), "aborted"), ("hold", (), "held"), ("release", ("hold",), "released"), ("flush", (), "flushed")],
)
def test_a_verb_on_one_row(verb: str, before: tuple[str, ...], after: str, sent: Terminal) -> None:
    for each in before:
        assert sent.run("outbox", each, "a", *WHY).code == 0
    done = sent.run("outbox", verb, "a", *WHY, "--yes")
    assert done.code == 0
    assert done.out.strip().endswith(after)


def test_many_rows_by_ids_from_standard_input(sent: Terminal) -> None:
    listed = sent.run("outbox", "list", "--json").out
    done = sent.run("outbox", "hold", "-", *WHY, "--yes", stdin=listed)
    assert (done.code, done.out) == (0, "3 held, 0 skipped, 0 failed\n")
    done = sent.run("outbox", "release", "-", *WHY, "--yes", stdin="a\nb\n\n")
    assert (done.code, done.out) == (0, "2 released, 0 skipped, 0 failed\n")


def test_many_rows_by_a_filter_after_a_dry_run(sent: Terminal) -> None:
    plan = sent.run("outbox", "requeue", "--all", "--status", "pending", *WHY, "--dry-run")
    assert (plan.code, plan.out) == (0, "3 would be requeued, 0 skipped, 0 failed\n")
    assert status(sent, "a") == "pending"
    refused = sent.run("outbox", "requeue", "--all", "--status", "pending", *WHY)
    assert refused.code == 2
    assert "3 of 3 rows" in refused.sentence()
    assert status(sent, "a") == "pending"
    done = sent.run("outbox", "requeue", "--all", "--status", "pending", *WHY, "--yes", "--json")
    assert len(done.json[0]["done"]) == 3
    assert status(sent, "a") == "aborted"


def test_ids_that_do_not_exist_are_said_and_the_others_done(sent: Terminal) -> None:
    done = sent.run("outbox", "abort", "a", "nobody", *WHY, "--yes")
    assert "nobody" in done.err
    assert done.out.startswith("1 aborted")
    assert done.code == 1


def test_one_row_is_requeued_without_a_question(sent: Terminal) -> None:
    for row, how in (("a", ("--auto",)), ("b", ("--new-client-id", "b2"))):
        done = sent.run("outbox", "requeue", "--id", row, *how, *WHY)
        assert (done.code, f"{row} requeued as " in done.out, status(sent, row)) == (0, True, "aborted")


def test_a_question_is_asked_on_a_terminal(sent: Terminal) -> None:
    unasked = sent.run("outbox", "abort", "a", *WHY)
    assert (unasked.code, unasked.sentence()) == (2, "Abort a? Add --yes: there is no terminal to ask on")
    refused = sent.at_a_terminal("outbox", "abort", "a", *WHY, answer="n\n")
    assert refused.code == 1
    assert "Abort a?" in refused.out
    assert status(sent, "a") == "pending"
    done = sent.at_a_terminal("outbox", "abort", "a", answer="because\ny\n")
    assert done.code == 0
    assert "because" in sent.run("outbox", "inspect", "a").out


def test_prune_empties_payloads_and_keeps_rows(sent: Terminal) -> None:
    sent.run("outbox", "abort", "a", *WHY, "--yes")
    pruned = sent.run("outbox", "prune", "--older-than", "0s", *WHY, "--yes")
    assert (pruned.code, pruned.out) == (0, "1 payload deleted\n")
    assert len(sent.run("outbox", "list", "--json").json) == 3


@pytest.mark.parametrize(("keep_payloads", "pruned"), [("7", "0 payloads"), ("0", "1 payload")])
async def test_prune_goes_by_the_daemons_own_retention(short_directory: Path, keep_payloads: str, pruned: str) -> None:
    daemon = LoneDaemon(short_directory, OUTBOX_KEEP_PAYLOADS=keep_payloads)
    await daemon.start()
    try:
        user = Terminal(daemon.socket)
        for command in (("send", "topic:orders", "x", "--id", "a"), ("outbox", "abort", "a", *WHY, "--yes")):
            assert (await asyncio.to_thread(user.run, *command)).code == 0
        done = await asyncio.to_thread(user.run, "outbox", "prune", *WHY, "--yes")
        assert (done.code, done.out) == (0, f"{pruned} deleted\n")
    finally:
        daemon.stop()


def test_export_writes_every_row(sent: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    assert "3 rows exported" in sent.run("outbox", "export", "--output", file).err
    assert [json.loads(line)["client_message_id"] for line in file.read_text().splitlines()] == ["a", "b", "c"]
    assert sent.run("outbox", "export", "--json").out == file.read_text()
    assert sent.run("outbox", "export", "--status", "dead").out == ""
    refused = sent.run("outbox", "export", "--output", file)
    assert refused.code == 74
    assert "exists" in refused.sentence()


def test_a_backup_is_a_whole_file_for_its_owner_alone_and_never_overwrites(sent: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "copy.db"
    made = sent.run("outbox", "backup", file, *WHY, "--json")
    assert made.json == [{"file": str(file), "bytes": file.stat().st_size}]
    assert file.stat().st_mode & 0o777 == 0o600
    with closing(sqlite3.connect(f"{file.as_uri()}?immutable=1", uri=True)) as db:
        assert [row for (row,) in db.execute("SELECT client_message_id FROM outbox ORDER BY seq")] == ["a", "b", "c"]
    before = file.read_bytes()
    refused = sent.run("outbox", "backup", file, *WHY)
    assert (refused.code, file.read_bytes()) == (74, before)
    assert "exists; choose another name" in refused.sentence()
    assert sent.run("outbox", "backup", tmp_path / "nowhere" / "copy.db", *WHY).code == 74
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "verb",
    [
        ("outbox", "backup", "-", *WHY),
        ("outbox", "export", "--output", "-"),
        ("send", "dm:bob", "-", "--errors", "-"),
        ("member", "create", "zoe", "--token-out", "-"),
        ("operator", "rotate-token", "zoe", "--yes", "--token-out", "-"),
    ],
    ids=" ".join,
)
def test_a_dash_is_not_the_name_of_a_file(sent: Terminal, verb: tuple[str, ...]) -> None:
    refused = sent.run(*verb)
    assert refused.code == 2
    assert "not the name of a file" in refused.sentence()
    assert not Path("-").exists()


def test_a_backup_that_is_interrupted_leaves_no_file(sent: Terminal, daemon: LoneDaemon, tmp_path: Path) -> None:
    """Whoever makes it is stopped while the copy comes, and so is the daemon."""
    with Client(daemon.socket) as client:
        for _ in client.send_many(SendRequest(to="topic:orders", body="x" * 500_000) for _ in range(100)):
            pass
    for strike, code in (
        (lambda running: running.send_signal(signal.SIGINT), 130),
        (lambda _: daemon.process.kill(), 69),
    ):
        running = sent.start("outbox", "backup", tmp_path / "copy.db", *WHY)
        while not any(file.stat().st_size for file in tmp_path.iterdir()):
            assert running.poll() is None, running.communicate()
        strike(running)
        running.communicate()
        assert (running.returncode, list(tmp_path.iterdir())) == (code, [])


def test_a_backup_is_put_back_under_a_stopped_daemon(daemon: LoneDaemon, sent: Terminal, tmp_path: Path) -> None:
    user, copy = Terminal(daemon.socket, **daemon.environment), tmp_path / "copy.db"
    assert sent.run("outbox", "backup", copy, *WHY).code == 0
    assert sent.run("send", "topic:orders", "later", "--id", "later").code == 0
    assert user.run("outbox", "restore", copy, *WHY, "--yes").code == 69
    daemon.process.kill()
    said = user.run("outbox", "restore", copy, *WHY, "--yes")
    assert (said.code, said.out.startswith(f"restored {copy}; the old outbox is ")) == (0, True)
    asyncio.run(daemon.start())
    assert [row["client_message_id"] for row in sent.run("outbox", "list", "--json").json] == ["a", "b", "c"]
    logged = sent.run("log", "--noun", "outbox", "--json").json
    assert {line["verb"] for line in logged} == {"backup", "restore"}


@pytest.mark.usefixtures("sent")
def test_recover_is_for_a_stopped_daemon(daemon: LoneDaemon) -> None:
    user = Terminal(daemon.socket, **daemon.environment)
    assert user.run("outbox", "recover", "--yes").code == 69
    daemon.process.kill()
    database = daemon.state / "outbox.db"
    before = database.read_bytes()
    done = user.run("outbox", "recover", "--yes", "--json")
    assert done.code == 0, done.err
    assert (done.json[0]["saved"], done.json[0]["missing"]) == (3, 0)
    assert Path(done.json[0]["damaged"]).read_bytes() == before


@pytest.mark.usefixtures("sent")
def test_a_recovery_with_rows_missing_fails_and_the_daemon_starts_once_that_is_accepted(daemon: LoneDaemon) -> None:
    user = Terminal(daemon.socket, **daemon.environment)
    daemon.process.stop()
    database = daemon.state / "outbox.db"
    content = database.read_bytes()
    page = content.index(b"topic:orders") // 4096 * 4096
    database.write_bytes(content[:page] + b"\xa5" * 4096 + content[page + 4096 :])
    recovered = user.run("outbox", "recover", "--yes")
    assert recovered.code == 1
    assert "missing: 3 rows" in recovered.out
    again = user.run("outbox", "recover", "--yes")
    assert (again.code, "missing: 0 rows" in again.out, "--accept-lost-ids" in again.out) == (1, True, True)
    refused = user.shell("postroom daemon run")  # a process of its own: it changes its umask
    assert refused.code == 78
    assert "3 rows are missing" in refused.err
    with subprocess.Popen(
        [sys.executable, "-m", "daemon", "--accept-lost-ids"], env={**os.environ, **daemon.environment}
    ) as accepting:
        with Client(daemon.socket, patience=30) as client:
            client.ready()
        accepting.terminate()
    assert accepting.returncode == 0
    with closing(sqlite3.connect(database)) as db:
        assert db.execute("SELECT missing, accepted_by LIKE 'uid %' FROM outbox_recovery").fetchall() == [
            (3, 1),
            (0, None),
        ]


def test_the_relay_is_paused_and_resumed(terminal: Terminal, daemon: LoneDaemon) -> None:
    assert terminal.run("relay", "pause", "topic:orders", *WHY).out.startswith("paused relaying to topic:orders")
    with Client(daemon.socket) as client:
        while client.health().relay.paused_destinations != ["topic:orders"]:
            pass
        assert terminal.run("relay", "resume", "topic:orders", "--rate", "50/s", *WHY).code == 0
        while client.health().relay.paused_destinations:
            pass
    assert terminal.run("relay", "pause", *WHY, "--json").json[0]["state"]


def test_a_resume_says_what_stays_paused(terminal: Terminal) -> None:
    for paused in ((), ("topic:orders",), ("queue:jobs",)):
        terminal.run("relay", "pause", *paused, *WHY)
    resumed = [terminal.run("relay", "resume", *to, *WHY).out for to in (("topic:orders",), (), ("queue:jobs",))]
    assert resumed == [
        "resumed relaying to topic:orders; all relaying is still paused: `postroom relay resume`\n",
        "resumed relaying; still paused: queue:jobs\n",
        "resumed relaying to queue:jobs\n",
    ]


def test_a_reason_is_required_off_a_terminal(sent: Terminal) -> None:
    commands = (
        ("outbox", "abort", "a", "--yes"),
        ("outbox", "requeue", "a", "--yes"),
        ("outbox", "hold", "a", "--reason", " "),
        ("outbox", "prune", "--older-than", "1d", "--yes"),
        ("relay", "pause"),
        ("relay", "resume"),
    )
    for command in commands:
        refused = sent.run(*command)
        assert refused.code == 2
        assert "--reason" in refused.sentence()
    assert status(sent, "a") == "pending"


@pytest.mark.parametrize("row_id", ["nobody", "%", "' or 1=1", "' or 1=1 --", "*", "../a", "a b", "é", "", "0" * 500])
def test_an_id_that_is_none_finds_nothing(row_id: str, shared_daemon: LoneDaemon) -> None:
    user = Terminal(shared_daemon.socket)
    user.run("send", "topic:orders", "hello", "--id", "real")
    for command in (("inspect",), ("abort", *WHY, "--yes"), ("requeue", *WHY, "--yes")):
        ended = user.run("outbox", *command, "--", row_id)
        assert ended.code in {2, 3}
        assert ended.sentence()
    assert status(user, "real") == "pending"


def test_a_prefix_of_two_rows_is_neither(sent: Terminal) -> None:
    row_id = sent.run("outbox", "list", "--json").json[0]["id"]
    assert sent.run("outbox", "inspect", row_id[:10]).code == 3


def test_rows_that_may_not_be_requeued(sent: Terminal) -> None:
    assert sent.run("outbox", "abort", "a", *WHY, "--yes").code == 0
    assert sent.run("outbox", "requeue", "b", *WHY, "--yes").code == 0
    for row_id in ("a", "b"):  # aborted, superseded
        refused = sent.run("outbox", "requeue", row_id, *WHY, "--yes")
        assert refused.code == 4
        assert "aborted" in refused.sentence()
    taken = sent.run("outbox", "requeue", "c", "--new-client-id", "a", *WHY, "--yes")
    assert taken.code == 4
    assert status(sent, "c") == "pending"


def test_two_requeues_at_once_make_one_successor(sent: Terminal) -> None:
    running = [sent.start("outbox", "requeue", "a", *WHY, "--yes") for _ in range(4)]
    codes = sorted(each.wait(60) for each in running)
    for each in running:
        each.communicate()
    assert codes == [0, 4, 4, 4]
    assert len(sent.run("outbox", "inspect", "a", "--json").json[0]["chain"]) == 2


def test_what_a_row_says_cannot_steer_the_terminal(sent: Terminal) -> None:
    """A reason is free text, and comes back from the log."""
    sent.run("outbox", "hold", "a", "--reason", "\x1b]0;owned\x07 \x1b[2J")
    shown = sent.run("outbox", "inspect", "a").out
    assert "owned" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


def test_rows_that_are_inspected_together_stand_apart(sent: Terminal) -> None:
    shown = sent.run("outbox", "inspect", "a", "b").out
    assert shown.count("\n\nrow ") == 1


@pytest.mark.parametrize("verb", ["inspect", "abort", "requeue"])
def test_a_pipe_without_ids_is_nothing_to_do(sent: Terminal, verb: str) -> None:
    """As in `postroom outbox list --status dead --json | postroom outbox requeue - …` on a good day."""
    done = sent.run("outbox", verb, "-", *(() if verb == "inspect" else (*WHY, "--yes")), stdin="\n")
    assert (done.code, done.out) == (0, "")
    assert "nothing to do" in done.err
    assert status(sent, "a") == "pending"


def test_a_dry_run_needs_no_reason(sent: Terminal) -> None:
    planned = sent.run("outbox", "abort", "--all", "--dry-run")
    assert (planned.code, planned.out) == (0, "3 would be aborted, 0 skipped, 0 failed\n")
    assert status(sent, "a") == "pending"


def test_many_rows_are_changed_in_portions_and_told_as_one(sent: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.outbox._PORTION", 2)
    asked: list[int | None] = []
    portion = AsyncClient.bulk

    async def watched(client: AsyncClient, verb: Any, rows: RowFilter, **options: Any) -> BulkResult:
        asked.append(None if rows.ids is None else len(rows.ids))
        return await portion(client, verb, rows, **options)

    monkeypatch.setattr(AsyncClient, "bulk", watched)
    (done,) = sent.run("outbox", "abort", "--all", "--status", "pending", *WHY, "--yes", "--json").json
    assert asked == [None, 2, 1]
    assert (done["matched"], len(done["done"]), done["skipped"], done["failed"]) == (3, 3, [], [])
    (named,) = sent.run("outbox", "flush", *done["done"], *WHY, "--yes", "--json").json
    assert (named["matched"], len(named["skipped"])) == (3, 3)
