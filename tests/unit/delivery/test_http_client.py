"""What a handler's address and secret may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from chassis.exits import Exit, Fatal
from delivery.http.client import HandlerClient, read_secret
from delivery.http.settings import HandlerSettings, check_timeout
from delivery.settings import ConsumerSettings


def refusal(settings: HandlerSettings) -> str:
    with pytest.raises(Fatal) as refused:
        HandlerClient(settings)
    assert refused.value.exit_code == Exit.CONFIG
    return str(refused.value)


@pytest.mark.parametrize(
    "url", ["", "handler", "ftp://host/x", "http://", "http://user@host/", "http://host:99999/", "http://host/#part"]
)
def test_an_address_that_cannot_be_posted_to_is_refused(url: str) -> None:
    assert "handler.url" in refusal(HandlerSettings(url=url))


def test_a_secret_is_what_the_file_holds_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("  0123456789abcdef\n")
    file.chmod(0o600)

    assert read_secret(file) == b"0123456789abcdef"
    assert read_secret(None) is None


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    short, open_to_all = tmp_path / "short", tmp_path / "open"
    for file, mode in ((short, 0o600), (open_to_all, 0o604)):
        file.write_text("0123456789abcde" if file is short else "0123456789abcdef")
        file.chmod(mode)

    assert "fewer than 16" in refusal(HandlerSettings(url="http://host/", secret_file=short))
    assert "chmod 600" in refusal(HandlerSettings(url="http://host/", secret_file=open_to_all))
    assert "No such file" in refusal(HandlerSettings(url="http://host/", secret_file=tmp_path / "none"))


def test_authorities_that_are_none_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "authorities.pem"
    file.write_text("nonsense")

    assert "handler.ca_file" in refusal(HandlerSettings(url="https://host/", ca_file=file))


@pytest.mark.parametrize("seconds", [30, 31])
def test_a_time_out_that_is_not_below_ack_wait_is_refused(seconds: float) -> None:
    consumer = ConsumerSettings(stream="S", durable="d", ack_wait_seconds=30)
    check_timeout(HandlerSettings(url="http://host/", timeout_seconds=29.9), consumer)
    with pytest.raises(Fatal, match=r"handler\.timeout_seconds") as refused:
        check_timeout(HandlerSettings(url="http://host/", timeout_seconds=seconds), consumer)
    assert refused.value.exit_code == Exit.CONFIG
