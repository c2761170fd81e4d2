"""The fingerprint that binds an id to its content (docs/contract/send.md#send-32).

    sha256( envelope_version 00 destination_kind 00 destination_ref 00 reply_to or "" 00
            priority 00 meta_canonical_json 00 body_hash )

Computed once when an outbox row is written and again by the broker; nothing else compares it.
"""

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import rfc8785

from postroom._wire import canonical
from postroom._wire.words import not_text

ENVELOPE_VERSION: Final = "1"
PREFIX_BYTES: Final = 8  # how much of a fingerprint an answer may show


class NotCanonical(ValueError):
    """`meta` holds something that RFC 8785 cannot represent: NaN, an integer beyond 2^53, a lone surrogate."""


def canonical_json(meta: Mapping[str, Any] | None) -> bytes:
    """Return the RFC 8785 form of `meta`, or nothing at all for an empty or missing one.

    Raises `NotCanonical` with a sentence that names what cannot be represented.
    """
    if not meta:
        return b""
    try:
        return canonical.encode(dict(meta))
    except UnicodeEncodeError as error:
        raise NotCanonical(not_text(error)) from error
    except rfc8785.CanonicalizationError as error:
        raise NotCanonical(str(error)) from error
    except TypeError:  # of a program's dict, not of JSON: joining or sorting such keys fails
        raise NotCanonical("it has keys that are not text") from None


def fingerprint(
    *, destination_kind: str, destination_ref: str, reply_to: str | None, priority: str, meta: bytes, body: bytes
) -> bytes:
    """Return the 32 bytes of the fingerprint; `meta` is already canonical, `body` is the message's raw bytes.

    No field may hold a NUL: the caller has refused it, since NUL separates the fields here.
    """
    head = f"{ENVELOPE_VERSION}\0{destination_kind}\0{destination_ref}\0{reply_to or ''}\0{priority}\0"
    body_hash = hashlib.sha256(body).hexdigest()
    return hashlib.sha256(b"%b%b\0%b" % (head.encode(), meta, body_hash.encode())).digest()


def prefix(fingerprint_bytes: bytes) -> str:
    """Return the 16 hex digits of a fingerprint that a 409 shows (docs/contract/send.md#send-39)."""
    return fingerprint_bytes[:PREFIX_BYTES].hex()
