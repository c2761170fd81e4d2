import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from support.waiting import wait_until
from support.zygote import shared

from postroom.chassis.logs import mask

HEAD = "import structlog; from postroom.chassis import logs; logs.configure('info'); log = structlog.get_logger()\n"


def logged(script: str) -> list[dict[str, object]]:
    with TemporaryFile() as said:
        assert shared().start(["-c", HEAD + script], os.environ, said).wait() == 0
        said.seek(0)
        return [json.loads(line) for line in said]


def shown(script: str, **environment: str) -> list[str]:
    """Return what somebody sees on a terminal."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "wb") as terminal:
        running = shared().start(["-c", HEAD + script], {"TERM": "xterm", **environment}, terminal)
    seen = b""
    with suppress(OSError):  # the last who could write has ended
        while piece := os.read(master, 65536):
            seen += piece
    os.close(master)
    assert running.wait() == 0
    return seen.decode().splitlines()


def test_an_event_is_one_json_line_with_time_and_level():
    (line,) = logged("log.info('row_dead', row_id='01J'); log.debug('unseen')")
    assert line.pop("timestamp")
    assert line == {"event": "row_dead", "level": "info", "row_id": "01J"}


def test_no_program_loads_what_its_log_does_without():
    loaded = "{'broker.server', 'daemon.postroomd', 'postroom.worker.process'} <= sys.modules.keys()"
    assert logged(f"import sys; assert {loaded}; assert 'rich' not in sys.modules") == []


def test_tokens_and_bodies_are_dropped_whoever_logs_them():
    (line,) = logged("log.info('sent', token='t', body='b', payload=b'p', authorization='a', bytes=3)")
    assert {"token", "body", "payload", "authorization"}.isdisjoint(line)
    assert line["bytes"] == 3


def test_an_exception_stays_on_its_line():
    (line,) = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')")
    assert "ZeroDivisionError" in str(line["exception"])


def test_of_a_text_that_is_too_long_for_a_line_the_ends_are_logged_at_once():
    script = "try:\n    raise ValueError('a.' * 4_000_000)\nexcept ValueError:\n    try:\n        1 / 0\n"
    (line,) = logged(f"{script}    except ZeroDivisionError:\n        log.exception('failed')")
    text = str(line["exception"])
    assert text.startswith("Traceback (most recent call last)")
    assert "characters left out" in text
    assert text.endswith("ZeroDivisionError: division by zero")
    assert len(text) < 20_000


def test_a_password_where_a_long_text_is_cut_is_not_logged():
    script = "log.warning('failed', error='x ' * {before} + 'https://ada:{secret}@host' + ' x' * 20_000)"
    secret = "s3cr3t" * 20
    for before in (3_925, 3_975):  # the cut is in the password, or after it
        (line,) = logged(script.format(before=before, secret=secret))
        assert "s3cr" not in str(line["error"])


@pytest.mark.parametrize(("lines", "length"), [(2000, 100), (200, 10_000)])  # which is more than a pipe takes at once
def test_a_reader_that_stands_still_stops_nothing_and_is_told_how_many_it_missed(
    tmp_path: Path, lines: int, length: int
):
    went_on = tmp_path / "went on"
    script = f"""import pathlib, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
for number in range({lines}):
    log.warning("said", number=number, more="." * {length})
pathlib.Path({str(went_on)!r}).touch()
signal.sigwait([signal.SIGTERM])
for event in "first", "second":
    log.warning(event)
