"""The chassis under every process of Postroom: config, logs, start and stop, systemd, routes, SQL files, metrics."""

import gc
import importlib
import sys


def import_quickly() -> None:
    """Search for no garbage while a program imports what it consists of, until `collect_rarely`.

    Structlog imports Rich where it can, for traces that no program of ours prints: a tenth of the time of a start.
    """
    gc.set_threshold(1_000_000)
    if "rich" not in sys.modules:
        sys.modules["rich"] = None  # type: ignore[assignment] # as where it is not installed
        try:
            importlib.import_module("structlog")
        finally:
            del sys.modules["rich"]


def collect_rarely() -> None:
    """Search rarely, and never in what there is by now: a batch's many small objects are dropped with it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
