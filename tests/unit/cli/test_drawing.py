"""The tree of a job as lines, and commands that are longer than one."""

from __future__ import annotations

import shlex
from typing import NamedTuple

import pytest

from cli.output import draw, fold_command


class Item(NamedTuple):
    id: str
    parent: str | None


def drawn(*items: tuple[str, str | None]) -> list[str]:
    return [lead + item.id for lead, item, _ in draw([Item(*each) for each in items])]


def test_children_hang_below_their_parent_in_their_order() -> None:
    tree = drawn(("c", "b"), ("root", None), ("b", "root"), ("d", "b"), ("e", "root"), ("f", "e"))
    assert tree == ["root", "├─ b", "│  ├─ c", "│  └─ d", "└─ e", "   └─ f"]


def test_an_item_without_its_parent_is_drawn_all_the_same() -> None:
    assert drawn(("root", None), ("lost", "nobody"), ("child", "lost")) == ["root", "lost", "└─ child"]


def test_a_chain_may_be_longer_than_python_recurses() -> None:
    chain = [(str(number), str(number - 1) if number else None) for number in range(3000)]
    assert len(drawn(*chain)) == 3000


def folded(*items: tuple[str, str | None]) -> list[tuple[str, int]]:
    counted = draw([Item(*each) for each in items], alike=lambda item: item.id[0])
    return [(item.id, count) for _, item, count in counted]


def test_leaves_that_are_alike_and_follow_one_another_are_one_with_their_number() -> None:
    tree = (("root", None), ("a1", "root"), ("a2", "root"), ("b1", "root"), ("a3", "root"), ("a4", "root"))
    assert folded(*tree) == [("root", 1), ("a1", 2), ("b1", 1), ("a3", 2)]


def test_what_has_children_and_leaves_of_two_parents_are_not_folded() -> None:
    tree = (("root", None), ("a1", "root"), ("a2", "root"), ("b1", "a1"), ("b2", "a2"), ("b3", "a1"))
    assert folded(*tree) == [("root", 1), ("a1", 1), ("b1", 2), ("a2", 1), ("b2", 1)]


def test_nothing_is_drawn_as_nothing() -> None:
    assert drawn() == []


@pytest.mark.parametrize("width", [30, 50, 80])
@pytest.mark.parametrize(
    "command",
    [
        "postroom outbox list --status dead --socket /var/lib/postroom/a-very-long-name-of-a-mesh/daemon.sock",
        "postroom topic create x --mesh demo && postroom outbox requeue 01M83EEJ --reason 'its cause is repaired'",
        "journalctl -u postroomd@demo  # on red, where the daemon of the mesh runs",
        "echo 'a word of which two parts stand between quotes'\"and more of it\"",
    ],
)
def test_a_command_that_is_folded_can_be_pasted_as_it_is(command: str, width: int) -> None:
    lines = list(fold_command(command, width, "    "))
    assert shlex.split("".join(line.removesuffix("\\") for line in lines), comments=True) == shlex.split(
        command, comments=True
    )
    assert all(line.endswith(" \\") for line in lines[:-1])
