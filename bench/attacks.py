"""Attacks by a local caller: what they do to the sends of another uid. Needs root, which alone can be two users."""

from __future__ import annotations

import grp
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import IO, Final, cast

from bench.attacker import KINDS
from bench.load import NOBODYS_GROUP, Figures
from bench.processes import Daemon, daemon, load
from embedded.processes import tethered

_VICTIM: Final = 60_001
_ATTACKER: Final = 60_002
_MOST: Final = 5.0  # times the quiet p99


def attacks(directory: Path, runs: int, seconds: float) -> None:
    """Measure the p99 of one uid's sends, quiet and under each attack of another uid, each on a daemon of its own."""
    if os.geteuid() != 0:
        print("  skipped: it needs root, which alone can be two users")
        return
    print(f"  {'attack':<14}{'sends/s':>10}{'p50':>12}{'p99':>12}{'of quiet':>11}")
    for kind in KINDS:
        ratios = []
        for run in range(runs):
            place = directory / f"attacks-{kind}-{run}"
            with daemon(place, SOCKET_GROUP=grp.getgrgid(NOBODYS_GROUP).gr_name) as daemon_:
                place.chmod(0o711)
                quiet = _load(daemon_, seconds, 0)
                with _attack(kind, daemon_.socket, place):
                    loud = _load(daemon_, seconds, 10**9)
            shutil.rmtree(place)
            ratios.append(loud.p99 / quiet.p99)
            _show("quiet", quiet)
            _show(kind, loud, ratios[-1])
        verdict = "reached" if median(ratios) <= _MOST else "MISSED"
        print(f"  = p99 under {kind}: {median(ratios):.1f} x   goal at most {_MOST:g}: {verdict}", flush=True)


def _load(daemon_: Daemon, seconds: float, first: int) -> Figures:
    return load(daemon_.socket, connections=1, seconds=seconds, first=first, uid=_VICTIM)


def _show(what: str, figures: Figures, ratio: float | None = None) -> None:
    line = f"  {what:<14}{figures.per_second:>10,.0f}{figures.p50 * 1e3:>9.2f} ms{figures.p99 * 1e3:>9.2f} ms"
    refused = f"  {figures.refused} REFUSED" if figures.refused else ""
    print(line + ("" if ratio is None else f"{ratio:>9.1f} x") + refused, flush=True)


@contextmanager
def _attack(kind: str, socket: Path, place: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "bench.attacker", kind, "--socket", str(socket), "--uid", str(_ATTACKER)]
    with (
        (place / "attacker.log").open("wb") as log,
        subprocess.Popen(  # noqa: S603 - our own module
            tethered(command), stdout=subprocess.PIPE, stderr=log
        ) as attacker,
    ):
        try:
            cast(IO[bytes], attacker.stdout).readline()
            yield
        finally:
            attacker.kill()
