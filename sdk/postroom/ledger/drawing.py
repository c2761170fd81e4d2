"""Drawing the tree of a job: pure, and for trees of any depth."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Final, TypeVar

T = TypeVar("T")

_BRANCH: Final = ("├─ ", "│  ")  # before an item, before what grows out of it
_LAST: Final = ("└─ ", "   ")


def fold(
    items: Iterable[T],
    *,
    key: Callable[[T], Hashable],
    parent: Callable[[T], Hashable],
    alike: Callable[[T], Hashable],
) -> list[tuple[T, int]]:
    """Return the items, each with 1; of leaves that are alike and follow one another, the first with their number."""
    listed = list(items)
    inner = {parent(item) for item in listed}
    folded: list[tuple[T, int]] = []
    latest: dict[Hashable, tuple[Hashable, int]] = {}  # of a parent's last child: its likeness, its place in `folded`
    for item in listed:
        likeness = (key(item),) if key(item) in inner else (None, alike(item))
        before, place = latest.get(parent(item), (None, 0))
        if likeness == before:
            folded[place] = (folded[place][0], folded[place][1] + 1)
        else:
            latest[parent(item)] = (likeness, len(folded))
            folded.append((item, 1))
    return folded


def draw(
    items: Iterable[T], *, key: Callable[[T], Hashable], parent: Callable[[T], Hashable]
) -> Iterator[tuple[str, T]]:
    """Yield every item with the lines that lead to it, a parent before its children and these in their order.

    `parent` is None for a root. An item whose parent is not among the items is drawn as a root: nothing is left out.
    """
    listed = list(items)
    known = {key(item) for item in listed}
    children: dict[Hashable, list[T]] = {}
    for item in listed:
        above = parent(item)
        children.setdefault(above if above in known else None, []).append(item)
    open_: list[tuple[str, str, T]] = [("", "", root) for root in reversed(children.get(None, []))]
    while open_:
        lead, below, item = open_.pop()
        yield lead, item
        grown = children.get(key(item), [])
        for number, child in enumerate(reversed(grown)):
            stem, line = _BRANCH if number else _LAST
            open_.append((below + stem, below + line, child))
