"""A Postgres URL with TLS options: what libpq and asyncpg understand goes through, the rest is refused in words."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.certificates import CERTIFICATE, KEY, LOCKED_KEY

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.postgres import connect
from postroom.errors import InvalidMessage, Unavailable
from postroom.spark.database import connect as connect_spark

NOBODY = "postgresql://me:s3cr3t@127.0.0.1:1/d"
AUTHORITIES = next(iter(Path("/etc/ssl/certs").glob("*.pem")), None)
with_authorities = pytest.mark.skipif(AUTHORITIES is None, reason="this machine knows no authorities")

options = pytest.mark.parametrize(
    "query",
    [
        "sslmode=disable",
        "sslmode=allow",
        "sslmode=prefer",
        "sslmode=require",
        "sslmode=require&ssl_min_protocol_version=TLSv1.2&ssl_max_protocol_version=TLSv1.3",
        "sslmode=require&sslnegotiation=direct",
        pytest.param(f"sslmode=verify-ca&sslrootcert={AUTHORITIES}", marks=with_authorities),
        pytest.param(f"sslmode=verify-full&sslrootcert={AUTHORITIES}", marks=with_authorities),
    ],
)
refusals = pytest.mark.parametrize(
    ("query", "said"),
    [
        ("sslmode=verify-full", "root.crt"),
        ("sslmode=verify-full&sslrootcert=/no/such.pem", "sslrootcert=/no/such.pem: No such file"),
        ("sslmode=require&sslcert=/no/such.pem", "sslcert=/no/such.pem: No such file"),
        (f"sslmode=verify-full&sslrootcert={KEY}", f"sslrootcert={KEY}: give certificates as PEM"),
        (f"sslmode=require&sslcert={CERTIFICATE}&sslkey={LOCKED_KEY}", "sslpassword if it has a passphrase"),
        (f"sslmode=require&sslcert={CERTIFICATE}&sslkey={CERTIFICATE}", f"with sslkey={CERTIFICATE}: give"),
        ("sslmode=sometimes", "verify-full"),
    ],
)


@options
def test_tls_options_reach_the_server(query: str) -> None:
    with pytest.raises(Fatal) as ended:
        asyncio.run(connect(f"{NOBODY}?{query}"))
    assert ended.value.exit_code == Exit.UNAVAILABLE
    with pytest.raises(Unavailable):
        asyncio.run(connect_spark(f"{NOBODY}?{query}"))


def test_a_socket_that_nobody_listens_on_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"cannot open the database: nothing listens on its Unix socket$"):
        asyncio.run(connect_spark(f"postgresql:///postroom?host={tmp_path}"))


def test_a_port_that_no_host_has_is_refused() -> None:
    url = NOBODY.replace(":1/", ":65536/")
    with pytest.raises(Fatal, match="database_url is not a Postgres URL") as ended:
        asyncio.run(connect(url))
    assert ended.value.exit_code == Exit.CONFIG
    with pytest.raises(InvalidMessage, match="database_url is not a Postgres URL"):
        asyncio.run(connect_spark(url))


@refusals
def test_a_tls_option_that_cannot_be_used_is_named(
    query: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(Fatal) as ended:
        asyncio.run(connect(f"{NOBODY}?{query}"))
    with pytest.raises(InvalidMessage) as refused:
        asyncio.run(connect_spark(f"{NOBODY}?{query}"))
    assert ended.value.exit_code == Exit.CONFIG
    for sentence in (str(ended.value), str(refused.value)):
        assert "the TLS options of database_url" in sentence
        assert said in sentence
        assert "s3cr3t" not in sentence
