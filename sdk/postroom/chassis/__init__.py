"""The chassis under every process of Postroom: config, logs, start and stop, systemd, routes, SQL files, metrics."""

import gc


def import_quickly() -> None:
    """Search for no garbage while a program imports what it consists of, until `collect_rarely`."""
    gc.set_threshold(1_000_000)


def collect_rarely() -> None:
    """Search rarely, and never in what there is by now: a batch's many small objects are dropped with it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
