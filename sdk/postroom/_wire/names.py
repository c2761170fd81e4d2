"""Names, and other texts with a rule: what each may be, as a pattern and in words (docs/contract/send.md#send-102).

What can be created can be written to, so the rules of administration are those of destinations. The constraints of the
tables are a second line of defence.
"""

import re
from typing import Final, Literal, NamedTuple

import msgspec

from postroom._wire.ids import ID_RULE
from postroom.errors import InvalidMessage

MAX_NAME: Final = 64  # characters of a name, or of a queue's segment


class Rule(NamedTuple):
    """What a text may be: `words` completes "… is not", and "Expected"."""

    pattern: re.Pattern[str]  # of the whole text
    words: str

    def allows(self, text: object) -> bool:
        """Return whether `text` is a text that matches."""
        return isinstance(text, str) and self.pattern.fullmatch(text) is not None

    @property
    def schema(self) -> str:
        """The pattern for msgspec and JSON Schema, which search; `$` alone would let a newline follow."""
        return rf"^{self.pattern.pattern}$(?!\n)"

    @property
    def shown(self) -> msgspec.Meta:
        """The same for the document alone, where a check of its own has a code of its own."""
        return msgspec.Meta(extra_json_schema={"pattern": self.schema})


_SNAKE: Final = "[a-z][a-z0-9_]{0,63}"
_WORD: Final = "[a-z][a-z0-9_-]{0,63}"

SNAKE: Final = Rule(re.compile(_SNAKE), "a lower-case letter, then at most 63 lower-case letters, digits or `_`")
WORD: Final = Rule(re.compile(_WORD), "a lower-case letter, then at most 63 lower-case letters, digits, `_` or `-`")
MESH: Final = Rule(re.compile(rf"(?!cmd$){_SNAKE}"), f"{SNAKE.words}; not `cmd`")  # all commands begin with that word
OPERATOR: Final = Rule(re.compile(rf"(?!administrator$){_WORD}"), f"{WORD.words}; not `administrator`")
QUEUE: Final = Rule(re.compile(rf"{_WORD}(\.{_WORD}){{0,3}}"), f"one to four words joined by dots, each {WORD.words}")
SUBJECTS: Final = Rule(  # of NATS: one subject, or a pattern for several
    re.compile(r"(?:(?:[^\s.*>\x00-\x1f\x7f]+|\*)\.)*(?:[^\s.*>\x00-\x1f\x7f]+|\*|>)"),
    "words joined by dots, `*` for any one word, a last `>` for one or more",
)
SUBJECT: Final = Rule(  # of our own making
    re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*"), "words of letters, digits, `_` and `-`, joined by dots"
)
STREAM: Final = Rule(re.compile("[A-Za-z0-9_-]{1,64}"), "1 to 64 letters, digits, `_` and `-`")  # or its consumer
REASON: Final = Rule(re.compile(r"\s*[^\s\0][^\0]*"), "a text that is not blank and has no NUL character")
MESSAGE_ID: Final = Rule(re.compile("[A-Za-z0-9._:~-]{1,128}"), ID_RULE)  # docs/contract/send.md#send-29
FINGERPRINT: Final = Rule(re.compile("[0-9a-f]{64}"), "a sha-256 in 64 lower-case hex digits")
TRACE: Final = Rule(
    re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}"),
    "00-<32 hex digits>-<16 hex digits>-01 (W3C Trace Context)",
)
URL: Final = Rule(re.compile("https?://[!-~]+"), "an address that begins with http:// or https:// and has no spaces")

_WHOSE: Final = {
    "mesh": ("a mesh's", MESH),
    "member": ("a member's", WORD),
    "operator": ("an operator's", OPERATOR),
    "topic": ("a topic's", SNAKE),
    "queue": ("a queue's", QUEUE),
}


def check_name(kind: Literal["mesh", "member", "operator", "topic", "queue"], name: str) -> str:
    """Return `name` if a thing of that `kind` may have it; raises `InvalidMessage` with the rule."""
    whose, rule = _WHOSE[kind]
    if not rule.allows(name):
        raise InvalidMessage.of("invalid_name", f"{name!r} is not {whose} name: {rule.words}", field=kind)
    return name


def in_words(sentence: str) -> str:
    """State the rule in words where msgspec's `sentence` shows its pattern."""
    for what, rule in (
        *(("a name: ", name) for name in (SNAKE, WORD, MESH, OPERATOR, QUEUE, STREAM)),
        *(("a subject: ", subject) for subject in (SUBJECT, SUBJECTS)),
        *(("", rule) for rule in (REASON, MESSAGE_ID, FINGERPRINT, TRACE, URL)),
    ):
        sentence = sentence.replace(f"`str` matching regex {rule.schema!r}", what + rule.words)
    return sentence
