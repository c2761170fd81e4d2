"""Claims from a large outbox: how long everybody waits for one transaction of a claim, and how long a relay waits.

Runs as a process of its own (`python -m bench.claims`) on the files of a daemon that has stopped; prints one JSON
object with the latencies in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Final

from bench.load import percentiles
from outbox import Outbox, OutboxSettings
from outbox.outbox import CLAIM_AT_ONCE, CLAIM_ROWS

CLAIMS: Final = 200  # of each size
SIZES: Final = (CLAIM_AT_ONCE, CLAIM_ROWS)  # one transaction, and what a relay asks for


async def run(directory: Path) -> dict[str, tuple[float, float]]:
    """Claim from the outbox in `directory`; the p50 and p99 of claims of one transaction, and of whole ones."""
    outbox = await Outbox.open(directory, OutboxSettings(max_bytes=64 * 2**30))
    try:
        return {str(rows): percentiles([await _timed(outbox, rows) for _ in range(CLAIMS)]) for rows in SIZES}
    finally:
        await outbox.close()


async def _timed(outbox: Outbox, rows: int) -> float:
    began = time.perf_counter()
    claimed = await outbox.claim(limit=rows)
    if len(claimed) != rows:
        raise RuntimeError(f"a claim of {rows} rows found {len(claimed)}")
    return time.perf_counter() - began


def main() -> None:
    """Parse the options, claim, print the latencies as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    print(json.dumps(asyncio.run(run(parser.parse_args().directory))))


if __name__ == "__main__":
    main()
