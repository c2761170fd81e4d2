"""The daemon's config: what it fills in, and what the environment overrides."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from daemon.config import DaemonConfig, load_config, socket_path, state_directory, token_file
from postroom._wire.administration import CreateMesh
from postroom.chassis.config import effective, settings
from postroom.chassis.exits import Exit, Fatal

LEAST = {
    "POSTROOM_DAEMON_MESH": "demo",
    "POSTROOM_DAEMON_BROKER_URL": "https://broker.example.com",
    "POSTROOM_DAEMON_BROKER_TOKEN_FILE": "/run/token",
}


def test_the_environment_alone_is_enough() -> None:
    config = load_config(None, LEAST)
    assert (config.mesh, config.broker.url) == ("demo", "https://broker.example.com")
    assert config.tcp.port is None


@pytest.mark.parametrize("slug", ["my-mesh", "cmd", "Demo", "demo\n", "1st", "x" * 65])
def test_a_mesh_that_no_broker_could_have_is_refused(slug: str) -> None:
    with pytest.raises(Fatal, match="mesh"):
        load_config(None, {**LEAST, "POSTROOM_DAEMON_MESH": slug})
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"slug": slug}, CreateMesh)


def test_a_list_and_a_number_come_from_the_environment_too() -> None:
    config = load_config(
        None, {**LEAST, "POSTROOM_DAEMON_SOCKET_OPERATORS": "0, 1000", "POSTROOM_DAEMON_TCP_PORT": "80"}
    )
    assert config.socket.operators == [0, 1000]
    assert config.tcp.port == 80


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TCP_PORT", "0"),
        ("TCP_PORT", "65536"),
        ("MESH", "Demo"),
        ("MESH", "../x"),
        ("LIMITS_CONNECTIONS", "-1"),
        ("LIMITS_HEADERS", "15"),
        ("BROKER_URL", "broker.example.com"),
    ],
)
def test_a_value_out_of_range_names_its_path(name: str, value: str) -> None:
    with pytest.raises(Fatal) as refusal:
        load_config(None, {**LEAST, f"POSTROOM_DAEMON_{name}": value})
    assert refusal.value.exit_code == Exit.CONFIG
    assert name.lower().replace("_", ".") in str(refusal.value)


def test_the_largest_request_has_to_fit_into_what_is_held_in_memory() -> None:
    held = {**LEAST, "POSTROOM_DAEMON_LIMITS_REQUEST_BYTES": "2048"}
    load_config(None, {**held, "POSTROOM_DAEMON_LIMITS_BUFFERED_BYTES": "2048"})
    with pytest.raises(Fatal, match=r"limits\.buffered_bytes is 2047, less than limits\.request_bytes") as refusal:
        load_config(None, {**held, "POSTROOM_DAEMON_LIMITS_BUFFERED_BYTES": "2047"})
    assert refusal.value.exit_code == Exit.CONFIG


MISNAMED = ["topic:Orders*", "topic:Orders", "topic:a-b*", "topic:", "dm:1*", "queue:a..*", f"dm:{'a' * 65}*"]


@pytest.mark.parametrize("pattern", ["orders", "orders*", "topics:*", "Topic:orders", "dm", "x?", *MISNAMED])
def test_a_pattern_that_no_destination_matches_is_refused(pattern: str) -> None:
    with pytest.raises(Fatal, match=f"allow_destinations has '{re.escape(pattern)}', which no destination") as refusal:
        load_config(None, {**LEAST, "POSTROOM_DAEMON_ALLOW_DESTINATIONS": f"topic:orders, {pattern}"})
    assert refusal.value.exit_code == Exit.CONFIG


def test_a_pattern_that_some_destination_matches_is_taken() -> None:
    patterns = ["*", "topic:orders", "topic:*", "t*", "[td]*:b", "?m:bob", "queue:work.*", "queue:a-b", "dm:a-*"]
    patterns += [f"dm:{'a' * 64}*", "topic:a_[0-9]"]
    config = load_config(None, {**LEAST, "POSTROOM_DAEMON_ALLOW_DESTINATIONS": ", ".join(patterns)})
    assert config.allow_destinations == patterns


def test_files_lie_where_xdg_says() -> None:
    config = load_config(None, LEAST)
    environ = {"XDG_RUNTIME_DIR": "/run/user/7", "XDG_STATE_HOME": "/home/u/state"}
    assert socket_path(config, environ) == Path("/run/user/7/postroom/demo.sock")
    assert state_directory(config, environ) == Path("/home/u/state/postroom/demo")
    assert token_file(config, environ) == Path("/home/u/state/postroom/demo/local.token")
    assert state_directory(config, {"HOME": "/home/u"}) == (
        Path("/var/lib/postroom/demo") if os.getuid() == 0 else Path("/home/u/.local/state/postroom/demo")
    )


@pytest.mark.parametrize("where", [socket_path, state_directory])
def test_without_an_environment_the_config_has_to_say(monkeypatch: pytest.MonkeyPatch, where: object) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 3_999_999_999)  # who has no home
    assert callable(where)
    with pytest.raises(Fatal, match="is not set"):
        where(load_config(None, LEAST), {})


def test_every_setting_is_described_and_none_shows_a_secret() -> None:
    for setting in settings(DaemonConfig):
        assert setting.description, setting.path
    shown = {".".join(setting.path): value for setting, value in effective(load_config(None, LEAST))}
    assert shown["mesh"] == "demo"
