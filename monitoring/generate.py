"""`make docs`: write what Prometheus and Grafana read from the tables of docs/monitoring.md.

A test fails when the files are not what this writes.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "monitoring.md"
MADE = "Made by `make docs` from the tables of docs/monitoring.md."
WIDTH, HEIGHT, COLUMNS = 8, 7, 24  # of a panel, and of the dashboard, in Grafana's grid


def table(heading: str) -> list[dict[str, str]]:
    """Return the rows of the first table under a heading of the page, by the names of their columns."""
    section = PAGE.read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    block = next(block for block in section.split("\n\n") if block.lstrip().startswith("|"))
    cells = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in block.strip().splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def scrapes() -> str:
    """Return prometheus.yaml."""
    jobs = "".join(
        f"  - job_name: {json.dumps(row['job'])}\n    static_configs:\n      - targets: [{json.dumps(row['target'])}]\n"
        for row in table("What is scraped")
    )
    return f"# {MADE}\n\nrule_files:\n  - postroom.rules.yaml\n\nscrape_configs:\n{jobs}"


def rules() -> str:
    """Return postroom.rules.yaml."""
    alerts = "".join(
        f"      - alert: {row['alert']}\n"
        f"        expr: {json.dumps(row['query'])}\n"
        f"        for: {row['for']}\n"
        f"        labels:\n"
        f"          severity: {row['severity']}\n"
        f"        annotations:\n"
        f"          summary: {json.dumps(row['what it means'])}\n"
        f"          command: {json.dumps(row['first command'])}\n"
        for row in table("Alerts")
    )
    return f"# {MADE}\n\ngroups:\n  - name: postroom\n    rules:\n{alerts}"


def dashboard() -> str:
    """Return dashboard.json."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row, queries in groupby(table("Dashboard"), key=lambda each: each["row"]):
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": row, "collapsed": False, "gridPos": place, "panels": []})
        top += 1
        shown = [list(group) for _, group in groupby(queries, key=lambda each: each["panel"])]
        for number, each in enumerate(shown):
            down, across = divmod(number, COLUMNS // WIDTH)
            place = {"x": across * WIDTH, "y": top + down * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(_panel(each, place))
        top += -(-len(shown) // (COLUMNS // WIDTH)) * HEIGHT
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    whole = {
        "uid": "postroom",
        "title": "Postroom",
        "description": MADE,
        "tags": ["postroom"],
        "schemaVersion": 38,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": [source]},
        "panels": [{"id": number, **panel} for number, panel in enumerate(panels, 1)],
    }
    return json.dumps(whole, indent=2, ensure_ascii=False) + "\n"


def _panel(queries: Sequence[dict[str, str]], place: dict[str, int]) -> dict[str, Any]:
    """Return a panel with a line for each query, all of one unit."""
    (unit,) = {each["unit"] for each in queries}
    source = {"type": "prometheus", "uid": "${source}"}
    targets = [
        {"refId": chr(ord("A") + number), "datasource": source, "expr": each["query"], "legendFormat": each["legend"]}
        for number, each in enumerate(queries)
    ]
    return {
        "type": "timeseries",
        "title": queries[0]["panel"],
        "datasource": source,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0} if unit != "s" else {"unit": unit}, "overrides": []},
        "targets": targets,
    }


FILES = {"prometheus.yaml": scrapes, "postroom.rules.yaml": rules, "dashboard.json": dashboard}

if __name__ == "__main__":
    for name, made in FILES.items():
        (FOLDER / name).write_text(made(), "utf-8")
