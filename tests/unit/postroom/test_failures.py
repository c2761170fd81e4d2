"""What a handler raised, as a sentence that can be kept."""

from __future__ import annotations

import pytest

from postroom._wire.retry import error_text


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


class Deadly(Exception):
    def __str__(self) -> str:
        raise SystemExit


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError("the disk is full"), "OSError: the disk is full"),
        (AssertionError(), "AssertionError"),
        (ValueError("a\0b \ud800"), r"ValueError: a\x00b \ud800"),
        (Mute(), "Mute: (its text is not available: RuntimeError)"),
        (Deadly(), "Deadly: (its text is not available: SystemExit)"),
        (
            ExceptionGroup("2", [OSError("ink"), ExceptionGroup("1", [KeyError("day")])]),
            "ExceptionGroup: 2 (2 sub-exceptions): OSError: ink; ExceptionGroup: 1 (1 sub-exception): KeyError: 'day'",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_is_told_with_all_that_can_be_kept_of_it(error: BaseException, told: str) -> None:
    assert error_text(error) == told


def test_a_long_error_is_cut() -> None:
    assert len(error_text(ValueError("x" * 1_000_000))) == 1000


def test_of_groups_in_groups_as_many_are_told_as_in_a_traceback() -> None:
    error: Exception = ValueError("of a tree whose every branch is a task group")
    for _ in range(2000):
        error = ExceptionGroup("1", [error])
    told = "ExceptionGroup: 1 (1 sub-exception): "
    assert error_text(error) == told * 10 + "…"
