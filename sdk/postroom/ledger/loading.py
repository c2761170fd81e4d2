"""Finding the flow that `module:flow` names."""

from __future__ import annotations

from postroom.chassis.exits import Exit, Fatal
from postroom.chassis.runtime import load_named
from postroom.flow import Flow, InvalidFlow, check_flow


def load_flow(name: str) -> Flow:
    """Import `module:flow`, also from the current directory; raises `Fatal` with what its author has to change."""
    flow = load_named(name, what="a flow", example="module:flow, as in nightly_export:flow")
    try:
        check_flow(flow)
    except InvalidFlow as error:
        raise Fatal(Exit.CONFIG, str(error)) from error
    found: Flow = flow
    return found
