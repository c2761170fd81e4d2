"""Real servers for tests: started once a session, from the embedded wheels, and gone when the session is gone.

    postgres_server, redis_server, nats_server      the servers, started when the first test wants one
    database_url                                    a fresh, empty database for this test
    redis_url                                       the Redis of the session, emptied for this test
    nats_url                                        the NATS of the session
    zygote                                          what starts programs of ours at once, by forking
    recorded                                        the spans of this process, for this test
    short_directory                                 an empty directory with a path short enough for any Unix socket
    tmp_path                                        an empty directory within it that only this user may enter

A test that stops or kills a server starts one of its own: `EmbeddedRedis(short_directory / "redis")`. The kernel ends
every server when pytest ends, `kill -9` included; a program that a test starts gets the same from
`embedded.processes.tethered([...])`. What `postroom up --detach` leaves running, and the files of a session that was
killed, are cleared away by its janitor; what a killed janitor left, by the next session.
"""

from __future__ import annotations

import asyncio
import faulthandler
import itertools
import os
import resource
import signal
import warnings
from collections.abc import Callable, Coroutine, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
import structlog
import uvloop
from hypothesis import HealthCheck, settings
from support import class_data, session
from support.databases import create, drop
from support.janitor import remove
from support.zygote import Zygote, end_with_parent, shared
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from embedded import EmbeddedNats, EmbeddedPostgres, EmbeddedRedis
from postroom._wire import spans
from postroom.chassis import collect_rarely, import_quickly

_numbers = itertools.count(1)
_running: set[str] = set()  # the tests that have begun and not ended
_SECONDS = 300  # that a test may take, unless it is marked with a `timeout` of its own
_STANDARD_ERROR = pytest.StashKey[int]()  # what pytest takes away while a test runs
_DESCRIPTORS = 8192
_SPARK = "spark"  # the folder
_PAGES = "tests/acceptance/test_docs.py"  # each page has a mail room of its own
_JAVA_OPTIONS = (
    f"-XX:TieredStopAtLevel=1 -XX:MetaspaceSize=256m -XX:-UseCodeCacheFlushing {class_data.SHAPE} {class_data.MAPPING} "
    "-Xlog:disable -Dspark.ui.enabled=false"
)


def pytest_configure(config: pytest.Config) -> None:
    """Raise the usual limit of 1024 open files, since a test is often both ends of its connections.

    A shell starts what runs in the background with Ctrl-C ignored, and what that starts inherits it. With a handler
    that does nothing this process goes on ignoring it, while the programs that tests interrupt have the default.

    A Java of a test lives for seconds, and would spend half of its time on optimizing code, and half of the rest on
    reading classes that every run has read before. Nor does it search for classes and code to unload, or show a page
    that nobody opens.

    How long Hypothesis takes for an example is the machine's affair, and no fault.

    An error is logged as in our programs: structlog by itself would print the values of each frame too, which takes
    seconds where one is a large message.

    Who ends a run is told which tests had not ended, and no worker finishes its own first.

    Others may pass through the directories of root's tests, whatever its umask, since its Postgres is another user's.
    """
    os.umask(0o022)
    import_quickly()
    *processors, _ = structlog.get_config()["processors"]
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(processors=[*processors, plain])
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    config.stash[_STANDARD_ERROR] = os.dup(2)
    if hasattr(config, "workerinput"):
        end_with_parent()
    else:
        signal.signal(signal.SIGTERM, partial(_name_what_runs, config))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))
    os.environ.setdefault("JAVA_TOOL_OPTIONS", _JAVA_OPTIONS)
    settings.register_profile("untimed", deadline=None, suppress_health_check=list(HealthCheck))
    settings.load_profile("untimed")


def _name_what_runs(config: pytest.Config, number: int, _: object) -> None:
    os.write(config.stash[_STANDARD_ERROR], "\n".join(["", "ended while these ran:", *sorted(_running), ""]).encode())
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def pytest_collection_finish() -> None:
    collect_rarely()  # as our programs do


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logstart(nodeid: str) -> None:
    _running.add(nodeid)


