"""Every query of the ledgers is named by the code."""

from __future__ import annotations

import inspect

from ledger import primitives


def test_every_query_is_used() -> None:
    source = inspect.getsource(primitives)

    assert [name for name in primitives.QUERIES if f'"{name}"' not in source] == []
