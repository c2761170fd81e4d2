"""CloudEvents 1.0 over HTTP (https://cloudevents.io): read where they arrive, written where a handler expects them.

An event is a JSON object (structured mode, `application/cloudevents+json`), or its attributes are headers and its data
the body (binary mode). As a message its data is the body and its attributes are `meta.cloudevent`, so that a handler
of CloudEvents gets the event back unchanged. `source` and `id` name an event, and so the message: an event that is sent
twice is one message.
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, Self
from urllib.parse import quote, unquote

import msgspec

from postroom._wire.message import (
    MAX_META_VALUES,
    SendRequest,
    To,
    refuse,
    refuse_duplicate_keys,
    refuse_too_many_values,
)
from postroom._wire.moment import Moment
from postroom._wire.transport import JSON
from postroom._wire.words import json_fault
from postroom.errors import InvalidMessage

STRUCTURED: Final = "application/cloudevents+json"
BATCH: Final = "application/cloudevents-batch+json"
META: Final = "cloudevent"  # the member of meta
VERSION: Final = "1.0"
MOST_IN_HEADERS: Final = 50  # attributes of an event in binary mode that we send, below what a server takes
MOST_IN_A_HEADER: Final = 4096  # bytes of one of them

_UTF8: Final = ("charset=utf-8", 'charset="utf-8"')
_HEADER: Final = "ce-"
_CONTENT_TYPE: Final = "datacontenttype"  # in binary mode the header Content-Type
_REQUIRED: Final = ("specversion", "id", "source", "type")
_NAME: Final = re.compile(r"(?!data$)[a-z0-9]{1,20}")
_IS_JSON: Final = re.compile(r"[\w.+-]+/(?:[\w.-]+\+)?json", re.IGNORECASE)
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_UNQUOTED: Final = "!#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # printable ASCII but for space, `"` and `%`


class _Structured(msgspec.Struct):
    """The members of an event in JSON that are not attributes; the bytes of its data are kept as they came."""

    data: msgspec.Raw = msgspec.Raw(b"")
    data_base64: str | None = None


class CloudEventQuery(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The query string of `POST /v1/cloudevents`: where the event goes, as `to` of a send."""

    to: To


class CloudEvent(NamedTuple):
    """An event: its attributes, extensions among them, and its data as bytes (None where it has none)."""

    attributes: dict[str, Any]
    data: bytes | None

    @classmethod
    def of(cls, attributes: dict[str, Any], data: bytes | None) -> Self:
        """Check the attributes; data is JSON where they do not say. Raises `InvalidMessage`."""
        return cls(_checked(attributes if data is None else {_CONTENT_TYPE: JSON, **attributes}), data)

    @property
    def media(self) -> str:
        """The media type of its data."""
        return str(self.attributes.get(_CONTENT_TYPE, JSON))

    def structured(self) -> bytes:
        """Return it as one JSON object."""
        members = dict(self.attributes)
        if self.data is not None:
            if not is_json(self.media):
                members |= _text_or_base64(self.data, "data", "data_base64")
            elif _decodes(self.data):
                members["data"] = msgspec.Raw(self.data)
            else:
                members["data_base64"] = base64.b64encode(self.data).decode()
        return msgspec.json.encode(members)

    def headers(self) -> dict[str, str]:
        """Return its attributes as headers, but for the `Content-Type` of its data, which is the body."""
        said = {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in self.attributes.items()
            if name != _CONTENT_TYPE
        }
        return {f"{_HEADER}{name}": quote(text, safe=_UNQUOTED) for name, text in said.items()}

    def message(self, to: str) -> SendRequest:
        """Return the event as a message to `to`; its id follows from the event's."""
        named = hashlib.sha256(f"{self.attributes['source']}\n{self.attributes['id']}".encode()).hexdigest()
        body = {} if self.data is None else _text_or_base64(self.data, "body", "body_base64")
        return SendRequest(to=to, client_message_id=f"ce-{named[:40]}", meta={META: self.attributes}, **body)


