"""An installation on a screen: what is wrong first, each with the command that helps next, then what there is.

On a terminal it has colours (unless `NO_COLOR` is set) and folds at its width; in a pipe it is plain and whole.
"""

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cli.installation import Place, Sight, look
from cli.output import draw_table, fold_command, folded, json_line, line_width, note, styled
from postroom._wire.programs import Program, hour_in_words
from postroom._wire.unpublished import Durable
from postroom._wire.words import ago, counted

_ROWS: Final = 10  # of a table on a terminal
_BARS: Final = " ▁▂▃▄▅▆▇█"
_PROCESSES: Final = ("PROCESS", "STATE", "PID", "BACKLOG", "ADDRESS")
_PROGRAMS: Final = ("PROGRAM", "HOST", "VERSION", "WAITING", "DEAD", "OLDEST", "DISK", "CLOCK", "STATE")
_CONSUMERS: Final = ("CONSUMER", "STREAM", "WAITING", "IN HAND", "OLDEST", "SEEN", "STATE")


def show_status(place: Place, *, as_json: bool, hour: bool = False) -> None:
    """Show an installation, or its last hour; raises `SystemExit` with the code that says how it is, if not well."""
    sight = asyncio.run(look(place, hour=hour))
    if as_json:
        things = sight.minutes if hour else (*sight.processes, *sight.programs, *sight.consumers, *sight.troubles)
        for thing in things:
            json_line(thing)
        troubles = [f"{trouble.thing}: {trouble.what}" for trouble in sight.troubles] if hour else []
        for said in (*troubles, *sight.unseen):
            note(said)
    else:
        for text in Screen().hour(sight) if hour else Screen().installation(sight):
            sys.stdout.write(text + "\n")
    if sight.exit_code:
        raise SystemExit(sight.exit_code)


class Screen:
    """How wide the lines are, and how many rows a table has."""

    def __init__(self, rows: int = _ROWS) -> None:
        self._width = line_width()
        self._rows = rows if sys.stdout.isatty() else sys.maxsize

    def installation(self, sight: Sight) -> Iterator[str]:
        """Yield the lines of all that was seen."""
        yield from self.troubles(sight)
        if sight.processes:
            yield ""
            yield from self._table(_PROCESSES, [_process(row) for row in sight.processes])
        if sight.programs:
            yield ""
            yield from self.programs(sight.programs)
        if sight.consumers:
            yield ""
            yield from self.consumers(sight.consumers)
        for one in sight.unseen:
            yield from self.fold(f"({one})")

    def troubles(self, sight: Sight) -> Iterator[str]:
        """Yield what is wrong, and what there is."""
        if not sight.troubles:
            yield styled("all is well", "well")
        for trouble in sight.troubles[: self._rows]:
            yield from self.fold(f"{trouble.thing}: {trouble.what}", "", "  ", trouble.level)
            for line in fold_command(trouble.help, self._width, "    "):
                yield styled(line, "help")
        yield from self._more(len(sight.troubles))
        kinds = Counter(one.kind for one in sight.programs) + Counter(consumer=len(sight.consumers))
        if kinds:
            yield ", ".join(counted(count, kind) for kind, count in sorted(kinds.items()))

    def programs(self, programs: Sequence[Program]) -> Iterator[str]:
        """Yield a table of them, the worst first."""
        worst = sorted(programs, key=lambda one: (not one.away, one.status == "ok", not one.dead, one.kind, one.title))
        yield from self._table(_PROGRAMS, [_program(one) for one in worst])

    def consumers(self, consumers: Sequence[Durable]) -> Iterator[str]:
        """Yield a table of them, the worst first."""
        worst = sorted(consumers, key=lambda one: (one.paused is None, one.asks, -one.waiting, one.consumer))
        yield from self._table(_CONSUMERS, [_consumer(one) for one in worst])

    def hour(self, sight: Sight) -> Iterator[str]:
        """Yield what happened in the last hour, a column for each minute; below it what is wrong."""
        minutes, pasts = sight.minutes, [one.past for one in sight.consumers if one.past]
        if minutes:
            yield styled(f"{minutes[0].at:%H:%MZ} to {minutes[-1].at:%H:%MZ}, a column for each minute", "head")
            said = hour_in_words(minutes)
            for name in ("accepted", "handled", "dead_lettered"):
                caption = f"{name.replace('_', '-')}: {said[name]}"
                yield from self._bars(caption, [getattr(one, name) for one in minutes])
            waiting = [sum(each) for each in zip(*pasts, strict=True)] or [0]
            yield from self._bars(f"waiting for consumers: {waiting[-1]:,} now, at most {max(waiting):,}", waiting)
            for name in ("p50", "p99"):
                caption = f"until handled, {name}: {said[name]}"
                yield from self._bars(caption, [getattr(one, name) or 0 for one in minutes])
            yield ""
        yield from self.troubles(sight)
        for one in sight.unseen:
            yield from self.fold(f"({one})")

    def _bars(self, caption: str, heights: Sequence[float]) -> Iterator[str]:
        """Yield a caption, and below it a bar for each number that is not zero."""
        yield caption
        if most := max(heights):
            steps = [math.ceil(height / most * (len(_BARS) - 1)) for height in heights]
            yield styled("".join(_BARS[step] for step in steps).rstrip(), "help")

    def _table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
        filled = [number for number in range(len(columns)) if any(row[number] not in (None, "") for row in rows)]
        cells = ([row[number] for number in filled] for row in rows[: self._rows])
        if filled:
            yield from draw_table([columns[number] for number in filled], cells, self._width)
        yield from self._more(len(rows))

    def _more(self, count: int) -> Iterator[str]:
        if count > self._rows:
            yield f"… and {count - self._rows} more (--json shows all)"

    def fold(self, text: str, first: str = "", below: str = "  ", style: str | None = None) -> list[str]:
        """Fold a text to the width, in a style."""
        return folded(text, self._width, first, below, style)


def _process(row: dict[str, Any]) -> list[Any]:
    backlog = ", ".join(f"{what}: {count:,}" for what, count in row.get("backlog", {}).items() if count)
    return [row["process"], row["state"], row.get("pid"), row.get("problem") or backlog or None, row.get("address")]


def _program(one: Program) -> list[Any]:
    disk = None if one.disk_free is None else f"{one.disk_free / 1024**3:.0f}G"
    state = f"away {ago(one.reported_at)}" if one.away else "paused" if one.relay == "paused" else one.status
    clock = f"{round(one.clock_seconds)}s"
    return [one.title, one.host, one.version, one.waiting, one.dead, ago(one.oldest_at), disk, clock, state]


def _consumer(one: Durable) -> list[Any]:
    state = one.state.partition(":")[0]
    return [one.consumer, one.stream, one.waiting, one.in_hand, ago(one.oldest_at), ago(one.seen_at), state]
