"""A peer's words end in logs and columns."""

from __future__ import annotations

from postroom.chassis.logs import MAX_WORDS, clean


def test_a_peers_words_are_made_fit_for_a_column() -> None:
    dirty = "a\0b\nc\x1b[31m\ud800d" + "x" * 10_000

    assert clean(dirty).startswith("a b c [31m d")
    assert len(clean(dirty)) == MAX_WORDS
    clean(dirty).encode()
