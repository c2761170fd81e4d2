"""`delivery-report`: how long deliveries took, as percentiles by mesh, destination, stage and day, and as a picture.

Two stages are measured, each from the accept on: until a message was `published` into JetStream, and until a consumer
had `handled` it. Writes OUTPUT/latency.parquet and OUTPUT/latency.png, which each run replaces.
"""

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import pyarrow as pa
from pyarrow import parquet
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it

from pipeline.runner import History, Outcome, local_directory, replacement, submitted, sweep
from pipeline.tables import columns, read_ranges, snapshot, source_options
from postroom.spark.history_options import read_options

_ROWS: Final = columns("day string, mesh string, to string, stage string, milliseconds double")
_PANELS: Final = 6
_COLUMNS: Final = 2
_COLOURS: Final = {"published": "#2f6f8f", "handled": "#c8553d"}
_BESIDE: Final = {"published": timedelta(hours=-2), "handled": timedelta(hours=2)}  # where there is a single day
_INK: Final = "#30343b"
_FAINT: Final = "#d9dce1"
_MARKS: Final = 5  # days that are named on an axis
_DPI: Final = 150
_PERCENTILES: Final = (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))


class Latency(NamedTuple):
    """How long one day's deliveries to one destination took; percentiles in milliseconds."""

    mesh: str
    to: str
    stage: str
    day: str
    deliveries: int
    p50: float
    p90: float
    p99: float


class Options(History, kw_only=True):
    """The options of `delivery-report`."""

    output: Annotated[str, msgspec.Meta(description="the directory for latency.parquet and latency.png")]


def run(spark: SparkSession, options: Options) -> Outcome:
    """Measure, write the table, draw the picture."""
    directory = local_directory(options.output)
    directory.mkdir(parents=True, exist_ok=True)  # before the measuring, which may take long
    latencies = measure(spark, options)
    picture = directory / "latency.png"
    sweep(directory)
    with replacement(directory / "latency.parquet") as fresh:
        schema = pa.schema(
            [(name, pa.string()) for name in ("mesh", "to", "stage", "day")]
            + [("deliveries", pa.int64())]
            + [(name, pa.float64()) for name in ("p50", "p90", "p99")]
        )
        parquet.write_table(pa.Table.from_pylist([line._asdict() for line in latencies], schema=schema), fresh)
    with replacement(picture) as fresh:
        draw(latencies, fresh)
    slowest = {
        f"{line.to} {line.stage} on {line.day}": f"p50 {line.p50:.1f} ms, p99 {line.p99:.1f} ms"
        for line in sorted(latencies, key=lambda line: -line.p99)[:3]
    }
    deliveries = sum(line.deliveries for line in latencies if line.stage == "published")
    return Outcome({"deliveries": deliveries, **slowest, "picture": str(picture)})


def measure(spark: SparkSession, options: Options) -> list[Latency]:
    """Return the percentiles, by mesh, destination, stage and day."""
    wanted = read_options(source_options(options), streaming=False)
    with snapshot(options.database_url) as held:
        rows = read_ranges(spark, held, "latency_rows", _ROWS, wanted.mesh, wanted.since, wanted.until)
        days = rows.groupBy("mesh", "to", "stage", "day")
        percentiles = [F.percentile("milliseconds", share).alias(name) for name, share in _PERCENTILES]
        found = days.agg(F.count("*").alias("deliveries"), *percentiles).orderBy("mesh", "to", "stage", "day")
        return [Latency(*row) for row in found.collect()]


