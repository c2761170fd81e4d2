"""A worker with a registry, as a process that a test can stop or kill at each of its steps.

    python once_worker.py REGISTRY-URL LEASE EFFECTS-FILE [--stop-at STEP] KEY…

It does each key once: the effect is a line in the file. `--stop-at` says the step on stdout once it is there, and then
waits for a line on stdin: `begun`, `effect` (had, not committed), `committed`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from postroom.once import LeaseLost, Registry, open_registry


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("lease", type=float)
    parser.add_argument("effects", type=Path)
    parser.add_argument("--stop-at")
    parser.add_argument("keys", nargs="+")
    return parser.parse_args()


def stop(given: argparse.Namespace, step: str) -> None:
    if given.stop_at == step:
        print(step, flush=True)  # noqa: T201 - the test reads it
        sys.stdin.readline()  # the loop stands still meanwhile, as a stopped process would


def have_effect(given: argparse.Namespace, key: str) -> None:
    file = os.open(given.effects, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, f"{key}\n".encode())
    os.close(file)


async def do_once(registry: Registry, given: argparse.Namespace, key: str) -> None:
    async with registry.once("acme", "orders", key) as claim:
        if claim.first:
            stop(given, "begun")
            have_effect(given, key)
            stop(given, "effect")
            claim.result = key
    stop(given, "committed")
    print(f"{key} {claim.attempt} {claim.last_error} {claim.result}", flush=True)  # noqa: T201 - the same


async def main() -> None:
    given = arguments()
    async with open_registry(given.url, group="billing", lease=given.lease, wait=60) as registry:
        for key in given.keys:
            try:
                await do_once(registry, given, key)
            except LeaseLost:
                print(f"{key} lease_lost", flush=True)  # noqa: T201 - the same


asyncio.run(main())
