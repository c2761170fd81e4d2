"""`postroom send`, against a real daemon."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from support.mailroom import LoneDaemon
from support.terminal import SECONDS, Terminal

from postroom import Client
from postroom.errors import Problem


def rows(daemon: LoneDaemon) -> int:
    with Client(daemon.socket) as client:
        return sum(client.health().rows.values())


def test_one_message_is_sent_and_its_id_printed(terminal: Terminal) -> None:
    sent = terminal.run("send", "topic:orders", "hello", "--meta", "a=1", "--meta", "b=x=y", "--mention", "bob")
    assert (sent.code, sent.err) == (0, "")
    row_id, status = sent.out.split()
    assert status == "queued"
    assert terminal.run("outbox", "inspect", row_id, "--json").json[0]["row"]["destination"] == "topic:orders"


def test_the_receipt_as_json(terminal: Terminal) -> None:
    sent = terminal.run("send", "dm:bob", "hello", "--id", "a", "--json", "--priority", "now", "--reply-to", "m")
    assert sent.json == [{"client_message_id": "a", "outbox_id": sent.json[0]["outbox_id"], "status": "queued"}]


@pytest.mark.parametrize(
    "line",
    [
        ("topic:orders", "hello", "--id", "a"),
        ("topic:orders", "hello", "--id", "a", "--json"),
        ("dm:bob", "hello", "--id", "b", "--priority", "low", "--reply-to", "m"),
        ("topic:orders", "\udcff\0", "--id", "c"),
        ("topic:orders", "other", "--id", "taken"),
        ("orders", "hello"),
        ("topic:", "hello"),
        ("topic:orders", "hello", "--id", "a b"),
        ("topic:\udcff", "hello"),
        ("topic:orders", "hello", "--id", "\udcff"),
        ("topic:orders", "hello", "--id", "a", "--reply-to", "m\n"),
    ],
)
def test_a_plain_send_is_the_same_without_typer(terminal: Terminal, daemon: LoneDaemon, line: tuple[str, ...]) -> None:
    terminal.run("send", "topic:orders", "hello", "--id", "taken")
    first = terminal.run("send", *line)
    again = terminal.run("send", *line, f"--socket={daemon.socket}")  # a form that only Typer reads
    assert first.code == again.code
    assert first.err == again.err
    assert first.out == again.out.replace(" (duplicate)", "").replace(',"duplicate":true', "")


@pytest.mark.parametrize(
    ("words", "more"), [(("send", "topic:orders", "hello"), "typer"), (("outbox", "list", "--json"), "ssl")]
)
def test_what_the_daemon_answers_at_once_is_asked_without_what_takes_long_to_import(
    terminal: Terminal, daemon: LoneDaemon, words: tuple[str, ...], more: str
) -> None:
    program = "import sys; from cli.main import run; code = run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", f"{program}; sys.exit(code)", *words],
        env={**terminal.environment, "POSTROOM_SOCKET": str(daemon.socket)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"aiohttp", "asyncio", "opentelemetry", "pydantic", "rich", more} & set(done.stderr.split())


def test_the_same_id_again_is_a_duplicate_and_other_content_a_conflict(terminal: Terminal) -> None:
    assert terminal.run("send", "topic:orders", "hello", "--id", "a").code == 0
    assert "duplicate" in terminal.run("send", "topic:orders", "hello", "--id", "a").out
    other = terminal.run("send", "topic:orders", "other", "--id", "a")
    assert other.code == 4
    assert "use a new id" in other.sentence()


def test_a_line_of_standard_input_is_a_message(terminal: Terminal, daemon: LoneDaemon) -> None:
    sent = terminal.run("send", "topic:orders", "-", stdin="one\ntwo\r\n\nthree")
    assert (sent.code, sent.out) == (0, "3 queued, 0 duplicates, 0 failed, 1 blank line skipped\n")
    assert rows(daemon) == 3
    assert terminal.run("send", "topic:orders", "-", stdin="\none\n\n").out.endswith(", 2 blank lines skipped\n")


def test_the_mark_that_some_editors_put_before_a_text_is_no_part_of_the_first_message(terminal: Terminal) -> None:
    mark = "\N{ZERO WIDTH NO-BREAK SPACE}"
    assert terminal.run("send", "topic:orders", "-", "--id-prefix", "p", stdin=f"{mark}one\n{mark}two\n").code == 0
    for number, body in ((1, "one"), (2, f"{mark}two")):  # elsewhere it is a character like any other
        again = terminal.run("send", "topic:orders", body, "--id", f"p-{number:09d}")
        assert again.out.endswith("(duplicate)\n"), again.err
    assert terminal.run("send", "--ndjson", stdin=f'{mark}{{"to":"dm:bob"}}\n').code == 0
    assert terminal.run("send", "topic:orders", "-", stdin=f"{mark}\n").out.endswith("1 blank line skipped\n")


@pytest.mark.parametrize("prefix", ["", "a b", "x" * 119])
def test_a_prefix_that_begins_no_id_is_refused_before_a_line_is_read(
    terminal: Terminal, daemon: LoneDaemon, prefix: str
) -> None:
    for how in (("topic:orders", "-"), ("--ndjson",)):
        refused = terminal.run("send", *how, "--id-prefix", prefix, stdin='{"to":"topic:orders"}\n')
        assert (refused.code, refused.out) == (2, "")
        assert "--id-prefix" in refused.err
    assert rows(daemon) == 0


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-", "--id", "a"], "--id is for one message: omit it to send many lines"),
        (["hello", "--id-prefix", "a"], "--id-prefix is for many lines: omit it to send one message"),
    ],
)
def test_an_option_that_would_be_overlooked_is_refused(terminal: Terminal, words: list[str], sentence: str) -> None:
    refused = terminal.run("send", "topic:orders", *words, stdin="one\n")
    assert (refused.code, refused.err) == (2, f"postroom: {sentence}\n")


def test_a_run_with_an_id_prefix_can_be_repeated(terminal: Terminal, daemon: LoneDaemon, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(f"line {n}\n" for n in range(5000)))
    first = terminal.run("send", "topic:orders", "--file", file, "--id-prefix", "run-1")
    again = terminal.run("send", "topic:orders", "--file", file, "--id-prefix", "run-1")
    assert first.out == "5,000 queued, 0 duplicates, 0 failed\n"
    assert again.out == "0 queued, 5,000 duplicates, 0 failed\n"
    assert rows(daemon) == 5000
    assert terminal.run("outbox", "inspect", "run-1-000005000").code == 0


def test_ndjson_lines_say_everything_themselves(terminal: Terminal) -> None:
    lines = [
        {"to": "topic:orders", "body": "a", "client_message_id": "own", "meta": {"n": 1}},
        {"to": "dm:bob", "body_base64": "AAE="},
    ]
    sent = terminal.run("send", "--ndjson", "--id-prefix", "p", stdin="\n".join(map(json.dumps, lines)))
    assert (sent.code, sent.out) == (0, "2 queued, 0 duplicates, 0 failed\n")
    assert terminal.run("outbox", "inspect", "own").code == 0
    assert terminal.run("outbox", "inspect", "p-000000002").code == 0


@pytest.mark.parametrize("line", [("--ndjson", "-"), ("-", "--ndjson"), ("--ndjson", "--file", "-")])
def test_ndjson_is_read_from_standard_input_however_that_is_named(terminal: Terminal, line: tuple[str, ...]) -> None:
    sent = terminal.run("send", *line, stdin=b'{"to":"dm:bob"}\n')
    assert (sent.code, sent.out) == (0, "1 queued, 0 duplicates, 0 failed\n"), sent.err


@pytest.mark.parametrize("line", [("topic:orders", "-"), ("topic:orders",), ("-", "x"), ("-", "--file", "-")])
def test_ndjson_beside_a_destination_or_a_second_source_is_explained(terminal: Terminal, line: tuple[str, ...]) -> None:
    assert "--ndjson each line is a whole message" in terminal.run("send", "--ndjson", *line).sentence()


def test_failed_lines_are_named_and_the_others_sent(terminal: Terminal, daemon: LoneDaemon) -> None:
    lines = [
        b'{"to":"topic:orders"}',
        b"{",
        b'{"to":"nowhere"}',
        b'{"to":"topic:orders","boddy":1}',
        b'{"to":"dm:bob"}',
    ]
    sent = terminal.run("send", "--ndjson", stdin=b"\n".join(lines))
    assert (sent.code, sent.out) == (1, "2 queued, 0 duplicates, 3 failed\n")
    assert sorted(line.split(":")[0] for line in sent.err.splitlines()) == ["line 2", "line 3", "line 4"]
    assert rows(daemon) == 2


def test_failed_lines_go_to_a_file_where_one_is_named(terminal: Terminal, tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    sent = terminal.run("send", "--ndjson", "--errors", errors, stdin=b'{"to":"nowhere"}\n{"to":"dm:bob"}\n')
    assert (sent.code, sent.err) == (1, "")
    (failure,) = [json.loads(line) for line in errors.read_text().splitlines()]
    assert (failure["line"], failure["code"]) == (1, "invalid_destination")


@pytest.mark.parametrize("by", ["name", "link", "standard input"])
def test_the_file_that_is_read_is_not_written_to(terminal: Terminal, tmp_path: Path, by: str) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b'{"to":"dm:bob"}\n')
    errors = tmp_path / "errors" if by == "link" else lines
    if by == "link":
        errors.symlink_to(lines)
    if by == "standard input":
        with lines.open("rb") as stdin:
            running = terminal.start("send", "--ndjson", "--errors", errors, stdin=stdin)
            _, said = running.communicate(timeout=60)
        code, sentence = running.returncode, said.decode()
    else:
        sent = terminal.run("send", "--ndjson", "--file", lines, "--errors", errors)
        code, sentence = sent.code, sent.sentence()
    assert (code, lines.read_bytes()) == (2, b'{"to":"dm:bob"}\n')
    assert f"{errors} is the file that is read" in sentence


def test_a_file_for_failed_lines_that_takes_none_is_named(terminal: Terminal, daemon: LoneDaemon) -> None:
    sent = terminal.run("send", "--ndjson", "--errors", "/dev/full", stdin=b'{"to":"dm:bob"}\n{\n')
    assert (sent.code, sent.out) == (74, "1 queued, 0 duplicates, 1 failed\n")
    assert sent.sentence().startswith("cannot write /dev/full: No space left on device")
    assert rows(daemon) == 1


def test_results_of_many_lines_as_json(terminal: Terminal) -> None:
    sent = terminal.run("send", "--ndjson", "--json", stdin=b'{"to":"dm:bob","client_message_id":"a"}\n{"to":"x"}\n')
    assert sent.code == 1
    by_line = {each["line"]: each for each in sent.json}
    assert by_line[1]["result"]["client_message_id"] == "a"
    assert by_line[2]["problem"]["code"] == "invalid_destination"
    assert "1 queued, 0 duplicates, 1 failed" in sent.err


def test_bytes_that_are_no_text_are_sent_as_they_are(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "picture"
    file.write_bytes(b"\x00\xff" * 10)
    assert terminal.run("send", "topic:orders", "--body-file", file, "--id", "a").code == 0
    assert terminal.run("send", "topic:orders", "-", stdin=b"\xff\xfe\n").code == 0
    assert terminal.run("send", "topic:orders", "\udcff").code == 0  # as Python reads the byte FF of a command line
    assert terminal.run("outbox", "inspect", "a", "--json").json[0]["row"]["payload_bytes"] > 0


def test_one_message_comes_from_a_pipe_as_from_a_file(terminal: Terminal, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, b"two\nlines")
    os.close(write)
    file = tmp_path / "body"
    file.write_bytes(b"two\nlines")
    for number, (name, stdin) in enumerate([(file, b""), ("-", b"two\nlines"), (f"/dev/fd/{read}", b"")]):
        sent = terminal.run("send", "topic:orders", "--body-file", name, "--id", "a", stdin=stdin)
        assert (sent.code, sent.err) == (0, "")
        assert sent.out == ("a queued\n" if number == 0 else "a queued (duplicate)\n")  # the same content
    os.close(read)


def test_waiting_ends_with_the_rows_state(terminal: Terminal) -> None:
    sent = terminal.run("send", "topic:orders", "hello", "--id", "a", "--wait", "--timeout", "1s")
    assert sent.code == 75
    assert "is kept" in sent.sentence()


def test_the_command_that_helps_can_be_pasted_whatever_the_id(terminal: Terminal) -> None:
    sent = terminal.run("send", "topic:orders", "hello", "--id", "-a", "--wait", "--timeout", "1s")
    (helps,) = re.findall("`postroom (.*)`", sent.sentence())
    assert "client_message_id" in terminal.run(*helps.split(), "--json").out


@asynccontextmanager
async def daemon_that_waits(path: Path, wait: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[None]:
    """Serve a daemon that queues each message as `a`, and answers the question for its outcome by `wait`."""

    async def accept(_: web.Request) -> web.Response:
        receipt = b'{"client_message_id":"a","outbox_id":"row","status":"queued"}'
        return web.Response(status=202, body=receipt, content_type="application/json")

    app = web.Application()
    app.add_routes([web.post("/v1/send", accept), web.get("/v1/sends/a", wait)])
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        yield
    finally:
        await runner.cleanup()


KEPT = "a is kept, and the daemon keeps trying: `postroom outbox inspect row` shows how far it is"


async def test_ctrl_c_while_it_waits_says_that_the_message_is_kept(short_directory: Path) -> None:
    path, waiting, stop = short_directory / "d.sock", asyncio.Event(), asyncio.Event()

    async def keep_waiting(_: web.Request) -> web.Response:
        waiting.set()
        await stop.wait()
        return web.Response(status=404)

    async with daemon_that_waits(path, keep_waiting):
        running = Terminal(path).start("send", "topic:orders", "hello", "--id", "a", "--wait")
        try:
            await asyncio.wait_for(waiting.wait(), SECONDS)
            running.send_signal(signal.SIGINT)
            out, err = await asyncio.to_thread(running.communicate, timeout=SECONDS)
        finally:
            stop.set()
    assert (running.returncode, out) == (130, b"")
    assert err.decode().splitlines() == [KEPT, "postroom: interrupted"]


async def test_a_daemon_that_stops_while_it_waits_is_waited_for_and_the_message_said_to_be_kept(
    short_directory: Path,
) -> None:
    path, asked = short_directory / "d.sock", list[str]()

    async def stopping(_: web.Request) -> web.Response:
        asked.append("once more")
        problem = Problem(
            type="", title="", status=503, detail="it stops", code="stopping", retryable=True, retry_after=3
        )
        body = msgspec.json.encode(problem)
        return web.Response(status=503, body=body, content_type="application/problem+json")

    async with daemon_that_waits(path, stopping):
        arguments = ("send", "topic:orders", "hello", "--wait", "--timeout", "5s")
        ended = await asyncio.to_thread(Terminal(path).process, *arguments)
    assert (ended.code, len(asked)) == (75, 2)
    assert ended.err.splitlines() == [KEPT, "postroom: it stops"]


def test_waiting_for_a_row_that_an_operator_retires_fails(terminal: Terminal) -> None:
    terminal.run("send", "topic:orders", "hello", "--id", "a")
    waiting = terminal.start("send", "topic:orders", "hello", "--id", "a", "--wait")
    terminal.run("outbox", "abort", "a", "--reason", "test", "--yes")
    _, err = waiting.communicate(timeout=60)
    assert waiting.returncode in {1, 4}, err  # 4: it was retired before the second send arrived


def test_a_body_that_is_too_large_is_a_usage_error(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "large"
    file.write_bytes(b"x" * (1024 * 1024 + 1))
    sent = terminal.run("send", "topic:orders", "--body-file", file)
    assert sent.code == 2
    assert "limit" in sent.sentence()


def test_a_line_beyond_every_limit_fails_alone(terminal: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    with file.open("wb") as stream:
        stream.write(b"first\n")
        stream.seek(64 * 1024 * 1024, os.SEEK_CUR)  # 64 MiB of NUL, sparse
        stream.write(b"\nlast\n")
    sent = terminal.run("send", "topic:orders", "--file", file)
    assert (sent.code, sent.out) == (1, "2 queued, 0 duplicates, 1 failed\n")
    assert sent.err.startswith("line 2: ")


def test_a_line_without_an_end_is_the_last_that_is_read(terminal: Terminal) -> None:
    sent = terminal.process("send", "topic:orders", "--file", "/dev/zero")
    assert (sent.code, sent.out) == (1, "0 queued, 0 duplicates, 1 failed\n")
    refusal, end = sent.err.splitlines()
    assert refusal.startswith("line 1: ")
    assert end.startswith("postroom: line 1 does not end within 256 MiB: it is the last that was read")


def test_ctrl_c_half_way_says_how_far_it_was(terminal: Terminal, daemon: LoneDaemon) -> None:
    running = terminal.start("send", "topic:orders", "-", "--json", "--id-prefix", "p", stdin=subprocess.PIPE)
    assert running.stdin is not None
    assert running.stdout is not None
    running.stdin.write(b"one\ntwo\n")
    running.stdin.flush()
    first = running.stdout.readline()
    running.send_signal(signal.SIGINT)
    assert running.wait(SECONDS) == 130  # while its input goes on, as at a terminal
    out, err = running.communicate()
    assert b"Traceback" not in err
    assert b"interrupted" in err
    answered = [json.loads(line) for line in (first + out).splitlines()]
    assert f"{len(answered)} queued" in err.decode()
    assert rows(daemon) >= len(answered)
    again = terminal.run("send", "topic:orders", "-", "--id-prefix", "p", stdin="one\ntwo\n")
    assert again.code == 0
    assert rows(daemon) == 2


def test_progress_is_drawn_on_a_terminal_only_and_results_go_to_standard_output(
    terminal: Terminal, tmp_path: Path
) -> None:
    file = tmp_path / "lines"
    file.write_text("x\n" * 2000)
    drawn = terminal.at_a_terminal("send", "topic:orders", "--file", str(file))
    assert drawn.code == 0
    assert "2,000 queued, 0 duplicates, 0 failed" in drawn.out
    plain = terminal.run("send", "topic:orders", "--file", file)
    assert plain.err == ""


def test_a_pipe_shows_how_many_and_how_fast_on_a_terminal(terminal: Terminal) -> None:
    master, slave = pty.openpty()
    running = terminal.start("send", "topic:orders", "-", stdin=subprocess.PIPE, stderr=slave)
    os.close(slave)
    assert running.stdin is not None
    seen = b""
    while b" a second" not in seen:  # a line every moment, for as long as nothing is shown
        running.stdin.write(b"x\n")
        if select.select([master], [], [], 0.05)[0]:
            seen += os.read(master, 65536)
    out, _ = running.communicate(timeout=60)
    assert b"queued, 0 duplicates, 0 failed, " in seen
    assert out.endswith(b" queued, 0 duplicates, 0 failed\n")
    assert b"\x1b" not in out
    os.close(master)


def test_a_million_lines_do_not_lie_in_memory(terminal: Terminal, tmp_path: Path) -> None:
    """A tenth of a million here, as lines that fail at once: what would pile up is then the greatest."""
    errors = tmp_path / "errors"
    running = terminal.start("send", "--ndjson", "--errors", errors, stdin=subprocess.PIPE)
    assert running.stdin is not None
    running.stdin.write(b'{"to":"topic:orders"}\n' * 50_000 + b"{\n" * 100_000)
    running.stdin.flush()  # all but what the pipe and the buffers hold has been taken by now
    status = Path(f"/proc/{running.pid}/status").read_text()
    (most,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))
    out, _ = running.communicate(timeout=60)
    assert out == b"50,000 queued, 0 duplicates, 100,000 failed\n"
    assert most < 100 * 1024  # KiB
    assert errors.read_text().count("\n") == 100_000


@pytest.mark.parametrize(
    "arguments",
    [
        ("send",),
        ("send", "topic:orders"),
        ("send", "nowhere", "x"),
        ("send", "topic:*", "x"),
        ("send", "topic:orders", "x", "--file", "/dev/null"),
        ("send", "topic:orders", "x", "--id", ""),
        ("send", "topic:orders", "x", "--id", "a b"),
        ("send", "topic:orders", "x", "--meta", "novalue"),
        ("send", "topic:orders", "x", "--meta", "a=1", "--meta", "a=2"),
        ("send", "topic:orders", "x", "--meta", "mentions=bob"),
        ("send", "topic:orders", "x", "--priority", "urgent"),
        ("send", "topic:orders", "x", "--not-before", "tomorrow"),
        ("send", "topic:orders", "x", "--not-before", "2026-11-21T09:00:00"),
        ("send", "topic:orders", "x", "--id-prefix", "p"),
        ("send", "topic:orders", "x", "--errors", "/dev/null"),
        ("send", "topic:orders", "-", "--id", "a"),
        ("send", "topic:orders", "-", "--wait"),
        ("send", "topic:orders", "--ndjson", "-"),
        ("send", "--ndjson", "--meta", "a=1"),
        ("send", "topic:orders", "--file", "/nonexistent"),
        ("send", "topic:orders", "--file", "/"),
        ("send", "topic:orders", "--body-file", "/dev/zero"),
        ("send", "topic:orders", "-", "--errors", "/nonexistent/x"),
        ("send", "topic:orders", "x", "--wait", "--timeout", "soon"),
        ("send", "topic:orders", "x", "--timeout", "5s"),
        ("send", "topic:orders", "-", "--timeout", "5s"),
    ],
    ids=" ".join,
)
def test_a_command_line_that_makes_no_sense_sends_nothing(
    arguments: tuple[str, ...], shared_daemon: LoneDaemon
) -> None:
    before = rows(shared_daemon)
    ended = Terminal(shared_daemon.socket).run(*arguments)
    assert ended.code == 2
    assert ended.sentence()
    assert rows(shared_daemon) == before