def draw(latencies: Sequence[Latency], file: Path) -> None:
    """Draw a panel for each of the busiest destinations into a PNG file: its median and slow tail by day.

    Without any delivery, it says so.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import
    from matplotlib.layout_engine import ConstrainedLayoutEngine  # noqa: PLC0415

    counts: Counter[str] = Counter()
    for line in latencies:
        counts[_name(line)] += line.deliveries
    wanted = [name for name, _ in counts.most_common(_PANELS)]
    rows = max(1, -(-len(wanted) // _COLUMNS))
    columns = min(_COLUMNS, max(1, len(wanted)))
    # inches, and shares of the figure
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.04, hspace=0.04)
    figure = Figure(figsize=(5.4 * columns + 0.6, 3.1 * rows + 1.1), layout=layout, facecolor="white")
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True).flatten()
    days = sorted({line.day for line in latencies if _name(line) in wanted})
    for panel, destination in zip(panels, wanted, strict=False):
        _draw_panel(panel, destination, [line for line in latencies if _name(line) == destination])
        # mark some of the days, the same in every panel, and leave room for the words after the last
        first, last = datetime.fromisoformat(days[0]), datetime.fromisoformat(days[-1])
        span = max((last - first).days, 1)
        marked = [datetime.fromisoformat(day) for day in days[:: -(-len(days) // _MARKS)]]
        panel.set_xlim(first - timedelta(days=max(0.05 * span, 0.2)), last + timedelta(days=0.32 * span))
        panel.set_xticks(marked, [f"{day.day} {day:%b}" for day in marked])
    for panel in panels[len(wanted) :]:
        panel.set_axis_off()
    _title(figure, latencies, len(wanted))
    figure.savefig(file, dpi=_DPI, format="png")


def _name(line: Latency) -> str:
    return f"{line.mesh}/{line.to}"


def _draw_panel(panel: Any, destination: str, lines: Sequence[Latency]) -> None:
    for stage, colour in _COLOURS.items():
        days = sorted((line for line in lines if line.stage == stage), key=lambda line: line.day)
        if days:
            _draw_stage(panel, stage, colour, days)
    from matplotlib.ticker import FuncFormatter  # noqa: PLC0415 - as above

    panel.set_title(destination, loc="left", fontsize=10.5, color=_INK, fontweight="bold")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(FuncFormatter(_duration))
    panel.yaxis.set_minor_formatter(FuncFormatter(lambda _value, _position: ""))
    panel.grid(axis="y", color=_FAINT, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.tick_params(which="both", length=0, labelsize=8.5, labelcolor=_INK, labelleft=True)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(_FAINT)


def _draw_stage(panel: Any, stage: str, colour: str, days: Sequence[Latency]) -> None:
    """Draw the median as a line, p50 to p99 as a band; of a single day a point with a bar, the stages side by side."""
    beside = _BESIDE[stage] if len(days) == 1 else timedelta()
    at = [datetime.fromisoformat(line.day) + beside for line in days]
    p50, p99 = [line.p50 for line in days], [line.p99 for line in days]
    if len(days) == 1:
        panel.vlines(at, p50, p99, color=colour, alpha=0.35, linewidth=7)
        panel.scatter(at, [line.p90 for line in days], color=colour, marker="_", s=60)
    panel.fill_between(at, p50, p99, color=colour, alpha=0.16, linewidth=0)
    panel.plot(at, [line.p90 for line in days], color=colour, linewidth=0.9, linestyle=(0, (4, 2)))
    panel.plot(at, p50, color=colour, linewidth=2, marker="o", markersize=3.5, label=stage)
    panel.annotate(
        f"{stage}  {_duration(p50[-1], None)}",
        (at[-1], p50[-1]),
        xytext=(7, 0),
        textcoords="offset points",
        va="center",
        fontsize=8.5,
        color=colour,
    )


def _title(figure: Any, latencies: Sequence[Latency], panels: int) -> None:
    count = sum(line.deliveries for line in latencies if line.stage == "published")
    if not panels:
        figure.suptitle("No delivery in this time", color=_INK, fontsize=13, fontweight="bold")
        return
    days = sorted({line.day for line in latencies})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    figure.suptitle(f"From accept to delivery, {when}", x=0.01, ha="left", color=_INK, fontsize=13.5, fontweight="bold")
    figure.supxlabel(
        f"{count:,} deliveries; line: median, dashes: p90, band: up to p99; days in UTC, logarithmic scale",
        x=0.01,
        ha="left",
        color=_INK,
        fontsize=8.5,
    )


def _duration(milliseconds: float, _position: Any) -> str:
    """Format a duration: `0.4 ms`, `35 ms`, `2.5 s`, `3 min`."""
    if milliseconds < 1000:  # noqa: PLR2004 - a second
        return f"{milliseconds:.2g} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"  # noqa: PLR2004 - two digits
    seconds = milliseconds / 1000
    return f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.3g} min"  # noqa: PLR2004 - two minutes


if __name__ == "__main__":
    submitted("delivery-report")
