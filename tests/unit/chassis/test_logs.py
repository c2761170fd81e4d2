import json
import subprocess
import sys
from pathlib import Path


def logged(script: str) -> list[dict[str, object]]:
    head = "import structlog; from chassis import logs; logs.configure('info'); log = structlog.get_logger()\n"
    ran = subprocess.run([sys.executable, "-c", head + script], capture_output=True, text=True, check=True)
    return [json.loads(line) for line in ran.stderr.splitlines()]


def test_an_event_is_one_json_line_with_time_and_level():
    (line,) = logged("log.info('row_dead', row_id='01J'); log.debug('unseen')")
    assert line.pop("timestamp")
    assert line == {"event": "row_dead", "level": "info", "row_id": "01J"}


def test_tokens_and_bodies_are_dropped_whoever_logs_them():
    (line,) = logged("log.info('sent', token='t', body='b', payload=b'p', authorization='a', bytes=3)")
    assert {"token", "body", "payload", "authorization"}.isdisjoint(line)
    assert line["bytes"] == 3


def test_an_exception_stays_on_its_line():
    (line,) = logged("try:\n    1 / 0\nexcept ZeroDivisionError:\n    log.exception('failed')")
    assert "ZeroDivisionError" in str(line["exception"])


def test_half_a_character_in_an_error_is_logged_as_an_escape():
    (line,) = logged("log.warning('step_failed', error='odd: \\ud800')")
    assert (line["event"], line["error"]) == ("step_failed", "odd: \ud800")


def test_a_log_that_cannot_be_written_stops_nobody():
    script = (
        "import structlog; from chassis import logs; logs.configure(); structlog.get_logger().info('lost'); print('on')"
    )
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, check=False)
    assert ran.stdout == b"on\n"
