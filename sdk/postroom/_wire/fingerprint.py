"""The fingerprint that binds an id to its content (docs/contract/send.md#send-32).

    sha256( envelope_version 00 destination_kind 00 destination_ref 00 reply_to or "" 00
            priority 00 meta_canonical_json 00 body_hash )

Computed once when an outbox row is written and again by the broker; nothing else compares it.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import rfc8785

ENVELOPE_VERSION: Final = "1"
PREFIX_BYTES: Final = 8  # how much of a fingerprint an answer may show
_EXACT: Final = 2**53  # beyond it a double cannot hold every integer
_PLAIN_FLOATS: Final = (1e-3, 1e15)  # between them msgspec writes a fraction as RFC 8785 does
_CONTAINERS: Final = {dict, list, tuple}
_AS_THEY_ARE: Final = {str, bool, type(None)}
_MAYBE_AS_THEY_ARE: Final = _AS_THEY_ARE | {int, float}

_encode: Final = msgspec.json.Encoder().encode


class NotCanonical(ValueError):
    """`meta` holds something that RFC 8785 cannot represent: NaN, an integer beyond 2^53, a lone surrogate."""


def canonical_json(meta: Mapping[str, Any] | None) -> bytes:
    """Return the RFC 8785 form of `meta`, or nothing at all for an empty or missing one.

    Raises `NotCanonical` with a sentence that names what cannot be represented.
    """
    if not meta:
        return b""
    try:
        return _encode(_canonical(dict(meta)))
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise NotCanonical(str(error)) from error
    except TypeError:  # of a program's dict, not of JSON: joining or sorting such keys fails
        raise NotCanonical("it has keys that are not text") from None


def _canonical(value: Any) -> Any:
    """Return what msgspec writes as RFC 8785 wants it: keys in order, numbers as JavaScript prints them.

    msgspec escapes strings by the same rules in a tenth of the time that the library takes, so that a sender's largest
    `meta` does not delay the messages of others. Everything unusual is left to the library.
    """
    kind = type(value)
    if not value and kind in _CONTAINERS:
        return value
    if kind is dict:
        keys = sorted(value) if "".join(value).isascii() else sorted(value, key=lambda key: key.encode("utf-16-be"))
        return dict(zip(keys, _each([value[key] for key in keys]), strict=True))
    if kind is list or kind is tuple:
        return _each(value)
    return value if kind in _AS_THEY_ARE else _number(value)


def _each(values: list[Any] | tuple[Any, ...]) -> list[Any] | tuple[Any, ...]:
    kinds = set(map(type, values))
    if kinds <= _AS_THEY_ARE or (kinds <= _MAYBE_AS_THEY_ARE and _are_plain(values, kinds)):
        return values
    return [_canonical(value) for value in values]


def _are_plain(values: Sequence[Any], kinds: set[type]) -> bool:
    """Return whether msgspec writes all numbers among `values` as RFC 8785 does, without a step for each of them."""
    integers = _of_kind(int, values, kinds)
    fractions = _of_kind(float, values, kinds)
    sizes = list(map(abs, fractions))
    return (not integers or (min(integers) >= -_EXACT and max(integers) <= _EXACT)) and (
        not sizes
        or (
            min(sizes) > _PLAIN_FLOATS[0]
            and max(sizes) < _PLAIN_FLOATS[1]
            and not any(map(float.is_integer, fractions))
        )
    )


def _of_kind(kind: type, values: Sequence[Any], kinds: set[type]) -> Sequence[Any]:
    if kind not in kinds:
        return ()
    return values if len(kinds) == 1 else [value for value in values if type(value) is kind]


def _number(value: Any) -> Any:
    kind = type(value)
    if kind is int and -_EXACT <= value <= _EXACT:
        return value
    if kind is float and value.is_integer() and -_EXACT <= value <= _EXACT:
        return int(value)
    if kind is float and _PLAIN_FLOATS[0] < abs(value) < _PLAIN_FLOATS[1]:
        return value
    return msgspec.Raw(rfc8785.dumps(value))


def fingerprint(
    *,
    destination_kind: str,
    destination_ref: str,
    reply_to: str | None,
    priority: str,
    meta: bytes,
    body: bytes,
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
