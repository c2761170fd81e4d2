"""Named queries from `.sql` files, so that no SQL stands in Python.

A file holds any number of queries; each begins with a line `-- name: <name>` and a line that says what it does:

    -- name: accept_lookup
    -- The rows that already hold one of these ids.
    SELECT …;
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: ([a-z0-9_]+)\n-- \S", re.MULTILINE)


class Queries(Mapping[str, str]):
    """The queries of one file by name; an unknown name is a `KeyError` when the module that wants it is imported."""

    def __init__(self, text: str) -> None:
        heads = list(_NAME.finditer(text))
        ends = [head.start() for head in heads[1:]] + [len(text)]
        self._queries = {head[1]: text[head.start() : end].strip() for head, end in zip(heads, ends, strict=False)}
        if len(self._queries) != text.count("-- name:"):
            raise ValueError("a query has no description, or a name is used twice")

    def __getitem__(self, name: str) -> str:
        return self._queries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


def load_queries(package: str, file: str = "queries.sql") -> Queries:
    """Load the named queries of `package`."""
    return Queries(read_sql(package, file))


def read_sql(package: str, file: str) -> str:
    """Return the text of one `.sql` file of `package`."""
    return files(package).joinpath(file).read_text("utf-8")
