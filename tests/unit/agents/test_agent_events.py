"""Where an agent's events go is a template of its class."""

from __future__ import annotations

import pytest

from postroom.agent import Agent, Envelope, InvalidAgent, check_agent, fill_event_subject


class Scribe(Agent):
    subjects = ("cmd.{tenant}.>",)
    event_subject = "evt.{tenant}.{workspace}.{agent}.{type}"

    async def receive(self, envelope: Envelope) -> None:
        del envelope


def test_places_are_filled_in() -> None:
    check_agent(Scribe)
    assert fill_event_subject(Scribe, "default", "demo", "written", 2) == "evt.default.demo.scribe.written"
    assert fill_event_subject(Agent, "sea", "demo", "written", 2) == "sea.event.written.v2"


@pytest.mark.parametrize(
    "template",
    ["", "evt.{tenant}", "evt.{type}.>", "evt.*.{type}", "evt..{type}", "evt.{kind}", "evt {type}", ".{type}", "{"],
)
def test_what_makes_no_subject_is_refused(template: str) -> None:
    agent = type("Scribe", (Scribe,), {"event_subject": template})
    with pytest.raises(InvalidAgent, match="event_subject"):
        check_agent(agent)
