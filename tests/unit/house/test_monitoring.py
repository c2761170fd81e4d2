"""What Prometheus and Grafana read is what docs/monitoring.md says, and asks for what there is."""

import re
import runpy
from pathlib import Path

import pytest
from support.terminal import Terminal

ROOT = Path(__file__).parents[3]
GENERATOR = runpy.run_path(str(ROOT / "monitoring" / "generate.py"))
ALERTS = GENERATOR["table"]("Alerts")
PANELS = GENERATOR["table"]("Dashboard")
EXPOSED = [*ROOT.glob("*/metrics.py"), ROOT / "sdk/postroom/worker/metrics.py"]
DERIVED = re.compile(r"_(?:total|bucket|sum|count)$")  # what Prometheus' client makes of a counter and a histogram


@pytest.mark.parametrize("name", GENERATOR["FILES"])
def test_the_files_are_what_the_tables_say(name: str) -> None:
    assert (ROOT / "monitoring" / name).read_text() == GENERATOR["FILES"][name](), "run `make docs`"


def test_every_alert_has_a_name_of_its_own_a_severity_and_a_time() -> None:
    assert len({row["alert"] for row in ALERTS}) == len(ALERTS) > 20
    for row in ALERTS:
        assert re.fullmatch(r"Postroom[A-Z]\w+", row["alert"])
        assert row["severity"] in {"critical", "warning"}
        assert re.fullmatch(r"\d+[mh]", row["for"])
        assert row["what it means"].endswith(".")


@pytest.mark.parametrize("query", sorted({row["query"] for row in ALERTS + PANELS}))
def test_every_metric_that_a_query_names_is_one_of_ours(query: str) -> None:
    sources = "\n".join(file.read_text() for file in EXPOSED)
    for metric in re.findall(r"\bpostroom_[a-z]+_[a-z_]+", query):
        program, _, name = DERIVED.sub("", metric).removeprefix("postroom_").partition("_")
        short = name.removeprefix("durable_")  # those of durables are made in a loop
        assert re.search(rf'["}}_]{short}"', sources), metric
        assert program in {"daemon", "broker", "worker", "consumer", "agent"}


@pytest.mark.parametrize("command", sorted({row["first command"] for row in ALERTS}))
def test_the_first_command_of_an_alert_exists(command: str) -> None:
    program, *words = command.split()
    if program == "postroom":
        assert Terminal().run(*words, "--help").code == 0
    else:
        assert program in {"df", "timedatectl"}