def pytest_runtest_logfinish(nodeid: str) -> None:
    _running.discard(nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a test that takes too long, and say where each of its threads is."""
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """Watch the rest of a test that has failed too, which pytest has just put an end to."""
    if isinstance(node, pytest.Item):
        _watch(node)


def _watch(item: pytest.Item) -> None:
    """Begin the time anew; it runs in a thread of C, which needs nothing that a test that hangs may hold."""
    marker = item.get_closest_marker("timeout")
    if seconds := marker.args[0] if marker else _SECONDS:
        faulthandler.dump_traceback_later(seconds, exit=True, file=item.config.stash[_STANDARD_ERROR])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with Spark's tests, which one worker runs: in the end the others would wait for it."""
    items.sort(key=lambda item: item.path.parent.name != _SPARK)


class ByFile(LoadFileScheduling):
    """Hands each file to one worker, and all of Spark's tests too: each worker would start a Spark of its own.

    The pages of the docs go out one by one, since in one worker they would be what the others wait for.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if file == _PAGES:
            return nodeid
        return _SPARK if Path(file).parent.name == _SPARK else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured and none asserts."""
    for report in terminalreporter.getreports("passed"):
        for name, said in report.user_properties:
            terminalreporter.write_line(f"{name}: {said}")


class _Loop(uvloop.Loop):
    def close(self) -> None:
        """Tell what a test has left open only after all of it is closed: at an error before, uvloop waits for ever."""
        with warnings.catch_warnings(record=True, action="always") as unclosed:
            super().close()
        for warning in unclosed:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run a test on the loop that what it tests runs on: the programs' own, or a user's for the sdk."""
    if item.path.parent.name == "postroom":
        return {"asyncio": asyncio.new_event_loop}
    return {"uvloop": _Loop}


@pytest.fixture(scope="session")
def session_directory() -> Iterator[Path]:
    with session.session_directory() as directory:
        yield directory


@pytest.fixture
def short_directory(session_directory: Path) -> Iterator[Path]:
    directory = session_directory / str(next(_numbers))
    directory.mkdir(mode=0o711)
    yield directory
    remove(directory)  # with what a test that failed has left running there


@pytest.fixture
def tmp_path(short_directory: Path) -> Path:
    """Replace pytest's, which stays for three runs."""
    directory = short_directory / "tmp"
    directory.mkdir(mode=0o700)
    return directory


@pytest.fixture(scope="session")
def postgres_server(session_directory: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(session_directory / "postgres", durable=False)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def database_url(postgres_server: EmbeddedPostgres) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    _run(create(postgres_server, name))
    yield postgres_server.url_of(name)
    _run(drop(postgres_server, name))


@pytest.fixture(scope="session")
def redis_server(session_directory: Path) -> Iterator[EmbeddedRedis]:
    server = EmbeddedRedis(session_directory / "redis")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_server: EmbeddedRedis) -> str:
    with redis.Redis.from_url(redis_server.url) as client:
        client.flushall()
    return redis_server.url


@pytest.fixture(scope="session")
def nats_server(session_directory: Path) -> Iterator[EmbeddedNats]:
    server = EmbeddedNats(session_directory / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: EmbeddedNats) -> str:
    return nats_server.url


@pytest.fixture(scope="session")
def zygote() -> Zygote:
    return shared()


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Keep the spans of this process while the test runs; the process has a provider for no longer."""
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 - the other tests run without
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: PLC0415 - the same
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: PLC0415 - the same

    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("postroom")
    monkeypatch.setattr(spans, "_tracer", lambda: tracer)
    monkeypatch.setattr(spans, "wanted", lambda: True)
    yield exporter
    provider.shutdown()


def _run(work: Coroutine[Any, Any, None]) -> None:
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:  # leaves the loop of the test plugin alone
        runner.run(work)
