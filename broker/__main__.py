"""`python -m broker [run|migrate|orphan-check|restored] --config FILE`: the broker without the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from broker.commands import COMMANDS, main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m broker", description="The accept service of Postroom.")
    parser.add_argument("command", nargs="?", default="run", choices=sorted(COMMANDS))
    parser.add_argument("--config", type=Path, help="a TOML file; POSTROOM_BROKER_… override it")
    options = parser.parse_args()
    sys.exit(main(options.command, options.config))
