"""`python -m console --config FILE`: the console without the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from console.main import main

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m console", description="A page for the operators of Postroom.")
    parser.add_argument("--config", type=Path, help="a TOML file; POSTROOM_CONSOLE_… override it")
    sys.exit(main(parser.parse_args().config))
