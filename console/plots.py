"""Plots of the last hour: paths of SVG, drawn here, so that they need no script.

A path is as wide as there are minutes, and `HEIGHT` high; the page stretches it. A table says the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

from console.views import number
from postroom._wire.programs import LATENCIES, Minute
from postroom._wire.words import span

HEIGHT: Final = 60
_GAP: Final = 0.2  # between two bars, where a minute is 1 wide
_LEAST: Final = 0.001  # seconds, at the foot of the scale of latencies
_DECADES: Final = math.log10(LATENCIES[-1] / _LEAST)


class Plots(NamedTuple):
    """Paths and captions, by what they show."""

    paths: dict[str, str]
    captions: dict[str, str]


def draw(minutes: Sequence[Minute]) -> Plots:
    """Draw what was counted in each minute as bars, and how long it took as lines on a logarithmic scale."""
    counts = {
        "accepted": [one.accepted for one in minutes],
        "handled": [one.handled for one in minutes],
        "dead_lettered": [one.dead_lettered for one in minutes],
    }
    latencies = {"p50": [one.p50 for one in minutes], "p99": [one.p99 for one in minutes]}
    paths = {name: bars(found) for name, found in counts.items()}
    captions = {
        name: f"{number(sum(found))}, at most {number(max(found))} in a minute" if any(found) else "none"
        for name, found in counts.items()
    }
    for name, found in latencies.items():
        paths[name] = _line(found)
        known = [seconds for seconds in found if seconds is not None]
        captions[name] = f"{span(known[-1])}, at most {span(max(known))}" if known else "-"
    return Plots(paths, captions)


def bars(counts: Sequence[int]) -> str:
    """Return a bar for each count."""
    most = max(counts, default=0)
    return "".join(
        f"M{place + _GAP / 2:.1f} {HEIGHT}v-{HEIGHT * count / most:.1f}h{1 - _GAP:.1f}V{HEIGHT}z"
        for place, count in enumerate(counts)
        if count
    )


def _line(latencies: Sequence[float | None]) -> str:
    """Return a line that is interrupted where nothing was handled."""
    pieces, joined = [], False
    for place, seconds in enumerate(latencies):
        if seconds is not None:
            height = HEIGHT * math.log10(max(seconds, _LEAST) / _LEAST) / _DECADES
            pieces.append(f"{'L' if joined else 'M'}{place} {HEIGHT - height:.1f}h1")
        joined = seconds is not None
    return "".join(pieces)
