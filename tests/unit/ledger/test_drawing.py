"""The tree of a job as lines."""

from __future__ import annotations

from operator import itemgetter

from ledger.drawing import draw


def drawn(*items: tuple[str, str | None]) -> list[str]:
    return [lead + item[0] for lead, item in draw(items, key=itemgetter(0), parent=itemgetter(1))]


def test_children_hang_below_their_parent_in_their_order() -> None:
    tree = drawn(("c", "b"), ("root", None), ("b", "root"), ("d", "b"), ("e", "root"), ("f", "e"))
    assert tree == ["root", "├─ b", "│  ├─ c", "│  └─ d", "└─ e", "   └─ f"]


def test_an_item_without_its_parent_is_drawn_all_the_same() -> None:
    assert drawn(("root", None), ("lost", "nobody"), ("child", "lost")) == ["root", "lost", "└─ child"]


def test_a_chain_may_be_longer_than_python_recurses() -> None:
    chain = [(str(number), str(number - 1) if number else None) for number in range(3000)]
    assert len(drawn(*chain)) == 3000


def test_nothing_is_drawn_as_nothing() -> None:
    assert drawn() == []
