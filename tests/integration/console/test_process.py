"""The console as a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

from embedded.processes import tethered


def test_it_serves_until_it_is_told_to_stop() -> None:
    environment = {"POSTROOM_CONSOLE_BROKER_URL": "http://127.0.0.1:1", "POSTROOM_CONSOLE_LISTEN_PORT": "0"}
    command = tethered([sys.executable, "-m", "console"])
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        url = json.loads(process.stderr.readline())["url"]
        with urllib.request.urlopen(f"{url}/login") as answer:  # noqa: S310 - it is ours
            assert (answer.status, b"<h1>Log in</h1>" in answer.read()) == (200, True)
        process.terminate()
        assert process.wait(30) == 0


def test_a_config_that_is_wrong_is_said_in_a_sentence() -> None:
    command = [sys.executable, "-m", "console", "--config", "/nowhere"]
    done = subprocess.run(command, env={}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.startswith("postroom console: cannot read the config /nowhere")) == (78, True)


def test_authorities_that_are_a_pipe_are_refused_at_the_start(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    environment = {"POSTROOM_CONSOLE_BROKER_URL": "https://127.0.0.1:1", "POSTROOM_CONSOLE_BROKER_CA_FILE": str(pipe)}
    command = tethered([sys.executable, "-m", "console"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, "broker_ca_file" in done.stderr, "not a regular file" in done.stderr) == (78, True, True)
