"""Every query that the code names is there, and every query that is there is named by the code."""

from __future__ import annotations

import re
from pathlib import Path

import broker
from broker import trace
from broker.database import QUERIES

PACKAGE = Path(broker.__file__).parent


def test_queries_and_their_users_match() -> None:
    source = "".join(file.read_text() for file in PACKAGE.glob("*.py"))

    assert set(re.findall(r'QUERIES\["(\w+)"\]', source)) == {*QUERIES, *trace.QUERIES}
