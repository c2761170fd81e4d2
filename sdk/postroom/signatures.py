"""Signatures of the requests that Postroom makes to handlers and webhooks: HMAC-SHA-256 over the time and the body.

A signed request carries `Postroom-Signature: t=<seconds since the epoch>,v1=<64 hexadecimal digits>`, where `v1` is the
HMAC of `<t>.<body>` under the secret that both sides know. A handler checks it before it looks at the body:

    verify(secret, body, request.headers.get(SIGNATURE))

The same request is signed as Standard Webhooks (https://www.standardwebhooks.com) has it, in `webhook-id`,
`webhook-timestamp` and `webhook-signature`, for handlers that use a library for those. Its key is the secret's bytes,
which such a library takes in base64, or what a secret of the form `whsec_<base64>` encodes.

The time is signed, so that a recorded request is refused once the replay window is over; within the
window the message id (`Idempotency-Key`) makes the second run harmless.
"""

import base64
import binascii
import hashlib
import hmac
import re
import time
from collections.abc import Callable, Sequence
from typing import Final

from postroom.errors import NotPermitted

__all__ = ["MAX_HEADER", "MIN_SECRET_BYTES", "REPLAY_WINDOW", "SIGNATURE", "sign", "standard_headers", "verify"]

SIGNATURE: Final = "Postroom-Signature"  # the header
REPLAY_WINDOW: Final = 300  # seconds
MIN_SECRET_BYTES: Final = 16
MAX_HEADER: Final = 1024  # characters

_STANDARD_PREFIX: Final = b"whsec_"
_TIME: Final = re.compile(r"t=([0-9]{1,12})")
_DIGEST: Final = re.compile(r"v1=([0-9a-f]{64})")


def sign(secret: bytes, body: bytes, at: int) -> str:
    """Return the value of `Postroom-Signature` for `body`, signed `at` so many seconds since the epoch."""
    return f"t={at},v1={_digest(secret, body, at)}"


def standard_headers(secret: bytes, message_id: str, body: bytes, at: int) -> dict[str, str]:
    """Return the three headers of Standard Webhooks for `body`, signed `at` so many seconds since the epoch."""
    signature = hmac.new(_standard_key(secret), b"%b.%d.%b" % (message_id.encode(), at, body), hashlib.sha256).digest()
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(at),
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }


def verify(
    secret: bytes | Sequence[bytes],
    body: bytes,
    header: str | None,
    *,
    window: int = REPLAY_WINDOW,
    clock: Callable[[], float] = time.time,
) -> None:
    """Return if `header` signs `body` with one of our secrets, at most `window` seconds ago or ahead.

    Pass several secrets while one replaces another. Takes the same time whatever
    digit is wrong. Raises `NotPermitted` (401): `missing_signature`, `invalid_signature` or `stale_signature`; and
    `ValueError` without a secret, or with an empty one, under which anybody can sign.
    """
    secrets = [secret] if isinstance(secret, bytes) else secret
    if not secrets or not all(secrets):
        raise ValueError("the secret is empty: read the one that the consumer signs with, and check that it is there")
    if header is None:
        raise NotPermitted.of("missing_signature", f"the request has no {SIGNATURE} header")
    at, digests = _read(header)
    ours = [_digest(one, body, at) for one in secrets]
    equal = [hmac.compare_digest(one, other) for one in ours for other in digests]  # all of them: it takes as long
    if not any(equal):
        raise NotPermitted.of("invalid_signature", "the signature does not match this body and the secret")
    if abs(clock() - at) > window:
        sentence = f"the request was signed more than {window} seconds before or after now: check both clocks"
        raise NotPermitted.of("stale_signature", sentence)


def _digest(secret: bytes, body: bytes, at: int) -> str:
    if any(isinstance(each, str) for each in (secret, body)):
        raise TypeError("give the secret and the body as bytes: secret.encode(), and the body as it came")
    return hmac.new(secret, b"%d.%b" % (at, body), hashlib.sha256).hexdigest()


def _standard_key(secret: bytes) -> bytes:
    if not secret.startswith(_STANDARD_PREFIX):
        return secret
    encoded = secret.removeprefix(_STANDARD_PREFIX)
    try:
        return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except binascii.Error:
        return secret


def _read(header: str) -> tuple[int, list[str]]:
    """Read the one time and the digests (more than one while a sender changes its secret)."""
    parts = [part.strip() for part in header.split(",")] if len(header) <= MAX_HEADER else []
    times = [match[1] for part in parts if (match := _TIME.fullmatch(part))]
    digests = [match[1] for part in parts if (match := _DIGEST.fullmatch(part))]
    if len(times) != 1 or not digests:
        raise NotPermitted.of("invalid_signature", f"the {SIGNATURE} header is not `t=<seconds>,v1=<digest>`")
    return int(times[0]), digests
