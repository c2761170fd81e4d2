"""The console's config: where it may listen, and for whom."""

from __future__ import annotations

import pytest

from console.config import load_config
from postroom.chassis.exits import Exit, Fatal

BROKER = {"POSTROOM_CONSOLE_BROKER_URL": "http://127.0.0.1:7420"}


def test_the_broker_is_the_one_of_postroom_up_unless_another_is_named() -> None:
    shared = {"POSTROOM_BROKER_URL": "http://127.0.0.1:1"}
    assert load_config(None, shared).broker_url == "http://127.0.0.1:1"
    assert load_config(None, {**shared, **BROKER}).broker_url == "http://127.0.0.1:7420"


@pytest.mark.parametrize("variable", ["POSTROOM_CONSOLE_BROKER_URL", "POSTROOM_BROKER_URL"])
def test_a_broker_that_has_no_address_is_refused_by_the_variable_that_names_it(variable: str) -> None:
    with pytest.raises(Fatal, match=f"^{variable}: broker_url: .* begins with http:// or https://") as refused:
        load_config(None, {variable: "nonsense"})
    assert refused.value.exit_code == Exit.CONFIG


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert load_config(None, {**BROKER, "POSTROOM_CONSOLE_LISTEN_HOST": host}).listen_host == host


@pytest.mark.parametrize("host", ["10.0.0.7", "::", "console.example.com"])
def test_another_address_needs_a_proxy_with_tls(host: str) -> None:
    open_to_all = {**BROKER, "POSTROOM_CONSOLE_LISTEN_HOST": host}
    for public_url in ({}, {"POSTROOM_CONSOLE_PUBLIC_URL": "http://console.example.com"}):
        with pytest.raises(Fatal, match="is not a loopback address") as refused:
            load_config(None, {**open_to_all, **public_url})
        assert refused.value.exit_code == Exit.CONFIG
    secure = {**open_to_all, "POSTROOM_CONSOLE_PUBLIC_URL": "https://console.example.com"}
    assert load_config(None, secure).listen_host == host


@pytest.mark.parametrize("url", ["console.example.com", "https://a/b", "https://a@b", "ftp://a", "https://a\n"])
def test_a_public_address_is_an_origin(url: str) -> None:
    with pytest.raises(Fatal, match="public_url"):
        load_config(None, {**BROKER, "POSTROOM_CONSOLE_PUBLIC_URL": url})
