"""SQL from files: the named queries of a package (`postroom._wire.sql`), and its numbered migrations."""

from __future__ import annotations

import re
from importlib.resources import files

from postroom._wire.sql import Queries, load_queries, read_sql

__all__ = ["Queries", "load_queries", "migrations", "read_sql"]


def migrations(package: str) -> list[tuple[int, str, str]]:
    """List `(version, name, sql)` of the files `migrations/NNNN_name.sql` of `package`, in order, without a gap."""
    found = sorted(
        (int(entry.name[:4]), entry.name.removesuffix(".sql"), entry.read_text("utf-8"))
        for entry in files(package).joinpath("migrations").iterdir()
        if re.fullmatch(r"\d{4}_[a-z0-9_]+\.sql", entry.name)
    )
    if [version for version, _, _ in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"the migrations of {package} are not numbered 1 to {len(found)}")
    return found
