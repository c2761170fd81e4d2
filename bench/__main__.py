"""`make bench`: every benchmark, or those named, each with its ratio to a baseline of the same run."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.accept import accept
from bench.attacks import attacks
from bench.backlog import backlog
from bench.deliver import deliver, handle, publish
from bench.history import spark_source
from bench.jobs import jobs
from bench.relay import relay
from bench.report import machine
from bench.send import against_jetstream, batch_sends, single_sends
from bench.spark import spark_sink

BENCHMARKS: Final[dict[str, Callable[[Path, int, float], None]]] = {
    "send": single_sends,
    "jetstream": against_jetstream,
    "batch": batch_sends,
    "backlog": backlog,
    "attacks": attacks,
    "accept": accept,
    "relay": relay,
    "publish": publish,
    "handle": handle,
    "deliver": deliver,
    "jobs": jobs,
    "spark-sink": spark_sink,
    "history": spark_source,
}


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(BENCHMARKS)}")
    parser.add_argument("--runs", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--seconds", type=float, default=5.0, help="length of each load, in seconds (default 5)")
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHMARKS):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    print(f"{machine()}; {options.runs} runs of {options.seconds:g} s; median (least to most)")
    for name in options.names or BENCHMARKS:
        print(f"\n## {name}")
        with tempfile.TemporaryDirectory(prefix="postroom-bench-") as directory:
            Path(directory).chmod(0o711)
            BENCHMARKS[name](Path(directory), options.runs, options.seconds)


if __name__ == "__main__":
    main()
