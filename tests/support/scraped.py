"""A whole installation that a real Prometheus scrapes, by rules for which a minute is a second."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from email.utils import formatdate
from http.client import HTTPResponse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, Self

from cli.stack import DaemonProgram, Stack, WorkerProgram, choose_port
from cli.stack.layout import MESH
from embedded.processes import tethered
from support.mailroom import Process
from support.waiting import wait_until

ROOT = Path(__file__).parents[2]
GENERATOR = runpy.run_path(str(ROOT / "monitoring" / "generate.py"))
PATIENCE = 150.0  # seconds: an outage counts as one after 30, and what rose in an hour has risen for one minute here
_PACE = "global:\n  scrape_interval: 1s\n  scrape_timeout: 1s\n  evaluation_interval: 1s\n\n"


def sped_up(rules: str) -> str:
    """Return rules in which a minute is a second, and an hour a minute; what is a day or more stays."""
    rules = re.sub(r"\[(\d+)h\]", lambda hours: f"[{60 * int(hours[1])}s]", rules)
    return re.sub(r"(for: |\[)(\d+)m\b", r"\1\2s", rules).replace("* 60", "* 1")


class _Answer(BaseHTTPRequestHandler):
    server: WebServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response_only(self.server.status)
        self.send_header("Date", formatdate(time.time() + self.server.ahead, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_POST()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class WebServer(ThreadingHTTPServer):
    """A handler, or who says to be a broker: it answers with `status`, by a clock that is so many seconds `ahead`."""

    daemon_threads = True

    def __init__(self, port: int, status: int = 204, ahead: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), _Answer)
        self.status = status
        self.ahead = ahead
        Thread(target=self.serve_forever, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class ScrapedDaemon(DaemonProgram):
    """The daemon, with a port for Prometheus."""

    port = choose_port()

    def _settings(self) -> Mapping[str, Any]:
        return {**super()._settings(), "metrics": {"listen_port": self.port}}


class QuickWorker(WorkerProgram):
    """The worker, which compares streams and record every second."""

    def _settings(self) -> Mapping[str, Any]:
        return {**super()._settings(), "record": {"check_seconds": 1}}


class Kit:
    """The installation, its Prometheus, and what a test does to both; of use within its block."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack = Stack(directory / "up")
        self.stack.worker, self.stack.daemon = QuickWorker(self.stack), ScrapedDaemon(self.stack)
        self.stack.programs[-2:] = [self.stack.worker, self.stack.daemon]
        self._port = choose_port()
        self._prometheus: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.stack.start(lambda _: None)
        handler, consumer, agent, flows = (choose_port() for _ in range(4))
        self.environment = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{ROOT / 'examples'}:{Path(__file__).parent}",
            "HOME": str(self.directory),
            **self.stack.environment(),
            "POSTROOM_CONSUMER_LISTEN_PORT": str(consumer),
            "POSTROOM_CONSUMER_CONSUMER_BACKOFF_MOST_SECONDS": "2",
            "POSTROOM_AGENT_LISTEN_PORT": str(agent),
            "POSTROOM_WORKER_LISTEN_PORT": str(flows),
            "POSTROOM_WORKER_ORPHAN_CHECK_ENABLED": "false",  # else it pauses for 10 minutes after an outage
        }
        self.postroom("queue", "create", "counter")
        self.handler = WebServer(handler)
        about = ("--context", MESH, "--name", "billing", "--handler", f"http://127.0.0.1:{handler}/")
        self.consumer = self._program("consumer", "run", *about)
        self._agent = self._program("agent", "run", "counting_agent:Counter", "--tenant", MESH)
        self._flows = self._program("worker", "run", "--flow", "failing_flow:flow")
        self._targets = {
            "postroom-daemon": [f"127.0.0.1:{ScrapedDaemon.port}"],
            "postroom-broker": [self.stack.broker.url.removeprefix("http://")],
            "postroom-worker": [self.stack.worker.url.removeprefix("http://"), f"127.0.0.1:{flows}"],
            "postroom-consumer": [f"127.0.0.1:{consumer}"],
            "postroom-agent": [f"127.0.0.1:{agent}"],
        }
        self._start_prometheus()
        wait_until(
            lambda: len(self.series('up{job=~"postroom-.+"} == 1')) == len(self._targets) + 1,
            "all are scraped",
            seconds=PATIENCE,
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._prometheus is not None
        self._prometheus.terminate()
        self._prometheus.wait()
        for program in (self._flows, self._agent, self.consumer):
            program.stop()
        self.stack.stop()
        self.handler.__exit__()

    @contextmanager
    def scraping(self, job: str, target: str) -> Iterator[None]:
        """Scrape one program more."""
        assert self._prometheus is not None
        before = self._targets[job]
        for targets in ([*before, target], before):
            self._targets[job] = targets
            self._configure()
            self._prometheus.send_signal(signal.SIGHUP)
            if targets is not before:
                wait_until(
                    lambda: bool(self.series(f'up{{instance="{target}"}} == 1')),
                    f"{target} is scraped",
                    seconds=PATIENCE,
                )
                yield

    def series(self, query: str) -> list[Any]:
        """Return what a query finds now."""
        with self._open(f"/api/v1/query?{urllib.parse.urlencode({'query': query})}") as answer:
            return list(json.load(answer)["data"]["result"])

    def firing(self) -> set[str]:
        return {one["metric"]["alertname"] for one in self.series('ALERTS{alertstate="firing"}')}

    def postroom(self, *arguments: str, stdin: str = "", codes: tuple[int, ...] = (0,)) -> None:
        """Run a verb as an operator does."""
        command = [sys.executable, "-m", "cli", *arguments]
        ran = subprocess.run(command, input=stdin, capture_output=True, text=True, env=self.environment, check=False)
        assert ran.returncode in codes, f"postroom {' '.join(arguments)}: {ran.stdout}{ran.stderr}"

    def send(self, to: str, body: str = "{}") -> None:
        self.postroom("send", to, body)

    def _program(self, *arguments: str) -> Process:
        """Start a verb that runs until it is stopped."""
        place = self.directory / f"{arguments[0]}-log"
        place.mkdir()
        program = Process(place, "cli", dict(self.environment), *arguments)
        program.start()
        return program

    def _start_prometheus(self) -> None:
        program = shutil.which("prometheus")
        assert program is not None, "this needs Prometheus: apt-get install prometheus"
        self._configure()
        (self.directory / "postroom.rules.yaml").write_text(sped_up(GENERATOR["rules"]()))
        command = [
            program,
            f"--config.file={self.directory / 'prometheus.yaml'}",
            f"--storage.tsdb.path={self.directory / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
        ]
        with (self.directory / "prometheus.log").open("ab") as log:
            self._prometheus = subprocess.Popen(tethered(command), stderr=log)
        wait_until(self._is_ready, "Prometheus is ready", seconds=PATIENCE)

    def _is_ready(self) -> bool:
        try:
            with self._open("/-/ready"):
                return True
        except urllib.error.URLError:  # it does not listen yet, or reads its store
            return False

    def _open(self, path: str) -> AbstractContextManager[HTTPResponse]:
        answer: HTTPResponse = urllib.request.urlopen(f"http://127.0.0.1:{self._port}{path}", timeout=10)
        return answer

    def _configure(self) -> None:
        """Write the config, with the real ports in it."""
        config = GENERATOR["scrapes"]()
        for row in GENERATOR["table"]("What is scraped"):
            config = config.replace(f'["{row["target"]}"]', json.dumps(self._targets[row["job"]]))
        (self.directory / "prometheus.yaml").write_text(_PACE + config)