"""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as said:
        running = shared().start(["-c", HEAD + script], os.environ, said)
    with os.fdopen(reading, "rb") as reader:
        wait_until(went_on.exists)
        read = reader.read1(2**20)
        running.terminate()
        heard = [json.loads(line) for line in (read + reader.read()).splitlines()]
    assert running.wait() == 0
    *kept, first, second = heard
    assert [line["number"] for line in kept] == list(range(len(kept)))
    assert 0 < first["lines_lost"] == lines - len(kept)
    assert "lines_lost" not in second


def test_half_a_character_in_an_error_is_logged_as_an_escape():
    (line,) = logged("log.warning('step_failed', error='odd: \\ud800')")
    assert (line["event"], line["error"]) == ("step_failed", "odd: \ud800")


def test_a_log_that_cannot_be_written_stops_nobody():
    script = (
        "import structlog; from postroom.chassis import logs; logs.configure()\n"
        "structlog.get_logger().info('lost'); print('on')"
    )
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ran.stdout == b"on\n"


def test_what_a_full_disk_cuts_off_is_written_and_what_it_refuses_is_counted_once_there_is_room():
    script = (
        "from resource import RLIMIT_FSIZE, getrlimit, setrlimit; _, most = getrlimit(RLIMIT_FSIZE)\n"
        "setrlimit(RLIMIT_FSIZE, (10, most)); log.info('cut'); log.info('lost')\n"
        "setrlimit(RLIMIT_FSIZE, (most, most)); log.info('said')"
    )
    cut, said = logged(script)
    assert (cut["event"], said["event"], said["lines_lost"]) == ("cut", "said", 1)


def test_a_standard_error_that_users_code_replaces_or_closes_is_not_that_of_the_log():
    script = (
        "import io, sys; ours = sys.stderr; sys.stderr = theirs = io.StringIO(); log.info('first')\n"
        "theirs.close(); log.info('second')\n"
        "ours.close(); log.info('lost'); from postroom.chassis.exits import write_last; write_last('')"
    )
    assert [line["event"] for line in logged(script)] == ["first", "second"]


def test_what_a_library_logs_is_one_json_line_with_its_exception():
    script = (
        "import logging\ntry:\n    raise ValueError('two\\nlines')\n"
        "except ValueError:\n    logging.getLogger('aiohttp.server').exception('of\\n%s', 'two')\n"
        "logging.getLogger('nats').error('%d', 'no number')\nimport warnings\nwarnings.warn('old')"
    )
    first, second, third = logged(script)
    assert (first["event"], first["logger"], first["level"]) == ("library_message", "aiohttp.server", "error")
    assert first["message"] == "of\ntwo"
    assert "ValueError: two\nlines" in str(first["exception"])
    assert second["message"] == "%d"
    assert third["logger"] == "py.warnings"


def test_a_library_that_repeats_itself_is_cut_off_and_leaves_room_for_others():
    script = (
        "import logging\nfor number in range(1000):\n    logging.getLogger('nats.client').error('again')\n"
        "logging.getLogger('asyncpg').error('mine')"
    )
    lines = logged(script)
    assert [line["message"] for line in lines] == ["again"] * 20 + ["mine"]


@pytest.mark.parametrize("later", [11.0, -3600.0], ids=["later", "after the clock was set back"])
def test_a_library_that_was_cut_off_says_later_how_much_was_left_out(later: float):
    script = (
        f"import logging\nfor second in (0.0,) * 30 + ({later},):\n"
        "    record = logging.LogRecord('redis', logging.ERROR, '', 0, 'again', (), None)\n"
        "    record.created = second\n    logging.getLogger('redis').handle(record)"
    )
    assert logged(script)[-1]["left_out"] == 10


@pytest.mark.parametrize(
    "text",
    [
        "Invalid header: b'Authorization: Bearer s3cr3t\\x00'",
        "b'authorization: s3cr3t and more s3cr3t'",
        "{'Authorization': 'Basic s3cr3t'}",
        "connection to postgresql://postroom:s3cr3t@host:5432/db failed",
        "redis://:s3cr3t@host",
        "GET /v1/send?access_token=s3cr3t&x=1",
        'nats: {"auth_token": "s3cr3t"}',
        "Bearer s3cr3t",
    ],
)
def test_a_token_is_masked_wherever_it_stands(text: str):
    assert "s3cr3t" not in mask(text)
    (line,) = logged(f"import logging; logging.getLogger('aiohttp').error({text!r})")
    assert "s3cr3t" not in json.dumps(line)


def test_what_only_looks_like_a_secret_stays_readable():
    for text in ("a token in the query string ends up in logs", "https://host:8080/v1/send@x", "the password is wrong"):
        assert mask(text) == text


def test_on_a_terminal_an_event_is_key_value_in_colours():
    (coloured,) = shown("log.info('row_dead', row_id='01J', attempts=3)")
    assert "\x1b[" in coloured
    (plain,) = shown("log.info('row_dead', row_id='01J', attempts=3)", NO_COLOR="1")
    assert "\x1b" not in plain
    assert plain.split()[1:] == ["[info", "]", "row_dead", "row_id=01J", "attempts=3"]


def test_on_a_terminal_a_trace_has_lines_of_its_own_and_no_secret():
    script = (
        "try:\n    raise ValueError('password=s3cr3t')\n"
        "except ValueError:\n    log.exception('failed', row_id='01J', token='t0ken')"
    )
    first, *trace = shown(script, NO_COLOR="1")
    assert first.split()[-2:] == ["failed", "row_id=01J"]
    assert trace[0] == "Traceback (most recent call last):"
    assert trace[-1] == "ValueError: password=********"
    assert "t0ken" not in "".join([first, *trace])


def test_on_a_terminal_a_peers_words_steer_nothing():
    script = (
        "log.warning('refused', detail='\\x1b]0;owned\\x07', name='two\\nlines')\n"
        "import logging; logging.getLogger('nats').error('\\x1b[2J')\n"
        "try:\n    raise ValueError('\\x1b[2J')\nexcept ValueError:\n    log.exception('failed')"
    )
    lines = shown(script, NO_COLOR="1")
    assert "\x1b" not in "".join(lines)
    assert "name='two\\nlines'" in lines[0]
    assert lines[-1] == "ValueError: \\x1b[2J"
