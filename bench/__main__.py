"""`make bench`: every benchmark, or those named, each with its ratio to a baseline of the same run.

A refused send, or anything else that makes a run show nothing, makes its benchmark void. Exit code 1 if a benchmark is
void, or a goal was missed or could not be measured; else 0.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Final

import uvloop

from bench import accept, clients, commands, console, delivery, jobs, sends, spark, way
from bench.driver import Void
from bench.goals import GOALS
from bench.report import PAGE, Measure, Results, machine, write

_DESCRIPTORS: Final = 8192
_ONCE: Final = frozenset({"backlog", "commands", "console", "history"})  # what they prepare is measured several times

Benchmark = Callable[[Path, float, Results], AsyncIterator[Measure]]

BENCHMARKS: Final[dict[str, Benchmark]] = {
    "send": sends.single,
    "random-ids": sends.random_ids,
    "clients": clients.clients,
    "batch": sends.batch,
    "backlog": sends.backlog,
    "accept": accept.accept,
    "brokers": accept.brokers,
    "relay": accept.relay,
    "full": way.full,
    "steady": way.steady,
    "lone": way.lone,
    "publish": delivery.publish,
    "consume": delivery.consume,
    "agent": delivery.agent,
    "jobs": jobs.jobs,
    "commands": commands.commands,
    "idle": commands.idle,
    "console": console.console,
    "spark-sink": spark.sink,
    "history": spark.history,
}


def main() -> int:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="a part of every load, while developing")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    if options.write and options.scale != 1:
        parser.error("a part of the load shows nothing that could be written down")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, _DESCRIPTORS)), hard))
    os.umask(0o022)  # the unprivileged Postgres of root has to pass through what is made here
    passed = True
    for name in options.names or BENCHMARKS:
        print(f"\n## {name}", flush=True)
        runs = 1 if name in _ONCE else options.runs
        results = measure(name, runs, options.scale)
        part = "" if options.scale == 1 else f" --scale {options.scale:g}"
        text = results.text(f"python -m bench {name} --runs {runs}{part}")
        print(f"\n{text}", flush=True)
        if options.write:
            write(name, text, PAGE)
        passed = passed and results.passed
    return 0 if passed else 1


def measure(name: str, runs: int, scale: float) -> Results:
    """Run a benchmark so many times; the first run that is void is the last."""
    results = Results(GOALS.get(name, {}), machine())
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as directory:
        Path(directory).chmod(0o711)
        uvloop.run(_runs(BENCHMARKS[name], Path(directory), runs, scale, results))
    return results


async def _runs(benchmark: Benchmark, directory: Path, runs: int, scale: float, results: Results) -> None:
    try:
        for number in range(runs):
            (directory / str(number)).mkdir(mode=0o711)
            async for found in benchmark(directory / str(number), scale, results):
                results.add(found)
                print(f"  {found}", flush=True)
    except Void as error:
        results.void = str(error)
    except Exception as error:  # noqa: BLE001 - the benchmarks after it are run all the same
        traceback.print_exc()
        results.void = f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    sys.exit(main())
