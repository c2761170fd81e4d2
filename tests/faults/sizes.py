"""How much of each goal a column runs: the one table of numbers."""

from __future__ import annotations

from typing import Final, NamedTuple


class Size(NamedTuple):
    """`trials` is what the bound is computed from; `load` is what is going on meanwhile, as the goal understands it."""

    trials: int
    load: int = 0


class Sizes(NamedTuple):
    """The two columns, how long a run of the first may take, and what the control needs to fail."""

    ci: Size
    soak: Size
    minutes: float  # of the column for CI on two busy cores; the other has as many times more as it has trials
    control: Size | None = None


SIZES: Final[dict[str, Sizes]] = {
    "F1": Sizes(Size(200, 50_000), Size(1_000, 500_000), 15, Size(5, 1_000)),  # kills, acknowledged
    "F2": Sizes(Size(1), Size(1), 15),  # it counts the operations itself
    "F3": Sizes(Size(1), Size(1), 30),
    "F4": Sizes(Size(20, 2_000), Size(100, 10_000), 5, Size(3, 300)),  # cuts, acknowledged
    "F5": Sizes(Size(50, 10_000), Size(300, 100_000), 10),  # pairs, acknowledged
    "F6": Sizes(Size(36, 20_000), Size(450, 300_000), 12, Size(8, 500)),  # restarts, acknowledged
    "F7": Sizes(Size(2_000), Size(10_000), 5, Size(100)),  # ids
    "F8": Sizes(Size(1, 2_500), Size(1, 25_000), 5),  # committed ids, retried under each of four faults
    "F9": Sizes(Size(10, 1_000), Size(50, 10_000), 8, Size(2, 100)),  # losses, accepted
    "F10": Sizes(Size(1_000, 10_000), Size(10_000, 100_000), 6),  # poisonous messages, good ones
    "F11": Sizes(Size(200), Size(2_000), 6, Size(20)),  # steps taken over
    "F12": Sizes(Size(1), Size(1), 5),
    "F13": Sizes(Size(100), Size(1_000), 6),  # kills with 100 k rows; a fifth as many with 3 M
    "F14": Sizes(Size(20, 5_000), Size(200, 50_000), 5),  # full disks, acknowledged
    "F15": Sizes(Size(200, 400), Size(2_000, 2_000), 6),  # random damages, rows
    "F16": Sizes(Size(100_000), Size(2_000_000), 6),  # requests
    "F17": Sizes(Size(9, 30), Size(9, 300), 10, Size(1, 10)),  # attacks, seconds of each
    "F17b": Sizes(Size(8, 30), Size(8, 300), 10),
    "F18": Sizes(Size(100, 10_000), Size(1_000, 100_000), 6),  # jumps, acknowledged
    "F19": Sizes(Size(2_000), Size(100_000), 25, Size(40)),  # courses
    "F20": Sizes(Size(0), Size(60, 1_000_000), 2.5),  # minutes, acknowledged; none in the first column
    "F21": Sizes(Size(20, 50), Size(200, 500), 10, Size(20, 20)),  # replacements, accepted after each
    "F22": Sizes(Size(1, 50), Size(1, 2_000), 6),  # messages before each restore, and after it
}
