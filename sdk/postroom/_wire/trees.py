"""Trees of things that have parents: the steps of a story, the activities of a job."""

from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar


class Thing(Protocol):
    """Anything with a parent."""

    @property
    def id(self) -> Any:
        """Its id, which its children have as their parent."""

    @property
    def parent(self) -> Any:
        """The id of what it follows from; None for a root."""


T = TypeVar("T", bound=Thing)


class Branch(NamedTuple, Generic[T]):
    """A thing, and those that follow from it."""

    thing: T
    children: "list[Branch[T]]"


def grow(things: Iterable[T]) -> list[Branch[T]]:
    """Make trees of things; one whose parent is not among them is a root, so that nothing is left out."""
    branches = [Branch(thing, []) for thing in things]
    by_id = {branch.thing.id: branch for branch in branches}
    roots: list[Branch[T]] = []
    for branch in branches:
        above = by_id.get(branch.thing.parent)
        (roots if above is None else above.children).append(branch)
    return roots
