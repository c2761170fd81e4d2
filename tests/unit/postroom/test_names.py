"""A name that does not fit is refused with its rule in words."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from postroom._wire.accept import SentMessage
from postroom._wire.administration import (
    CreateMember,
    CreateMesh,
    CreateOperator,
    CreateQueue,
    CreateTopic,
    CreateWebhook,
    Subscribe,
)
from postroom._wire.jobs import StartJob
from postroom._wire.names import in_words
from postroom._wire.operations import ReasonRequest


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        (CreateMesh, {"slug": "Sea"}, "Expected a name: a lower-case letter, .* not `cmd` - at `\\$.slug`"),
        (CreateMember, {"mesh": "sea", "name": "Bob"}, "Expected a name: a lower-case letter"),
        (CreateOperator, {"name": "administrator", "role": "look"}, "Expected a name: .*; not `administrator`"),
        (CreateTopic, {"mesh": "sea", "name": "order-placed"}, "Expected a name: a lower-case letter, .* or `_` - at"),
        (CreateQueue, {"mesh": "sea", "name": "a..b"}, "Expected a name: one to four words joined by dots"),
        (Subscribe, {"member": "*"}, "Expected a name: .*, `_` or `-` - at"),
        (ReasonRequest, {"reason": " "}, "Expected a text that is not blank .* - at `\\$.reason`"),
        (StartJob, {"mesh": "sea", "flow": "Export"}, "Expected a name: .* - at `\\$.flow`"),
        (StartJob, {"traceparent": "00-0"}, "Expected 00-<32 hex digits>.* - at `\\$.traceparent`"),
        (CreateWebhook, {"url": "ftp://here"}, "Expected an address that begins with http://"),
        (SentMessage, {"client_message_id": "a b"}, "Expected 1 to 128 characters of"),
        (SentMessage, {"request_fingerprint": "A" * 64}, "Expected a sha-256 in 64 lower-case hex digits"),
    ],
)
def test_the_rule_of_a_name_stands_where_the_pattern_stood(kind: Any, body: dict[str, str], words: str) -> None:
    with pytest.raises(msgspec.ValidationError, match="regex") as refused:
        msgspec.json.decode(msgspec.json.encode(body), type=kind)
    sentence = in_words(str(refused.value))
    assert "regex" not in sentence
    assert re.search(words, sentence), sentence


def test_another_sentence_stays_as_it_is() -> None:
    assert in_words("Expected `str`, got `int` - at `$.name`") == "Expected `str`, got `int` - at `$.name`"
