"""Bad input, "CLI and config": what a user can get wrong, and the one sentence that comes back."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from support.mailroom import LoneDaemon
from support.terminal import Terminal

from cli import connect
from cli.noun import BrokerPlace
from postroom._wire.names import MESSAGE_ID

WHY = ("--reason", "test", "--yes")


def test_no_arguments_show_the_help() -> None:
    ended = Terminal().run()
    assert ended.code == 2
    assert "Commands:" in ended.err


def test_every_noun_without_a_verb_shows_its_help() -> None:
    for noun in ("outbox", "relay", "mesh", "member", "topic", "queue", "daemon", "broker"):
        ended = Terminal().run(noun)
        assert (ended.code, ended.out) == (2, "")
        assert "Commands:" in ended.err


@pytest.mark.parametrize("words", [("nonsense",), ("outbox", "nonsense"), ("--nonsense",), ("send", "--nonsense")])
def test_an_unknown_verb_or_option_is_a_usage_error(words: tuple[str, ...]) -> None:
    ended = Terminal().run(*words)
    assert ended.code == 2
    assert "--help" in ended.sentence()


@pytest.mark.parametrize("typed", ["{", '{"x": "a"}', '{"id": 5}', '{"id":' + "[" * 10_000, b"\xff", "a" * 3_000_000])
def test_a_line_of_standard_input_without_an_id_is_named(typed: bytes | str) -> None:
    ended = Terminal().run("outbox", "hold", "-", *WHY, stdin=typed)
    assert (ended.code, "line 1 of standard input has no id" in ended.sentence()) == (2, True)


def test_a_misspelt_verb_is_guessed() -> None:
    assert "'outbox'" in Terminal().run("outbux").sentence()


@pytest.mark.parametrize("noun", ["outbox", "dlq", "worker"])
def test_the_help_of_a_noun_says_of_each_verb_what_it_does_to_the_end(noun: str) -> None:
    _, commands = Terminal().run(noun, "--help").out.split("Commands:")
    assert commands.strip()
    assert "..." not in commands


@pytest.mark.parametrize(
    "words",
    [
        ("outbox", "inspect", "a\udcff"),
        ("outbox", "abort", "a", "--reason", "a\udcff", "--yes"),
        ("outbox", "list", "--code", "a\udcff"),
        ("trace", "a\udcff"),
        ("send", "topic:orders", "hello", "--id", "a\udcff"),
        ("send", "topic:orders", "hello", "--wait", "--reply-to", "a\udcff"),
        ("send", "topic:orders", "hello", "--meta", "k=a\udcff"),
        ("send", "topic:orders", "hello", "--meta", "a\udcff=v"),
    ],
)
def test_an_argument_that_is_no_text_is_a_usage_error(terminal: Terminal, words: tuple[str, ...]) -> None:
    """Bytes that are not UTF-8 arrive as halves of surrogate pairs."""
    ended = terminal.run(*words)
    assert ended.code == 2
    assert r"'a\udcff' is not UTF-8 text" in ended.sentence()
    assert "codec" not in ended.sentence()
    assert "bytes" not in ended.sentence()


@pytest.mark.parametrize(
    "words",
    [
        ("outbox", "list", "--socket", ""),
        ("outbox", "list", "--code="),
        ("outbox", "install", "--database", ""),
        ("down", "--state", ""),
        ("status", "--state", ""),
        ("mesh", "list", "--url", ""),
        ("mesh", "list", "--token-file", ""),
        ("send", "topic:orders", "--file", ""),
        ("send", "topic:orders", "hello", "--mention", "bob", "--mention", ""),
        ("dlq", "list", "--mesh", "", "--json"),
    ],
)
def test_an_option_without_a_value_is_a_usage_error(terminal: Terminal, words: tuple[str, ...]) -> None:
    """As of a variable of a script that is not set: `--state "$DIR"` is not the working directory."""
    ended = terminal.run(*words)
    assert ended.code == 2
    assert "is empty" in ended.sentence()
    assert next(word for word in words if word.startswith("--")).rstrip("=") in ended.sentence()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("outbox list --status pending --state dead", "--status: it is given twice"),
        ("outbox list --held --not-held", "--held: it is given twice"),
        ("dlq drop --all --consumer a --consumer b --yes", "--consumer: it is given twice"),
        ("send topic:orders hello --id a --id b", "--id: it is given twice"),
        ("status --state a --state b", "--state: it is given twice"),
        ("outbox requeue a --auto --new-client-id b", "--auto and --new-client-id cannot be used together"),
        ("install-service --user --system", "--user and --system cannot be used together"),
    ],
)
def test_an_option_that_would_count_for_nothing_is_refused(terminal: Terminal, words: str, said: str) -> None:
    ended = terminal.run(*words.split())
    assert ended.code == 2
    assert said in ended.sentence()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("inbox list --limit ten", "'ten' is not a whole number"),
        ("top --count 1.5", "'1.5' is not a whole number"),
        ("jobs start shop:flow --threshold two", "'two' is not a whole number"),
        ("top --interval 1s", "'1s' is not a number"),
    ],
)
def test_a_number_that_is_none_is_said_to_be_none(terminal: Terminal, words: str, said: str) -> None:
    ended = terminal.run(*words.split())
    assert (ended.code, "range" in ended.err, said in ended.sentence()) == (2, False, True)


def test_a_flag_that_is_given_twice_says_the_same(terminal: Terminal) -> None:
    assert "no broker is configured" in terminal.run("dlq", "list", "--json", "--json").sentence()


def test_an_empty_variable_is_one_that_is_not_set(terminal: Terminal) -> None:
    terminal.environment |= {"POSTROOM_BROKER_URL": "", "POSTROOM_MESH": ""}
    assert "no broker is configured" in terminal.run("dlq", "list").sentence()


@pytest.mark.parametrize(
    "words", [("outbox", "list", "--destination"), ("outbox", "export", "--destination"), ("inbox", "list", "--to")]
)
def test_a_filter_by_what_is_no_destination_is_a_usage_error(terminal: Terminal, words: tuple[str, ...]) -> None:
    ended = terminal.run(*words, "orders")
    assert ended.code == 2
    assert "topic:<name>" in ended.sentence()


def special_files(directory: Path) -> dict[str, Path]:
    """One of each thing that is no patch."""
    directory.joinpath("utf8").write_bytes(b'{"to": "topic:t", "body": "\xff"}')
    directory.joinpath("text").write_text("hello")
    directory.joinpath("empty").touch()
    directory.joinpath("misspelt").write_text('{"to": "topic:t", "boddy": 1}')
    directory.joinpath("twice").write_text('{"to": "topic:t", "meta": {"a": 1, "a": 2}}')
    directory.joinpath("elsewhere").write_text('{"to": "nowhere"}')
    directory.joinpath("with-id").write_text('{"to": "topic:t", "client_message_id": "x"}')
    os.mkfifo(directory / "fifo")
    with directory.joinpath("gigabyte").open("wb") as stream:
        stream.truncate(1024**3)
    names = ("missing", "utf8", "text", "empty", "misspelt", "twice", "elsewhere", "with-id", "fifo", "gigabyte")
    return {**{name: directory / name for name in names}, "directory": directory, "zero": Path("/dev/zero")}


def test_a_patch_that_is_none_changes_nothing(terminal: Terminal, tmp_path: Path) -> None:
    terminal.run("send", "topic:orders", "hello", "--id", "a")
    for name, file in special_files(tmp_path).items():
        refused = terminal.run("outbox", "requeue", "a", "--patch-payload", file, *WHY)
        assert refused.code == 2, name
        assert refused.sentence()
    assert terminal.run("outbox", "inspect", "a", "--json").json[0]["row"]["status"] == "pending"


@pytest.mark.parametrize("command", ["outbox list", "outbox export", "outbox inspect shown", "--help"])
def test_output_that_cannot_be_written_is_an_error(command: str, shared_daemon: LoneDaemon) -> None:
    user = Terminal(shared_daemon.socket)
    user.run("send", "topic:orders", "hello", "--id", "shown")
    for redirection in (">/dev/full", ">&-"):
        ended = user.shell(f"postroom {command} {redirection}")
        assert ended.code == 74, redirection
        assert "Traceback" not in ended.err
        assert "Exception ignored" not in ended.err


def test_what_a_command_found_is_not_in_its_exit_code_alone_where_it_cannot_be_written() -> None:
    nowhere = Terminal(Path("/nonexistent/nobody.sock"))
    assert nowhere.shell("postroom status").code == 69
    for redirection in (">/dev/full", ">&-"):
        ended = nowhere.shell(f"postroom status {redirection}")
        assert (ended.code, ended.sentence()[:24]) == (74, "standard input or output"), redirection


@pytest.mark.parametrize(("command", "code"), [("outbox inspect nowhere", 3), ("worker run --config /nowhere", 78)])
def test_an_error_that_cannot_be_written_keeps_its_code(command: str, code: int, shared_daemon: LoneDaemon) -> None:
    terminal = Terminal(shared_daemon.socket)
    assert [terminal.shell(f"postroom {command} {where}").code for where in ("", "2>/dev/full", "2>&-")] == [code] * 3


def test_a_message_is_kept_even_where_its_receipt_cannot_be_written(shared_daemon: LoneDaemon) -> None:
    terminal = Terminal(shared_daemon.socket)
    for number, redirection in enumerate((">/dev/full", ">&-", "2>&-", ">&- 2>&- <&-")):
        terminal.shell(f"postroom send topic:orders hello --id s{number} {redirection}")
        assert terminal.run("outbox", "inspect", f"s{number}").code == 0


def test_a_reader_that_goes_away_is_no_error_worth_a_word(terminal: Terminal) -> None:
    terminal.run("send", "topic:orders", "-", stdin="x\n" * 3000)
    ended = terminal.shell("set -o pipefail; postroom outbox list --all --json | head -n 1 | wc -l")
    assert (ended.out.strip(), ended.err) == ("1", "")
    assert ended.code == 141


@pytest.mark.parametrize(
    "command",
    ["send topic:orders -", "outbox hold - --reason x --yes"],
)
def test_a_closed_standard_input_is_an_error(command: str, shared_daemon: LoneDaemon) -> None:
    ended = Terminal(shared_daemon.socket).shell(f"postroom {command} <&-")
    assert ended.code in {2, 74}
    assert ended.sentence()


def test_ctrl_c_while_the_command_is_imported_is_no_traceback(tmp_path: Path) -> None:
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'cli.output':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from postroom_server import main\n"
        "main()\n"
    )
    ended = Terminal().shell(f"{sys.executable} {script}")
    assert (ended.code, ended.err) == (130, "postroom: interrupted\n")


def test_a_working_directory_that_was_removed_is_named(tmp_path: Path) -> None:
    ended = Terminal().shell(f"cd {tmp_path} && rmdir {tmp_path} && postroom down --state mailroom")
    assert ended.code == 74
    assert ended.sentence() == "the working directory has been removed: change to another one"


@pytest.mark.parametrize("locale", ["C", "en_US.ISO-8859-1"])
def test_any_locale_will_do(locale: str, shared_daemon: LoneDaemon) -> None:
    user = Terminal(shared_daemon.socket, LC_ALL=locale, LANG=locale)
    assert user.process("send", "topic:orders", "ü€", "--id", locale, "--meta", "ß=ü").code == 0
    assert user.process("outbox", "hold", locale, "--reason", "wegen Überfüllung").code == 0
    assert user.process("outbox", "inspect", locale).code == 0
    assert user.process("outbox", "inspect", "ü").code in {2, 3}


def test_no_home_and_no_runtime_directory(daemon: LoneDaemon) -> None:
    bare = Terminal()
    bare.environment = {"PATH": os.environ["PATH"]}
    ended = bare.run("outbox", "list")
    assert ended.code == 69
    assert "POSTROOM_SOCKET" in ended.sentence()
    assert bare.run("--help").code == 0
    assert bare.run("doctor", "--socket", daemon.socket).code == 0
    assert bare.run("outbox", "list", "--socket", daemon.socket).code == 0


def test_an_absent_daemon_is_said_in_one_sentence(nobody: Terminal) -> None:
    for command in (("outbox", "list"), ("send", "topic:orders", "hello"), ("send", "topic:orders", "-")):
        ended = nobody.run(*command, stdin="line\n")
        assert ended.code == 69
        assert "postroom up" in ended.err
        assert "Traceback" not in ended.err


def test_a_hung_daemon_is_given_up(short_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect.with_daemon, "__kwdefaults__", {"patience": 0.1, "timeout": 0.1})
    path = short_directory / "hung.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        ended = Terminal(path).run("outbox", "list")
    assert ended.code == 69
    assert "did not answer in time" in ended.sentence()


@contextmanager
def hung_broker(directory: Path) -> Iterator[Terminal]:
    """An operator at a broker whose kernel accepts connections, and that answers none."""
    token = directory / "token"
    token.write_text("a-token")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        yield Terminal(POSTROOM_BROKER_URL=url, POSTROOM_ADMIN_TOKEN_FILE=str(token), POSTROOM_MESH="demo")


def test_a_start_of_a_job_without_an_answer_says_how_to_repeat_it_without_a_second_job(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BrokerPlace.ask, "__kwdefaults__", {"patience": 0.1, "timeout": 0.1})
    with hung_broker(short_directory) as there:
        ended = there.run("jobs", "start", "elsewhere", "--first", "extract")
    assert ended.code == 69
    assert re.search("repeat it with --job [0-9a-f-]{36}, which does not start a second job", ended.sentence())


def test_a_hung_broker_is_given_up_before_the_time_that_a_request_for_many_things_may_take(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cli.noun.TIMEOUT", 0.1)
    with hung_broker(short_directory) as there:
        for command in (["list"], ["drop", "a", "--reason", "a test", "--yes"]):
            began = time.monotonic()
            ended = there.run("dlq", *command)
            assert (ended.code, time.monotonic() - began < 60) == (69, True)
            assert "did not answer in time: it hangs" in ended.sentence()


async def test_a_daemon_of_another_version_is_said_to_be_one(short_directory: Path) -> None:
    path = short_directory / "old.sock"

    async def answer(request: web.Request) -> web.StreamResponse:
        old = {"name": "postroomd", "version": "9.9.9", "mesh": "demo"}
        if request.path == "/v1/version":
            return web.Response(body=msgspec.json.encode(old), content_type="application/json")
        if request.path == "/v1/health":
            return web.Response(body=b'{"status": "splendid"}', content_type="application/json")
        return web.Response(status=404, text="no such page")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(path)).start()
        listed = await asyncio.to_thread(Terminal(path).run, "outbox", "list")
        doctor = await asyncio.to_thread(Terminal(path).run, "doctor", "--json")
    finally:
        await runner.cleanup()
    assert listed.code == 69
    assert "another version" in listed.sentence()
    assert doctor.code == 1


@pytest.mark.parametrize("kind", ["a path of 108 bytes", "a symlink to nothing", "a plain file", "a directory"])
def test_a_socket_that_is_none(kind: str, short_directory: Path) -> None:
    path = short_directory / "s"
    if kind == "a path of 108 bytes":
        path = short_directory / ("s" * (107 - len(str(short_directory))))
        assert len(str(path)) == 108
    elif kind == "a symlink to nothing":
        path.symlink_to(short_directory / "nothing")
    elif kind == "a plain file":
        path.touch()
    else:
        path.mkdir()
    ended = Terminal(path).run("send", "topic:orders", "hello")
    assert ended.code in {69, 77}
    assert str(path) in ended.sentence()


def test_a_socket_that_is_a_link_to_the_daemons_works(daemon: LoneDaemon, short_directory: Path) -> None:
    link = short_directory / "link"
    link.symlink_to(daemon.socket)
    assert Terminal(link).run("outbox", "list").code == 0


GOOD = 'mesh = "demo"\n[broker]\nurl = "http://127.0.0.1:9"\ntoken_file = "t"\n'
CONFIGS = {
    "missing": None,
    "empty": "",
    "unknown key": 'mesh = "demo"\ncolour = "red"\n',
    "wrong type": GOOD.replace('"demo"', "7"),
    "out of range": f"{GOOD}[relay]\nposts_at_once = 0\n",
    "duplicate table": "[broker]\n[broker]\n",
    "no TOML": "{",
}
NAMED = {"unknown key": "colour", "wrong type": "mesh", "out of range": "relay.posts_at_once", "empty": "mesh"}


@pytest.mark.parametrize("kind", [*CONFIGS, "directory"])
@pytest.mark.parametrize("verb", ["run", "check", "rotate-token"])
def test_a_config_that_is_none_is_said_with_its_path(kind: str, verb: str, tmp_path: Path) -> None:
    file = tmp_path / "daemon.toml"
    if kind == "directory":
        file = tmp_path
    elif (text := CONFIGS[kind]) is not None:
        file.write_text(text)
    ended = Terminal().run("daemon", verb, "--config", file)
    assert ended.code == 78
    assert NAMED.get(kind, str(file)) in ended.sentence()


@pytest.mark.parametrize("kind", ["open", "pipe"])
def test_a_secret_that_others_can_read_or_that_is_a_pipe_is_found(daemon: LoneDaemon, kind: str) -> None:
    token = Path(daemon.environment["POSTROOM_DAEMON_BROKER_TOKEN_FILE"])
    token.chmod(0o644)
    if kind == "pipe":
        token.unlink()
        os.mkfifo(token, 0o600)
    user = Terminal(daemon.socket, **daemon.environment)
    found = [each for each in user.run("daemon", "check", "--json").json if each.get("subject") == "broker.token_file"]
    assert found[0]["verdict"] == "failed"
    assert {"open": "chmod 600", "pipe": "not a regular file"}[kind] in found[0]["detail"] + found[0]["remedy"]


def test_umask_000_makes_nothing_readable_for_others(daemon: LoneDaemon) -> None:
    user = Terminal(daemon.socket, **daemon.environment)
    ended = user.shell("umask 000; postroom daemon rotate-token")
    assert ended.code == 0
    token = daemon.state / "local.token"
    assert token.stat().st_mode & 0o777 == 0o600


def test_debug_shows_the_traceback(nobody: Terminal) -> None:
    assert "Traceback" in nobody.run("--debug", "outbox", "list").err


def test_help_imports_no_server_code_and_no_http() -> None:
    program = "import sys; from cli.main import run; run(['--help']); print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run(
        ["python3" if False else __import__("sys").executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.split(".")[0] for name in done.stderr.split()}
    assert not loaded & {"aiohttp", "asyncpg", "broker", "daemon", "ipc", "outbox", "redis", "rich"}


def test_the_version_is_told() -> None:
    assert Terminal().run("--version").out == f"postroom {version('postroom-server')}\n"


def test_completion_names_the_verbs() -> None:
    user = Terminal(_POSTROOM_COMPLETE="complete_bash", COMP_WORDS="postroom outbox in", COMP_CWORD="2")
    assert "inspect" in user.shell("postroom").out


def test_no_color_is_obeyed(terminal: Terminal) -> None:
    terminal.run("send", "topic:orders", "hello")
    coloured = terminal.at_a_terminal("outbox", "list")
    plain = terminal.at_a_terminal("outbox", "list", NO_COLOR="1")
    assert "\x1b[33mpending" in coloured.out
    assert "\x1b[33m" not in plain.out
    assert "pending" in plain.out


def test_colours_are_for_terminals_that_have_them_and_an_empty_no_color_is_none(terminal: Terminal) -> None:
    for words in (("status",), ("trace", "a")):
        terminal.run("send", "topic:orders", "hello", "--id", "a")
        assert "\x1b[3" in terminal.at_a_terminal(*words, NO_COLOR="").out, words
        assert "\x1b" not in terminal.at_a_terminal(*words, TERM="dumb").out, words


def test_a_message_that_may_have_been_kept_can_be_sent_again_by_its_id(
    short_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect.with_daemon, "__kwdefaults__", {"patience": 0.1, "timeout": 0.1})
    path = short_directory / "hung.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        ended = Terminal(path).run("send", "topic:orders", "hello")
        named = Terminal(path).run("send", "topic:orders", "hello", "--id", "order-17")
    assert ended.code == 69
    assert MESSAGE_ID.allows(ended.sentence().partition("--id ")[2].partition(",")[0])
    assert "repeat it with --id order-17" in named.sentence()
