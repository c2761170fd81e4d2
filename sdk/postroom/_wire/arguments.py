"""Checks of what a program without type checks may pass to a client by mistake, before anything is sent.

A message is encoded as the bytes of a request, and refused where JSON would silently change it.
"""

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, cast
from urllib.parse import quote
from uuid import UUID

import msgspec

from postroom._wire.fingerprint import NotCanonical, canonical_json
from postroom._wire.ids import new_id
from postroom._wire.message import MAX_DEPTH, Priority, SendRequest, refuse
from postroom._wire.words import not_text, value_fault
from postroom.errors import InvalidMessage

Body = str | bytes | bytearray | memoryview | Mapping[str, Any] | list[Any] | None  # a TypedDict is a Mapping alone

BYTES: Final = (bytes, bytearray, memoryview)
META_RULE: Final = "give text, numbers, True, False, None, lists and dicts with text as keys (a time: its isoformat())"


def check_seconds(timeout: float, patience: float) -> None:
    """Refuse a `timeout` that would never end, and a `patience` that is not a duration."""
    if not _is_number(timeout) or not 0 < timeout < math.inf:
        refuse("invalid_timeout", f"timeout must be a number of seconds above 0, not {timeout!r}", "timeout")
    if not _is_number(patience) or not patience >= 0:
        refuse("invalid_patience", f"patience must be a number of seconds (0: one try), not {patience!r}", "patience")


def check_wait(seconds: float, field: str) -> float:
    """Return it unchanged; refuse what is not a duration. One below 0 is none: a deadline that has passed."""
    if not _is_number(seconds) or math.isnan(seconds):
        refuse("invalid_field", f"{field} must be a number of seconds, not {seconds!r}", field)
    return seconds


def check_id(word: Any) -> str:
    """Return it as text, as a `UUID` has it; refuse what is not an id or a name, such as the receipt of a send."""
    if isinstance(word, UUID):
        return str(word)
    if not isinstance(word, str):
        sentence = "an id or a name must be text, such as the `client_message_id` that `send` returned, not "
        refuse("invalid_field", sentence + type(word).__name__)
    if not word:
        refuse("invalid_field", "an id or a name is empty: give the one that you mean")
    return word


def segment(word: Any) -> str:
    """Return an id or a name as a segment of a path; refuse what none can be."""
    try:
        return quote(check_id(word), safe=":")
    except UnicodeEncodeError as error:
        refuse("invalid_field", f"{not_text(error)}: give an id or a name that is")


def path_of(*words: Any) -> str:
    """Return the path of what these words name, as `/v1/topics/orders`; refuses as `segment` does."""
    return "/v1/" + "/".join(map(segment, words))


def check_verb(verb: Any, verbs: Iterable[str]) -> None:
    """Refuse a verb that is not one of `verbs`."""
    names = list(verbs)
    if verb not in names:
        refuse("invalid_field", f"there is no verb {verb!r}: use {', '.join(names)}", "verb")


def check_traceparent(traceparent: Any) -> str:
    """Return it unchanged; refuse what no header can hold (the daemon ignores any other invalid traceparent)."""
    if not isinstance(traceparent, str) or not (traceparent.isascii() and traceparent.isprintable()):
        sentence = "traceparent must be plain text as 00-<32 hex digits>-<16 hex digits>-01 (W3C Trace Context)"
        refuse("invalid_field", sentence, "traceparent")
    return traceparent


def check_headers(headers: Any) -> Mapping[str, str]:
    """Return them unchanged; refuse what is not a mapping of text to text, such as a list of pairs or bytes."""
    items = getattr(headers, "items", None)
    if items is None or not all(isinstance(word, str) for pair in items() for word in pair):
        refuse("invalid_field", 'headers must be a mapping of text to text, as {"ce-id": "17", …}', "headers")
    return cast(Mapping[str, str], headers)


def check_bytes(body: Any) -> bytes:
    """Return it as bytes; refuse what is not, such as text, which JSON would put between quotes."""
    if body is not None and not isinstance(body, BYTES):
        refuse("invalid_field", f"the body must be bytes, as the request had them, not {type(body).__name__}", "body")
    return bytes(body or b"")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def compose(
    to: str,
    body: Body = None,
    *,
    meta: Mapping[str, Any] | None = None,
    priority: Priority = "next",
    reply_to: str | None = None,
    mentions: Sequence[str] | None = None,
    client_message_id: UUID | str | None = None,
    not_before: datetime | None = None,
) -> SendRequest:
    """Build a send: bytes travel as `body_base64`, a dict or a list as the text of its JSON, with sorted keys.

    Without a `client_message_id` one is minted. Raises `InvalidMessage` for any other body, and for values that JSON
    cannot represent: a program without type checks must not send something else instead.
    """
    if isinstance(mentions, str):
        refuse("invalid_field", f"mentions must be a list of members, as in [{mentions!r}]", "mentions")
    if not isinstance(mentions, Iterable | None):
        refuse("invalid_field", f"mentions must be a list of members, not {type(mentions).__name__}", "mentions")
    if isinstance(client_message_id, UUID):
        client_message_id = str(client_message_id)
    if isinstance(body, (Mapping, list)):
        body = _json_text(body if isinstance(body, list) else dict(body))
    given: Any = body
    if not isinstance(given, str | bytes | bytearray | memoryview | None):
        rule = "the body must be text, bytes, or a dict or a list to send as JSON"
        made = "msgspec.to_builtins(…) makes a dict of a dataclass or a Struct, model_dump(mode='json') of a model"
        text = "of Pydantic, json.dumps(…) a text of other values"
        refuse("invalid_field", f"{rule}, not {type(given).__name__}: {made} {text}; give one of these", "body")
    return SendRequest(
        to=to,
        body=body if isinstance(body, str) else None,
        body_base64=None if body is None or isinstance(body, str) else base64.b64encode(bytes(body)).decode(),
        meta=dict(meta) if isinstance(meta, Mapping) else meta,
        priority=priority,
        reply_to=reply_to,
        mentions=None if mentions is None else list(mentions),
        client_message_id=new_id() if client_message_id is None else client_message_id,
        not_before=not_before,
    )


