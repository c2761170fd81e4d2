"""When a program exports spans, as OpenTelemetry's own variables say it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from postroom.chassis.tracing import wanted

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
PROGRAM = """
from postroom.chassis.tracing import exporting
with exporting("postroom-daemon"):
    from opentelemetry import trace
    print(trace.get_tracer_provider().resource.attributes["service.name"])
"""


@pytest.mark.parametrize(
    ("variables", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        (ENDPOINT, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}, True),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "TRUE"}, False),
        (ENDPOINT | {"OTEL_SDK_DISABLED": "false"}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "none"}, False),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": ""}, True),
        (ENDPOINT | {"OTEL_TRACES_EXPORTER": "console, otlp"}, True),
    ],
)
def test_an_endpoint_switches_spans_on_and_what_else_is_said_can_switch_them_off(
    variables: dict[str, str], *, on: bool
) -> None:
    assert wanted(variables) == on


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "postroom-daemon"),
        ({"OTEL_SERVICE_NAME": "mail"}, "mail"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=room"}, "room"),
    ],
)
def test_a_service_has_the_programs_name_unless_it_is_given_another(variables: dict[str, str], name: str) -> None:
    environment = {**os.environ, **ENDPOINT, **variables}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == name


@pytest.mark.parametrize(
    "variable", ["OTEL_BSP_MAX_QUEUE_SIZE=100", "OTEL_BSP_SCHEDULE_DELAY=-1", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT=many"]
)
def test_variables_that_opentelemetry_refuses_cost_spans_and_not_the_program(variable: str) -> None:
    program = (
        "from postroom._wire import spans\nfrom postroom.chassis.tracing import exporting\n"
        "with exporting('postroom-daemon'):\n    print(spans.wanted())"
    )
    environment = {**os.environ, **ENDPOINT, **dict([variable.split("=")])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tracing_not_configured" in done.stdout
    assert done.stdout.splitlines()[-1] == "False"


def test_programs_that_are_not_asked_for_spans_load_nothing_and_make_none() -> None:
    program = (
        "import sys, daemon.__main__, postroom.worker.process\nprint('opentelemetry' in sys.modules)\n"
        "import broker.server, opentelemetry.trace\n"  # which redis loads where it is installed
        "from postroom._wire import spans\nprint(spans.wanted())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\nFalse\n"
