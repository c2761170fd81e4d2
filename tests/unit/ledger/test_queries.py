"""Every query of the ledgers is named by the code."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroom import ledger
from postroom._wire.sql import load_queries

ROOM = Path(ledger.__file__).parent
FILES = sorted(file.name for file in ROOM.glob("*.sql"))


@pytest.mark.parametrize("file", FILES)
def test_every_query_is_used(file: str) -> None:
    source = "".join(module.read_text() for module in ROOM.rglob("*.py"))

    assert [name for name in load_queries("postroom.ledger", file) if f'"{name}"' not in source] == []