def _json_text(value: dict[str, Any] | list[Any]) -> str:
    """Write JSON, the same text for the same value: a repeated send must have the same content."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
        wrong = None if json.loads(text) == value else "it has keys that are not text, or tuples"
    except (TypeError, ValueError, RecursionError) as error:
        wrong = value_fault(error)
    if wrong is not None:
        rule = f"{META_RULE}, or encode it yourself and send the text"
        refuse("body_not_json", f"the body cannot be written as JSON: {wrong}; {rule}", "body")
    return text


def to_json(value: Any) -> bytes:
    """Write JSON, also of a time, a dataclass and the like, as msgspec does.

    Raises `TypeError`, `ValueError` or `RecursionError` for what JSON cannot represent (NaN would become null).
    """
    data = msgspec.json.encode(value, enc_hook=plain_scalar)
    if b"null" in data:
        json.dumps(msgspec.to_builtins(value, enc_hook=plain_scalar), allow_nan=False)
    return data


def event_json(payload: Any) -> bytes:
    """Write the payload of an event as `to_json` does; raises `InvalidMessage` for what JSON cannot represent."""
    try:
        return to_json(payload)
    except (TypeError, ValueError, RecursionError) as error:
        detail = f"the payload cannot be written as JSON: {value_fault(error)}; give what JSON can express"
        raise InvalidMessage.of("invalid_event", detail) from error


def plain_scalar(value: Any) -> Any:
    """Return a text or a number of a class of its own as JSON has it: Django's SafeString, numpy's float64."""
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, msgspec.Raw):  # which is JSON already
        return None
    way = "as model_dump(mode='json') does of a Pydantic model"
    raise TypeError(f"a value of type {type(value).__name__} is not JSON: make a dict or a text of it first, {way}")


def with_id(request: SendRequest) -> SendRequest:
    """Return `request`, with a fresh id where it has none: both tries of a send need the same id."""
    if not isinstance(request, SendRequest):
        refuse("invalid_message", f"a stream of messages must yield SendRequest, not {type(request).__name__}")
    if request.client_message_id is not None:
        return request
    return msgspec.structs.replace(request, client_message_id=new_id())


def encode(request: SendRequest) -> bytes:
    """Encode a send as JSON; raises `InvalidMessage` for what JSON cannot represent (NaN would become null)."""
    # refuse bytes where text belongs, which JSON would turn into other text, a meta that is not a dict, and a timedelta
    for field in ("body", "body_base64"):
        if not isinstance(getattr(request, field), str | None):
            refuse("invalid_field", f"{field} must be text: give bytes as `body_base64`, in base64", field)
    named = request.mentions if isinstance(request.mentions, list | tuple | set) else ()
    if any(isinstance(each, BYTES) for each in (request.to, request.client_message_id, request.reply_to, *named)):
        refuse("invalid_field", "to, client_message_id, reply_to and mentions must be text, not bytes: decode them")
    if not isinstance(request.meta, dict | None):
        refuse("invalid_field", f"meta must be an object (a dict), not {type(request.meta).__name__}", "meta")
    moment: Any = request.not_before
    if not isinstance(moment, datetime | str | None):  # text is a time as JSON writes it
        sentence = (
            f"not_before must be a time, not {type(moment).__name__}, as datetime.now(UTC) + timedelta(minutes=5)"
        )
        refuse("invalid_field", sentence, "not_before")
    try:
        canonical_json(request.meta)
        return msgspec.json.encode(request, enc_hook=plain_scalar)
    except NotCanonical as error:
        what = re.sub(r"<class '(.*)'>", r"\1", str(error))
        refuse("meta_not_canonical", f"meta cannot be fingerprinted (RFC 8785): {what}; {META_RULE}", "meta")
    except UnicodeEncodeError as error:
        advice = ": send a body of bytes" if error.object == request.body else ""
        refuse("invalid_json", f"{not_text(error)}{advice}")
    except RecursionError:
        refuse("too_deep", f"meta is nested deeper than {MAX_DEPTH} levels", "meta")
    except TypeError as error:
        refuse("invalid_field", f"to, priority, client_message_id, reply_to and mentions must be text: {error}")
