"""A request is believed when it was signed with our secret, lately, and is the one that was signed."""

from __future__ import annotations

import base64
import hmac
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom import NotPermitted
from postroom.signatures import MAX_HEADER, REPLAY_WINDOW, sign, standard_headers, verify

SECRET = b"a secret of both sides"
BODY = b'{"message_id":"m-1"}'
NOW = 1_700_000_000


def refused(header: str | None, *, body: bytes = BODY, now: float = NOW) -> str:
    with pytest.raises(NotPermitted) as error:
        verify(SECRET, body, header, clock=lambda: now)
    assert error.value.problem.status == 401
    return error.value.code


def test_the_header_is_the_time_and_the_hmac_of_time_and_body() -> None:
    digest = hmac.digest(SECRET, b"1700000000." + BODY, "sha256").hex()

    assert sign(SECRET, BODY, NOW) == f"t=1700000000,v1={digest}"


@given(st.binary(), st.binary(min_size=1), st.integers(min_value=0, max_value=10**11))
def test_what_is_signed_is_believed(body: bytes, secret: bytes, at: int) -> None:
    verify(secret, body, sign(secret, body, at), clock=lambda: at)


def test_another_body_or_secret_or_time_is_refused() -> None:
    header = sign(SECRET, BODY, NOW)

    assert refused(header, body=BODY + b" ") == "invalid_signature"
    assert refused(sign(b"another secret", BODY, NOW)) == "invalid_signature"
    assert refused(header.replace("t=17", "t=18")) == "invalid_signature"


def test_a_recorded_request_is_refused_once_the_window_is_over() -> None:
    header = sign(SECRET, BODY, NOW)

    verify(SECRET, BODY, header, clock=lambda: NOW + REPLAY_WINDOW)
    verify(SECRET, BODY, header, clock=lambda: NOW - REPLAY_WINDOW)
    assert refused(header, now=NOW + REPLAY_WINDOW + 1) == "stale_signature"
    assert refused(header, now=NOW - REPLAY_WINDOW - 1) == "stale_signature"


@pytest.mark.parametrize(
    "header",
    ["", "nonsense", "t=1", "v1=" + "0" * 64, "t=x,v1=" + "0" * 64, "t=1,t=2,v1=" + "0" * 64, "t=1,v1=" + "é" * 64],
)
def test_a_header_of_another_shape_is_refused(header: str) -> None:
    assert refused(header) == "invalid_signature"


def test_a_header_that_is_too_long_is_refused_unread() -> None:
    header = sign(SECRET, BODY, NOW)

    assert refused(header + "," * MAX_HEADER) == "invalid_signature"


def test_a_request_without_a_signature_is_refused() -> None:
    assert refused(None) == "missing_signature"


def test_secrets_can_be_changed_on_either_side_first() -> None:
    old, new = sign(b"the old one", BODY, NOW), sign(SECRET, BODY, NOW)
    verify([SECRET, b"the old one"], BODY, old, clock=lambda: NOW)
    verify(SECRET, BODY, f"{old},{new.partition(',')[2]}", clock=lambda: NOW)


@pytest.mark.parametrize("secret", [b"", [], [SECRET, b""]])
def test_nothing_is_believed_under_an_empty_secret(secret: bytes | list[bytes]) -> None:
    with pytest.raises(ValueError, match="the secret is empty"):
        verify(secret, BODY, sign(b"", BODY, NOW), clock=lambda: NOW)


@pytest.mark.parametrize(
    ("secret", "body"), [(SECRET.decode(), BODY), ([SECRET.decode()], BODY), (SECRET, BODY.decode())]
)
def test_text_is_refused_with_what_to_give(secret: Any, body: Any) -> None:
    with pytest.raises(TypeError, match="give the secret and the body as bytes"):
        verify(secret, body, sign(SECRET, BODY, NOW), clock=lambda: NOW)


def test_standard_webhooks_sign_the_id_the_time_and_the_body() -> None:
    headers = standard_headers(SECRET, "m-1", BODY, NOW)
    digest = hmac.digest(SECRET, b"m-1.1700000000." + BODY, "sha256")

    assert headers == {
        "webhook-id": "m-1",
        "webhook-timestamp": "1700000000",
        "webhook-signature": f"v1,{base64.b64encode(digest).decode()}",
    }


def test_a_secret_of_standard_webhooks_is_decoded_with_or_without_its_padding() -> None:
    encoded = base64.b64encode(SECRET)
    plain = standard_headers(SECRET, "m-1", BODY, NOW)

    assert standard_headers(b"whsec_" + encoded, "m-1", BODY, NOW) == plain
    assert standard_headers(b"whsec_" + encoded.rstrip(b"="), "m-1", BODY, NOW) == plain
    assert standard_headers(b"whsec_!", "m-1", BODY, NOW) == standard_headers(b"whsec_!", "m-1", BODY, NOW) != plain
