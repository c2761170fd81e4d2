"""`python -m postroom.worker --config FILE`: the worker without the rest of the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from postroom.worker.commands import main


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m postroom.worker", description="The publishing worker of Postroom.")
    parser.add_argument("--config", type=Path, help="a TOML file; POSTROOM_WORKER_… override it")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_options().config))
