"""One message: what a caller posts, what travels to the broker, and every rule that both ends check.

`prepare` turns the bytes of a request into a `PreparedSend`: decoded, checked, fingerprinted, encoded for the broker.
A message that it refuses leaves no trace and consumes no id (docs/contract/send.md#send-25).
"""

import base64
import binascii
import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, NamedTuple, NoReturn

import msgspec

from postroom._wire.fingerprint import ENVELOPE_VERSION, NotCanonical, canonical_json, fingerprint
from postroom._wire.ids import ID_RULE, new_id
from postroom._wire.names import MAX_NAME, MESSAGE_ID, QUEUE, SNAKE, TRACE, WORD, Rule
from postroom._wire.words import json_fault, shape_fault
from postroom.errors import InvalidMessage
from postroom.retry_policy import check_retry_policy

Priority = Literal["now", "next", "low"]
DestinationKind = Literal["topic", "dm", "queue"]

MAX_BODY_BYTES: Final = 1024 * 1024
MAX_REQUEST_BYTES: Final = 4 * MAX_BODY_BYTES  # letters that JSON writes as \uXXXX grow up to threefold
MAX_DEPTH: Final = 64  # nested objects and arrays in meta
MAX_META_VALUES: Final = 10_000  # in all of meta: what a fingerprint sorts and a reader walks
MAX_MENTIONS: Final = 256
_OTHERS: Final = 32  # members of a message that are neither in meta nor mentions, with room to spare
MAX_VALUES: Final = MAX_META_VALUES + MAX_MENTIONS + _OTHERS
_NODES: Final = {dict, list}
_LATEST: Final = datetime(9999, 12, 31, 23, 59, 59, 999000, UTC)  # the outbox keeps ms, rounded up
_WINDOW: Final = 64 * 1024  # bytes that are counted at once
_LONG: Final = 256  # characters of a body
_BEGINNING: Final = 32  # bytes of its text
_LEAST_MEMBER: Final = len('"to":"",')

_RULES: Final[dict[str, Rule]] = {"topic": SNAKE, "dm": WORD, "queue": QUEUE}
_FORMS: Final = "|".join(f"{kind}:{rule.pattern.pattern}" for kind, rule in _RULES.items())
DESTINATION: Final = Rule(re.compile(f"(?:{_FORMS})"), "topic:<name>, dm:<member> or queue:<name>")
To = Annotated[str, DESTINATION.shown]
Id = Annotated[str, MESSAGE_ID.shown]
Mentions = Annotated[list[Annotated[str, WORD.shown]], msgspec.Meta(extra_json_schema={"maxItems": MAX_MENTIONS})]
TRACEPARENT: Final = TRACE.pattern
_NO_TRACE: Final = re.compile(r"ff|..-0{32}|..-.{32}-0{16}")  # of this form: a version that is none, an id that is none


class Destination(NamedTuple):
    """Where a message goes: `topic:<name>`, `dm:<member>` or `queue:<name>`."""

    kind: DestinationKind
    ref: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.ref}"


class SendRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The JSON body of `POST /v1/send` and of each line of a batch (docs/contract/send.md#send-18).

    `body` is text; `body_base64` is bytes; at most one of them. `not_before` is an RFC 3339 time with an offset.
    """

    to: To
    body: str | None = None
    body_base64: str | None = None
    meta: Mapping[str, Any] | None = None
    priority: Priority = "next"
    reply_to: Id | None = None
    mentions: Mentions | None = None
    client_message_id: Id | None = None
    not_before: datetime | None = None


class Envelope(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    """A message as the outbox stores it and the broker receives it: everything but its id and fingerprint.

    `meta` has the mentions under `mentions` (sorted, unique), so that the fingerprint covers them.
    """

    to: str
    body: str | None = None
    body_base64: str | None = None
    meta: Mapping[str, Any] | None = None
    priority: Priority = "next"
    reply_to: str | None = None
    traceparent: str | None = None
    version: str = ENVELOPE_VERSION

    def body_bytes(self) -> bytes:
        """Return the body's raw bytes; raises `InvalidMessage` for a body that may not be."""
        if self.body_base64 is None:
            if self.body is not None and "\0" in self.body:
                refuse("nul_character", "body contains a NUL character: send bytes as body_base64", "body")
            return (self.body or "").encode()
        if self.body is not None:
            refuse("two_bodies", "give body or body_base64, not both", "body_base64")
        try:
            return base64.b64decode(self.body_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            refuse("invalid_base64", f"body_base64 is not base64 (RFC 4648 §4): {error}", "body_base64")

    def mentions(self) -> list[str]:
        """Return the members that the message mentions."""
        return list((self.meta or {}).get("mentions", ()))


class PreparedSend(msgspec.Struct, frozen=True, gc=False):
    """A checked message, ready to be written: `payload` is the encoded `Envelope`."""

    client_message_id: str
    fingerprint: bytes  # 32 bytes
    payload: bytes
    destination: str
    priority: Priority
    not_before: datetime | None  # UTC


class Checked(msgspec.Struct, frozen=True, gc=False):
    """What checking an `Envelope` yields."""

    destination: Destination
    fingerprint: bytes  # 32 bytes
    body: bytes
    meta: bytes  # canonical JSON, empty without meta


_decode_send: Final = msgspec.json.Decoder(SendRequest).decode


def read_traceparent(given: str | None) -> str | None:
    """Return a traceparent unchanged, None where it does not have the form of W3C Trace Context."""
    return given if given and TRACEPARENT.fullmatch(given) and not _NO_TRACE.match(given) else None


def refuse(code: str, detail: str, field: str | None = None) -> NoReturn:
    """Raise the `InvalidMessage` that says what is wrong with which field."""
    raise InvalidMessage.of(code, detail, field=field)


def prepare(
    send: bytes | SendRequest,
    *,
    idempotency_key: str | None = None,
    traceparent: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> PreparedSend:
    """Check one send, decoded or not; the `Idempotency-Key` wins over the body's `client_message_id`.

    Raises `InvalidMessage` (400 or 413) that names the field, before anything is written.
    """
    request = send if isinstance(send, SendRequest) else decode_request(send)
    if idempotency_key is not None:
        client_message_id = check_client_message_id(idempotency_key, "Idempotency-Key")
    elif request.client_message_id is not None:
        client_message_id = check_client_message_id(request.client_message_id, "client_message_id")
    else:
        client_message_id = new_id()
    meta, mentions = request.meta, request.mentions
    if meta and "mentions" in meta:
        refuse("reserved_meta_key", "meta.mentions is reserved: use the field `mentions`", "meta.mentions")
    if mentions:
        if len(mentions) > MAX_MENTIONS:
            refuse("too_many_mentions", f"{len(mentions)} mentions, the limit is {MAX_MENTIONS}", "mentions")
        for member in mentions:
            if not WORD.allows(member):
                refuse("invalid_mention", f"each of `mentions` must be a member: {WORD.words}", "mentions")
        meta = {**(meta or {}), "mentions": sorted(set(mentions))}
    envelope = Envelope(
        to=request.to,
        body=request.body,
        body_base64=request.body_base64,
        meta=meta,
        priority=request.priority,
        reply_to=request.reply_to,
        traceparent=read_traceparent(traceparent),
    )
    checked = check_envelope(envelope, max_body_bytes=max_body_bytes)
    return PreparedSend(
        client_message_id,
        checked.fingerprint,
        msgspec.json.encode(envelope),
        request.to,
        request.priority,
        _utc(request.not_before),
    )


def decode_request(data: bytes) -> SendRequest:
    """Decode the JSON of a send; refuses duplicate keys, which a fingerprint and a reader could take two ways."""
    refuse_too_many_values(data)
    try:
        request = _decode_send(data)
        if not _is_shortest(data, request) and _quotes_in(data, request.body) != _quotes_of(request):
            refuse_duplicate_keys(data)
    except msgspec.ValidationError as error:
        field, sentence = shape_fault(error, SendRequest)
        refuse("invalid_field", sentence, field)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        refuse("invalid_json", f"the body is not one JSON object in UTF-8: {json_fault(error, data)}")
    except RecursionError:
        refuse("too_deep", f"the JSON is nested deeper than {MAX_DEPTH} levels", "meta")
    return request


def refuse_too_many_values(data: bytes, most: int | None = None) -> None:
    """Raise `InvalidMessage` where `data` holds more values than a message may, or than `most` in a request.

    It counts the separators between values, window by window, so that four megabytes of `[1,1,1,…]` are refused at
    once: decoding them would take a third of a second, in which nobody else is served. Those within strings are left
    out by a second, slower count, which most texts do not need.
    """
    limit, field = (MAX_VALUES, "meta") if most is None else (most, None)
    if len(data) <= limit:
        return
    signs = 0
    for start in range(0, len(data), _WINDOW):
        signs += sum(data.count(sign, start, start + _WINDOW) for sign in (b",", b"[", b"{"))
        if signs > limit:
            break
    else:
        return  # too few, even with those within strings
    if b"\\" in data:
        data = data.replace(rb"\\", b"").replace(rb"\"", b"")  # what is left of the quotes begins or ends a string
    quotes = commas = openings = 0
    for start in range(0, len(data), _WINDOW):
        parts = data[start : start + _WINDOW].split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        commas += outside.count(b",")
        openings += outside.count(b"[") + outside.count(b"{")
        if openings > limit + MAX_DEPTH * (commas + 1):
            refuse("too_deep", f"the JSON is nested deeper than {MAX_DEPTH} levels", field)
        if max(commas, openings, quotes // 4) > limit:  # a value has a key and is a string, at most
            if most is not None:
                refuse("request_too_large", f"the body has more than {most:,} values: send fewer in one request")
            refuse("meta_too_large", f"meta has more than {MAX_META_VALUES} values", field)


def refuse_duplicate_keys(data: bytes) -> None:
    """Raise `InvalidMessage` where a key is given twice in one object of `data`, which is known to be JSON."""
    try:
        json.loads(data, object_pairs_hook=_unique_keys)
    except ValueError as error:  # an integer with more digits than Python converts
        refuse("invalid_json", f"the body is not one JSON object that can be fingerprinted: {error}")
    except RecursionError:
        refuse("too_deep", f"the JSON is nested deeper than {MAX_DEPTH} levels")


def check_envelope(envelope: Envelope, *, max_body_bytes: int = MAX_BODY_BYTES) -> Checked:
    """Check every field of a message and compute its fingerprint; raises `InvalidMessage`.

    Both ends run this: the daemon before it writes a row, the broker before it trusts one.
    """
    destination = parse_destination(envelope.to)
    if envelope.version != ENVELOPE_VERSION:
        refuse("unsupported_version", f"envelope version {envelope.version!r} is not {ENVELOPE_VERSION!r}", "version")
    if envelope.reply_to is not None:
        check_client_message_id(envelope.reply_to, "reply_to")
    body = envelope.body_bytes()
    if len(body) > max_body_bytes:
        refuse("payload_too_large", f"the body has {len(body)} bytes, the limit is {max_body_bytes}", "body")
    meta = b""
    if envelope.meta:
        _check_size(envelope.meta)
        check_retry_policy(envelope.meta)
        try:
            meta = canonical_json(envelope.meta)
        except NotCanonical as error:
            refuse("meta_not_canonical", f"meta cannot be fingerprinted (RFC 8785): {error}", "meta")
        if b"\\u0000" in meta and _holds_nul(envelope.meta):
            refuse("nul_character", "meta contains a NUL character", "meta")
    computed = fingerprint(
        destination_kind=destination.kind,
        destination_ref=destination.ref,
        reply_to=envelope.reply_to,
        priority=envelope.priority,
        meta=meta,
        body=body,
    )
    return Checked(destination, computed, body, meta)


@lru_cache(maxsize=4096)
def parse_destination(text: str, field: str = "to") -> Destination:
    """Split and check `kind:name`, the value of `field`; raises `InvalidMessage` with the rule of that kind."""
    kind, colon, ref = text.partition(":")
    if not colon or kind not in _RULES:
        refuse("invalid_destination", f"`{field}` must be {DESTINATION.words}", field)
    if not _RULES[kind].allows(ref):
        refuse("invalid_destination", f"the name in `{field}` must be {_RULES[kind].words}", field)
    return Destination(kind, ref)  # type: ignore[arg-type]


def is_destination(text: str) -> bool:
    """Return whether `text` is a destination."""
    try:
        parse_destination(text)
    except InvalidMessage:
        return False
    return True


def check_destination(text: str | None) -> str | None:
    """Return the destination that a filter names, if any; raises `InvalidMessage` where it is not a destination."""
    if text is not None:
        parse_destination(text, "destination")
    return text


def check_client_message_id(text: str, field: str) -> str:
    """Return `text` if it may be an id, else raise `InvalidMessage` for `field`."""
    if MESSAGE_ID.pattern.fullmatch(text) is None:
        refuse("invalid_client_message_id", f"{field} is not an id: {ID_RULE}", field)
    return text


def _utc(moment: datetime | None) -> datetime | None:
    if moment is None:
        return None
    if moment.tzinfo is None:
        refuse("invalid_field", "not_before needs a UTC offset, as in 2026-11-21T09:00:00Z", "not_before")
    with suppress(OverflowError):
        if (moment := moment.astimezone(UTC)) <= _LATEST:
            return moment
    refuse("invalid_field", "not_before is outside the calendar", "not_before")


def _is_shortest(data: bytes, request: SendRequest) -> bool:
    """Return whether `data` has no room for a member besides those of `request`, so that no key is given twice in it.

    No other JSON of the same texts is shorter than what we write. Of numbers and times there is shorter JSON.
    """
    if request.meta is not None or request.not_before is not None:
        return False
    return len(data) < len(msgspec.json.encode(request)) + _LEAST_MEMBER


def _quotes_in(data: bytes, body: str | None = None) -> int:
    """Count the quotes that begin or end a string in valid JSON: those that no backslash escapes.

    A long `body` that it holds as we write it is left out first: to find its text takes a third of the time of counting
    its quotes. Any text between two unescaped quotes that equals it has no others, whether it is the body or not.
    """
    if b"\\" not in data:
        return data.count(b'"')
    if body is not None and len(body) >= _LONG:
        text = msgspec.json.encode(body)
        at = data.find(text[:_BEGINNING])  # to prepare a search for all of it would take as long as to count
        if data.startswith(text, at) and not data.endswith(b"\\", 0, at):
            return 2 + _quotes_in(data[:at] + data[at + len(text) :])
    if b"\\\\" in data:
        data = data.replace(b"\\\\", b"")  # an escaped backslash escapes nothing
    return data.count(b'"') - data.count(b'\\"')


def _quotes_of(request: SendRequest) -> int:
    """Count the quotes of the shortest JSON that decodes into `request`.

    A key that is given twice, or with its default spelt out, adds quotes to the text and never removes any. So where
    the two counts agree no key was given twice, and the text need not be read again.
    """
    texts = (request.to, request.body, request.body_base64, request.reply_to, request.client_message_id)
    quotes = 4 * (len(texts) - texts.count(None))
    if request.priority != "next":
        quotes += 4
    if request.not_before is not None:
        quotes += 4
    if request.mentions is not None:
        quotes += 2 + 2 * len(request.mentions)
    if request.meta is not None:
        quotes += 2 + _quotes_of_value(request.meta)
    return quotes


def _quotes_of_value(value: Any) -> int:
    if isinstance(value, dict):
        return 2 * len(value) + _quotes_of_values(list(value.values()))
    return _quotes_of_values(value) if isinstance(value, list) else 0


def _quotes_of_values(values: list[Any]) -> int:
    kinds = set(map(type, values))
    quotes = 2 * list(map(type, values)).count(str) if str in kinds else 0
    if not _NODES.isdisjoint(kinds):
        quotes += sum(map(_quotes_of_value, values))
    return quotes


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    decoded = dict(pairs)
    if len(decoded) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        refuse("duplicate_key", f"the key {twice[:MAX_NAME]!r} is given twice in one object", twice[:MAX_NAME])
    return decoded


def _check_size(meta: Mapping[str, Any]) -> None:
    """Refuse a meta that is nested too deep or holds too many values, before anything else walks it."""
    level: list[Any] = [meta]
    values = 0
    for _ in range(MAX_DEPTH):
        values += sum(map(len, level))
        if values > MAX_META_VALUES:
            refuse("meta_too_large", f"meta has more than {MAX_META_VALUES} values", "meta")
        nodes = (node.values() if isinstance(node, dict) else node for node in level if node)
        level = [child for children in nodes for child in _nodes(children)]
        if not level:
            return
    refuse("too_deep", f"meta is nested deeper than {MAX_DEPTH} levels", "meta")


def _nodes(children: Collection[Any]) -> Collection[Any]:
    """Return those of the children that have children; lists of plain values are not examined one by one."""
    if _NODES.isdisjoint(map(type, children)):
        return ()
    return [child for child in children if isinstance(child, (dict, list))]


def _holds_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, dict):
        return any("\0" in key or _holds_nul(child) for key, child in value.items())
    return isinstance(value, list) and any(_holds_nul(child) for child in value)
