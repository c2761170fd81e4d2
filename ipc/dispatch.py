"""From a request's method and target to its route: the literal table, matched on the target as it was sent.

Nothing is decoded or normalised on the way: `/v1/%73end`, `//v1/send` and `/v1/../v1/send` are other paths, and 404.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from ipc.answers import problem_of
from postroom.chassis.routes import Route
from postroom.errors import NotFound, PostroomError

MAX_SEGMENT: Final = 512  # characters of one variable part of a path


class Found(NamedTuple):
    """A route, and the variable parts of the path that led to it."""

    route: Route
    params: dict[str, str]


class Table:
    """The routes, indexed: fixed paths by a dictionary, variable ones by their segments."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.fixed: Final[dict[tuple[str, str], Route]] = {}
        self._variable: Final[defaultdict[int, list[tuple[list[str], Route]]]] = defaultdict(list)
        for route in routes:
            if "{" in route.path:
                segments = route.path.split("/")
                self._variable[len(segments)].append((segments, route))
            else:
                self.fixed[route.method, route.path] = route

    def find(self, method: str, path: str) -> Found:
        """Return the route; raises `NotFound`, or a 405 where the path takes other methods."""
        if route := self.fixed.get((method, path)):
            return Found(route, {})
        candidates = list(self._candidates(path))
        for found in candidates:
            if found.route.method == method:
                return found
        if candidates:
            raise MethodNotAllowed(found.route.method for found in candidates)
        raise NotFound.of("no_such_route", "there is no such route: GET /v1/openapi.json lists them all")

    def _candidates(self, path: str) -> Iterable[Found]:
        fixed = [route for (_, known), route in self.fixed.items() if known == path]
        if fixed:
            yield from (Found(route, {}) for route in fixed)
            return
        parts = path.split("/")
        for segments, route in self._variable.get(len(parts), ()):
            if (params := _match(segments, parts)) is not None:
                yield Found(route, params)


class MethodNotAllowed(PostroomError):
    """The path is there, for other methods (405); `allow` lists those it takes."""

    def __init__(self, methods: Iterable[str]) -> None:
        self.allow = ", ".join(sorted(set(methods)))
        super().__init__(problem_of(405, "method_not_allowed", f"this path accepts {self.allow}"))


def _match(segments: list[str], parts: list[str]) -> dict[str, str] | None:
    params = {}
    for segment, part in zip(segments, parts, strict=True):
        if segment.startswith("{"):
            if not part or len(part) > MAX_SEGMENT:
                return None
            params[segment[1:-1]] = part
        elif segment != part:
            return None
    return params