def read_event(headers: Mapping[str, str], body: bytes) -> CloudEvent:
    """Read an event from a request in either mode; raises `InvalidMessage`."""
    given: dict[str, str] = {}
    for name, value in headers.items():
        if name.lower() in given and name.lower().startswith(_HEADER):
            refuse("invalid_field", f"the header {name} is given twice", name.lower().removeprefix(_HEADER))
        given[name.lower()] = value
    media, *parameters = [part.strip().lower() for part in given.get("content-type", "").split(";")]
    if media == BATCH:
        refuse("unsupported_media_type", f"a batch of events is not accepted: send each by itself, as {STRUCTURED}")
    if media == STRUCTURED:
        if any(part.startswith("charset") and part not in _UTF8 for part in parameters):
            refuse("unsupported_media_type", f"the event must be in UTF-8: omit the charset of {STRUCTURED}")
        return _read_structured(body)
    attributes: dict[str, Any] = {
        name.removeprefix(_HEADER): _unquote(name, value) for name, value in given.items() if name.startswith(_HEADER)
    }
    if not attributes:
        sentence = f"not a CloudEvent: its Content-Type is not {STRUCTURED}, and it has no header ce-specversion"
        refuse("unsupported_media_type", sentence)
    if body and "content-type" in given:
        attributes[_CONTENT_TYPE] = given["content-type"]
    return CloudEvent.of(attributes, body or None)


def is_json(media: str) -> bool:
    """Return whether data of a media type is JSON."""
    return _IS_JSON.fullmatch(media.partition(";")[0].strip()) is not None


def _read_structured(body: bytes) -> CloudEvent:
    try:
        refuse_too_many_values(body)
    except InvalidMessage:
        sentence = (
            f"the event has more than {MAX_META_VALUES} values: send it in binary mode, where data is not decoded"
        )
        refuse("event_too_large", sentence, "data")
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        rest = msgspec.json.decode(body, type=_Structured)
        attributes = {
            name: msgspec.json.decode(value)
            for name, value in members.items()
            if name not in ("data", "data_base64") and bytes(value) != b"null"
        }
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refuse("invalid_json", f"the event is not one JSON object in UTF-8: {json_fault(error, body)}")
    refuse_duplicate_keys(body)
    data = bytes(rest.data) or None
    if rest.data_base64 is not None:
        if data is not None:
            refuse("two_bodies", "give data or data_base64, not both", "data_base64")
        try:
            data = base64.b64decode(rest.data_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            refuse("invalid_base64", f"data_base64 is not base64 (RFC 4648 §4): {error}", "data_base64")
    elif data is not None and not is_json(str(attributes.get(_CONTENT_TYPE, JSON))):
        text = msgspec.json.decode(data)
        data = text.encode() if isinstance(text, str) else data
    return CloudEvent.of(attributes, data)


def _checked(attributes: dict[str, Any]) -> dict[str, Any]:
    for name in _REQUIRED:
        if not isinstance(attributes.get(name), str) or not attributes[name]:
            refuse("invalid_field", f"a CloudEvent needs the attribute `{name}`, a text that is not empty", name)
    if attributes["specversion"] != VERSION:
        refuse("unsupported_version", f"CloudEvents {attributes['specversion']!r} is not {VERSION}", "specversion")
    for name, value in attributes.items():
        if _NAME.fullmatch(name) is None:
            rule = "use 1 to 20 lower-case letters and digits, but not `data`"
            refuse("invalid_field", f"{name!r} is not an attribute's name in CloudEvents: {rule}", name[:64])
        if not isinstance(value, str | int | bool):
            refuse("invalid_field", f"the attribute `{name}` must be text, a whole number, or true or false", name)
        if isinstance(value, str) and _CONTROL.search(value):
            refuse("invalid_field", f"the attribute `{name}` has control characters, or half of a surrogate pair", name)
    try:
        msgspec.convert(attributes.get("time"), Moment | None)
    except msgspec.ValidationError:
        refuse("invalid_field", "`time` must be an RFC 3339 time with an offset", "time")
    return attributes


def _decodes(data: bytes) -> bool:
    """Return whether data really is JSON, as its media type claims: nothing has decoded it before."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _text_or_base64(data: bytes, text: str, encoded: str) -> dict[str, Any]:
    try:
        decoded = data.decode()
    except UnicodeDecodeError:
        decoded = "\0"
    return {encoded: base64.b64encode(data).decode()} if "\0" in decoded else {text: decoded}


def _unquote(name: str, value: str) -> str:
    try:
        return unquote(value, errors="strict")
    except UnicodeDecodeError:
        refuse("invalid_field", f"the header {name} is not percent-encoded UTF-8", name.removeprefix(_HEADER))
