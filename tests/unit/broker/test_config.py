"""Every setting of the broker is described, overridden by its variable, and masked where it is a secret."""

from __future__ import annotations

from pathlib import Path

import pytest

from broker.config import PREFIX, BrokerConfig, load_config
from postroom.chassis.config import MASK, effective, settings
from postroom.chassis.exits import Exit, Fatal

ENVIRON = {
    "POSTROOM_BROKER_DATABASE_URL": "postgresql://user:secret@host/db",
    "POSTROOM_BROKER_REDIS_URL": "redis://:secret@host/0",
}


def test_every_setting_says_what_it_does() -> None:
    assert [setting.path for setting in settings(BrokerConfig) if not setting.description] == []


def test_a_broker_needs_only_its_two_servers() -> None:
    config = load_config(None, ENVIRON)

    assert (config.listen_host, config.limiter.on_error, config.retention.dedupe_days) == ("127.0.0.1", "local", 30)


def test_a_variable_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "broker.toml"
    file.write_text('redis_url = "redis://file"\n[limiter]\nper_mesh = 1\n')
    environ = {"POSTROOM_BROKER_DATABASE_URL": "postgresql://", f"{PREFIX}LIMITER_PER_MESH": "2"}
    config = load_config(file, environ)

    assert (config.redis_url, config.limiter.per_mesh) == ("redis://file", 2)


def test_what_up_writes_is_the_default_where_no_file_says_otherwise(tmp_path: Path) -> None:
    written = {"POSTROOM_DATABASE_URL": "postgresql://up", "POSTROOM_REDIS_URL": "redis://up"}
    config = load_config(None, written)
    assert (config.database_url, config.redis_url, config.nats) == ("postgresql://up", "redis://up", None)
    config = load_config(None, {**written, **ENVIRON, "POSTROOM_NATS_URL": "nats://up"})
    assert (config.database_url, config.nats and config.nats.url) == (ENVIRON[f"{PREFIX}DATABASE_URL"], "nats://up")
    file = tmp_path / "broker.toml"
    file.write_text('database_url = "postgresql://file"\n')
    assert load_config(file, written).redis_url is None


def test_the_urls_are_secrets() -> None:
    shown = {setting.path[0]: value for setting, value in effective(load_config(None, ENVIRON))}

    assert (shown["database_url"], shown["redis_url"]) == (MASK, MASK)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RETENTION_MESSAGE_DAYS", "31"),
        ("RETENTION_DEDUPE_DAYS", "6"),
        ("TLS_CERT", "/cert.pem"),
        ("TLS_KEY", "/key.pem"),
        ("SOCKET_GROUP", "proxy"),
        ("MAX_BATCH", "1001"),
        ("RETENTION_DEDUPE_DAYS", "36501"),
        ("LIMITER_ON_ERROR", "open"),
        ("LISTEN_HOST", ""),
    ],
)
def test_what_would_break_a_promise_is_refused(variable: str, value: str) -> None:
    with pytest.raises(Fatal) as refused:
        load_config(None, {**ENVIRON, PREFIX + variable: value})

    assert refused.value.exit_code == Exit.CONFIG
    assert variable.split("_", 1)[-1].lower().split("_")[0] in str(refused.value)


def test_a_permanent_broker_may_keep_messages_as_long_as_it_likes() -> None:
    environ = {**ENVIRON, f"{PREFIX}RETENTION_MODE": "permanent", f"{PREFIX}RETENTION_MESSAGE_DAYS": "4000"}

    assert load_config(None, environ).retention.message_days == 4000


def test_a_limiter_that_closes_without_redis_needs_one() -> None:
    environ = {**ENVIRON, f"{PREFIX}LIMITER_ON_ERROR": "closed"}
    del environ[f"{PREFIX}REDIS_URL"]

    with pytest.raises(Fatal, match="set redis_url") as refused:
        load_config(None, environ)
    assert refused.value.exit_code == Exit.CONFIG
